"""edge-sim sweep: one run.toml with every combination of some settings, each with several seeds."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from fleetune.coordinator.reports import readable
from fleetune.coordinator.reports.markup import Plot
from fleetune.coordinator.reports.metrics import PERSONAL_MEAN
from fleetune.coordinator.reports.outcome import better_by
from fleetune.coordinator.reports.report import paint
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import plain
from fleetune.tools.compare.compare import as_text, leave, unpainted
from fleetune.tools.compare.comparison import Comparison, Contender
from fleetune.tools.compare.contenders import seeds_of
from fleetune.tools.compare.page import ComparisonPage, write_comparison
from fleetune.tools.compare.side_by_side import Outcome, Question, Work, side_by_side
from fleetune.tools.compare.sweep_tables import (
    combinations_csv,
    in_words,
    short_names,
    sweep_summary,
    sweep_table,
)
from fleetune.tools.compare.tables import rounds_csv, runs_csv

MOST_RUNS = 100_000
DRAWN = 8  # combinations whose curves are drawn; more are a tangle
_SAID = "--over {}: use section.key=value,value, e.g. training.learning_rate=0.01,0.05"
_INSTEAD = {"run.seed": "--seeds", "run.name": "a copy of the run file", "method": "method.KEY"}


@dataclass(frozen=True)
class Axis:
    """A setting and the values that it takes in turn."""

    key: str
    values: tuple[Any, ...]


def sweep(
    settings: RunSettings,
    axes: Sequence[Axis],
    work: Work,
    *,
    seeds: int | Sequence[int],
    target: float | None,
) -> Comparison:
    """Play every combination, and leave tables, pictures, a page and summary.json; the best comes first.

    Args:
        settings: of the run file; `run.seed` is the first seed.
        axes: what is combined.
        work: how; in its folder each run is kept in COMBINATION/seed-N.
        seeds: how many, or which.
        target: score whose cost is asked for; None: 95 % of what the best combination ended with.

    Raises:
        SettingError: a combination is none that there can be, or there are too many; nothing was played.
        FleetuneError: runs could not be played; all others are in the report.
        KeyboardInterrupt: interrupted; what is finished is in the report.
    """
    seeds = seeds_of(settings, seeds)
    question = Question(settings, combinations(settings, axes, len(seeds)), seeds, target, "combination")
    return ranked(side_by_side(question, work, partial(_report, settings, axes, work)))


def axes_of(over: Sequence[str] | Mapping[str, Sequence[Any]]) -> list[Axis]:
    """What `--over` says, `section.key=value,value` each, the values as in TOML, bare words being text; or
    values by `section.key`.

    Raises:
        SettingError: one is neither, names a setting twice, or a value twice.
    """
    if isinstance(over, Mapping):
        axes = [Axis(key, tuple(map(plain, values))) for key, values in over.items()]
    else:
        axes = [_axis(one) for one in over]
    if not axes:
        raise SettingError("--over: name at least one setting, e.g. --over training.learning_rate=0.01,0.05")
    keys = [axis.key for axis in axes]
    for axis in axes:
        if axis.key in _INSTEAD or axis.key.startswith("compare."):
            raise SettingError(f"--over {axis.key}: use {_INSTEAD.get(axis.key, 'edge-sim compare')} instead")
        if keys.count(axis.key) > 1:
            raise SettingError(f"--over {axis.key} stands there twice; give all its values at once")
        if not axis.values:
            raise SettingError(_SAID.format(axis.key))
        words = [in_words(one) for one in axis.values]
        twice = next((one for one in words if words.count(one) > 1), None)
        if twice is not None:
            raise SettingError(f"--over {axis.key}: {twice} stands there twice")
    return axes


def _axis(text: str) -> Axis:
    key, separator, values = text.partition("=")
    key = key.strip()
    if not separator or "." not in key:
        raise SettingError(_SAID.format(text))
    try:
        return Axis(key, tuple(tomllib.loads(f"values = [{values}]")["values"]))
    except tomllib.TOMLDecodeError:
        return Axis(key, tuple(_value(one.strip()) for one in values.split(",") if one.strip()))


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def combinations(settings: RunSettings, axes: Sequence[Axis], num_seeds: int) -> list[Contender]:
    """A contender for each combination, the values of the last axis changing first.

    Raises:
        SettingError: there are too many.
    """
    num_runs = prod(len(axis.values) for axis in axes) * num_seeds
    if num_runs > MOST_RUNS:
        raise SettingError(f"--over: {num_runs:,} runs; at most {MOST_RUNS:,}: give fewer values or seeds")
    names = short_names([axis.key for axis in axes])
    found = []
    for values in product(*(axis.values for axis in axes)):
        changes = dict(zip((axis.key for axis in axes), values, strict=True))
        name = changes.pop("method.name", settings.method["name"])
        own = settings.method if name == settings.method["name"] else {"name": name}
        label = ", ".join(f"{short}={in_words(one)}" for short, one in zip(names, values, strict=True))
        found.append(Contender(label, own, changes))
    return found


def ranked(comparison: Comparison) -> Comparison:
    """With the best combination first: by the personal models' mean over seeds; who has none comes last."""
    sign = better_by(comparison.score)

    def place(contender: Contender) -> float:
        found = comparison.spread(contender.label, PERSONAL_MEAN)
        return float("inf") if found is None else -sign * found.mean

    return replace(comparison, contenders=tuple(sorted(comparison.contenders, key=place)))


def _report(settings: RunSettings, axes: Sequence[Axis], work: Work, outcome: Outcome) -> None:
    comparison, console = ranked(outcome.comparison), work.console
    keys = [axis.key for axis in axes]
    files = {
        "sweep.csv": combinations_csv(comparison, keys),
        "runs.csv": runs_csv(comparison),
        "rounds.csv": rounds_csv(comparison),
        "summary.json": sweep_summary(comparison, {axis.key: axis.values for axis in axes}, outcome.failed),
    }
    plots: list[Plot] = []
    remark = unpainted(outcome)
    if not remark:
        from fleetune.tools.compare.plots import draw
        from fleetune.tools.compare.sweep_plot import score_by_setting

        foremost = replace(comparison, contenders=tuple(comparison.shown[:DRAWN]))
        plots, pngs = paint(
            lambda theme: {**score_by_setting(comparison, keys, theme), **draw(foremost, theme)}
        )
        files.update(pngs)
        if len(comparison.shown) > DRAWN:
            remark = f"Curves are of the best {DRAWN} of {len(comparison.shown)} combinations."
    page = ComparisonPage(comparison, plots, outcome.failed, as_text(settings), remark)
    files["report.html"] = write_comparison(page)
    for picture in work.folder.glob("score-by-*.png"):  # of settings that varied in another sweep
        picture.unlink()
    leave(files, work.folder)
    console.print(sweep_table(comparison, keys))
    for name in ("report.html", "sweep.csv", "summary.json"):
        console.print(f"  {work.folder / name}", soft_wrap=True)
    console.print(f"[bold]{readable.printable(comparison.shown[0].label)}[/bold] does best")
