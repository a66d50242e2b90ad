"""Tables and picture of the finished runs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.robust.cells import ATTACKS, CLEAN, HAR, RULES, SETTINGS, SHARES
from fleetune.coordinator.reports.pictures import theme
from fleetune.protocols.student_t import student_t_quantile
from fleetune.tools.compare.sheets import markdown_table

Run = Mapping[str, Any]
Rows = list[list[str | float | int | None]]
MOST_LOSS, LEAST_BOUND = -0.003, -0.01  # of the default: mean difference, and the end of its interval
_REPEAT = "python -m benchmarks.robust --data DATA --stages first,default,shares,settings,seeds,papers"
_NAMES = {"alpha-0.1": "Fashion-MNIST, alpha 0.1", HAR: "UCI HAR by person"}


def write(runs: Sequence[Run], folder: Path) -> str:
    """Write the tables as docs/results take them, and the picture; return the tables as text."""
    tables = {
        "robust-attacks": (["data", "hostile", "attack", *RULES, "seeds"], attacks(runs)),
        "robust-default": (
            ["data", "score", "seeds", "pairs", "difference, points", "95 % interval", "95 % over seeds"],
            default(runs),
        ),
        "robust-methods": (["method", "attack", "rule", "accuracy", "backdoor", "seeds"], methods(runs)),
    }
    texts = []
    for name, (head, rows) in tables.items():
        found = {
            "columns": head,
            "rows": rows,
            "repeat": _REPEAT,
            "date": datetime.now(UTC).strftime("%Y-%m"),
        }
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        joined = "\n".join(markdown_table(head, [list(map(_text, row)) for row in rows]))
        texts.append(f"{name}\n\n{joined}")
    picture(runs).savefig(folder / "robust.png", dpi=150)
    return "\n\n".join(texts)


def attacks(runs: Sequence[Run]) -> Rows:
    """Return the accuracy of the shared model in percent, for each attack and rule with FedAvg.

    A backdoor's success stands behind the accuracy.
    """
    rows: Rows = []
    for setting in SETTINGS:
        for attack, share in [(CLEAN, 0.0), *((attack, share) for share in SHARES for attack in ATTACKS)]:
            found = [_of(runs, "fedavg", setting, attack, share, rule) for rule in RULES]
            if any(found):
                counts = [len(one) for one in found if one]
                seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
                rows.append([setting, f"{share:.0%}", attack, *map(_scores, found), seeds])
    return rows


def _of(runs: Iterable[Run], method: str, setting: str, attack: str, share: float, rule: str) -> list[Run]:
    wanted = (method, setting, attack, share, rule)
    keys = ("method", "setting", "attack", "share", "rule")
    return [run for run in runs if tuple(run[key] for key in keys) == wanted]


def _scores(found: Sequence[Run]) -> str | None:
    if not found:
        return None
    accuracy = f"{100 * mean(run['accuracy'] for run in found):.1f}"
    succeeded = [run["backdoor"] for run in found if run["attack"] == "backdoor"]
    return f"{accuracy}, backdoor {100 * mean(succeeded):.0f}" if succeeded else accuracy


def default(runs: Sequence[Run]) -> Rows:
    """Return the difference of `clip` to `none` on honest unequal fleets, paired by seed and device."""
    rows: Rows = []
    for setting in (*_NAMES,):
        for score in ("before", "personal"):
            pairs = [
                [theirs[score][device] - ours[score][device] for device in ours[score]]
                for ours in _of(runs, "fedavg", setting, CLEAN, 0.0, "none")
                for theirs in _of(runs, "fedavg", setting, CLEAN, 0.0, "clip")
                if theirs["seed"] == ours["seed"]
            ]
            if len(pairs) > 1:
                flat = [one for seed in pairs for one in seed]
                of_seeds = interval([mean(seed) for seed in pairs])
                what = "model that devices receive" if score == "before" else "personal model"
                size = len(pairs), len(flat), round(100 * mean(flat), 2)
                rows.append([_NAMES[setting], what, *size, _range(interval(flat)), _range(of_seeds)])
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean (Student's t)."""
    half = student_t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def _range(bounds: tuple[float, float]) -> str:
    return f"{100 * bounds[0]:.2f} to {100 * bounds[1]:.2f}"


def methods(runs: Sequence[Run]) -> Rows:
    """Return mean personal accuracy of honest devices and backdoor success, for the papers' methods."""
    rows: Rows = []
    of_papers = [run for run in runs if run["method"] != "fedavg"]
    for method, attack, rule in dict.fromkeys(
        (run["method"], run["attack"], run["rule"]) for run in of_papers
    ):
        key = (method, attack, rule)
        found = [run for run in of_papers if (run["method"], run["attack"], run["rule"]) == key]
        accuracy = mean(mean(run["personal"].values()) for run in found)
        succeeded = [run["backdoor_personal"] for run in found if "backdoor_personal" in run]
        success = round(100 * mean(succeeded), 1) if succeeded else None
        rows.append([*key, round(100 * accuracy, 1), success, len(found)])
    return rows


def picture(runs: Sequence[Run]) -> Figure:
    """Return the accuracy with each rule, and the backdoor's success, at 20 % hostile devices on IID data."""
    with rc_context(theme.SETTINGS):
        figure = Figure(figsize=(8.2, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(len(ATTACKS) + 1, 1.6))
        names = [CLEAN, *ATTACKS]
        shares = [0.0, *[0.2] * len(ATTACKS)]
        _bars(
            left,
            [
                [_of(runs, "fedavg", "iid", *one, rule) for one in zip(names, shares, strict=True)]
                for rule in RULES
            ],
            "accuracy",
        )
        left.set_xticks(range(len(names)), [name.replace("-", "\n", 1) for name in names])
        left.set_title("accuracy of the shared model, %")
        _bars(right, [[_of(runs, "fedavg", "iid", "backdoor", 0.2, rule)] for rule in RULES], "backdoor")
        right.set_xticks([0], ["backdoor"])
        right.set_title("success, %")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(RULES))
    return figure


def _bars(axes: Axes, by_rule: Sequence[Sequence[Sequence[Run]]], score: str) -> None:
    width = 0.8 / len(RULES)
    for number, (rule, cells) in enumerate(zip(RULES, by_rule, strict=True)):
        heights = [100 * mean(run[score] for run in found) if found else 0.0 for found in cells]
        places = [place + (number - (len(RULES) - 1) / 2) * width for place in range(len(cells))]
        axes.bar(places, heights, width, label=rule, color=theme.CONTENDERS[number])


def _text(cell: object) -> str:
    return "" if cell is None else str(cell)
