"""Results of the simulators: results.json, results.md and a picture."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.simulators.runs import Run
from fleetune.protocols.files import write_atomically

_HEAD = (
    "simulator",
    "runs",
    "a round, s",
    "of fleetune's",
    "processor a round, s",
    "first round after, s",
    "memory, MB",
    "accuracy, %",
)
_REFERENCE = "fleetune"


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One row for each simulator: medians over its runs; fastest first."""
    by_configuration: dict[str, list[Run]] = {}
    for one in runs:
        by_configuration.setdefault(one.configuration, []).append(one)
    found = [_row(name, own) for name, own in by_configuration.items()]
    ours = next((row["round_s"] for row in found if row["simulator"] == _REFERENCE), None)
    for row in found:
        row["times"] = None if ours is None else row["round_s"] / ours
    return sorted(found, key=lambda row: row["round_s"])


def _row(name: str, runs: list[Run]) -> dict[str, Any]:
    def middle(what: str) -> float:
        return float(median(getattr(one, what) for one in runs))

    return {
        "simulator": name,
        "runs": len(runs),
        "round_s": middle("round_s"),
        "round_processor_s": middle("round_processor_s"),
        "first_s": middle("first_s"),
        "memory_bytes": middle("memory_bytes"),
        "accuracy": middle("accuracy"),
    }


def markdown(workload: str, table: list[dict[str, Any]], missing: Mapping[str, str]) -> str:
    """Markdown table of a workload, with the reason for each missing simulator."""
    lines = [f"**{workload}**", "", f"| {' | '.join(_HEAD)} |", "|---|" + "--:|" * (len(_HEAD) - 1)]
    for row in table:
        cells = (
            row["simulator"],
            str(row["runs"]),
            f"{row['round_s']:.2f}",
            "\u2013" if row["times"] is None else f"{row['times']:.2f}",
            f"{row['round_processor_s']:.2f}",
            f"{row['first_s']:.1f}",
            f"{row['memory_bytes'] / 1e6:,.0f}",
            f"{100 * row['accuracy']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{name} is missing: {why}" for name, why in missing.items()]
    return "\n".join(lines) + "\n"


def write_results(
    runs: Mapping[str, list[Run]], missing: Mapping[str, str], machine: str, folder: Path
) -> str:
    """Write all files and return the tables."""
    tables = {workload: rows(own) for workload, own in runs.items()}
    text = "\n".join(markdown(workload, table, missing) for workload, table in tables.items())
    whole = {
        "machine": machine,
        "workloads": tables,
        "missing": dict(missing),
        "runs": [asdict(one) for own in runs.values() for one in own],
    }
    write_atomically(folder / "results.json", json.dumps(whole, indent=1).encode(), mode=None)
    write_atomically(folder / "results.md", f"{machine}\n\n{text}".encode(), mode=None)
    _draw(tables, folder / "results.png")
    return text


def _draw(tables: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the seconds of a round of each simulator."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(tables), 3.2), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for axis, (workload, table) in zip(axes, tables.items(), strict=True):
        names = [row["simulator"] for row in reversed(table)]
        colours = ["#1f6f50" if name.startswith(_REFERENCE) else "#9aa5ad" for name in names]
        bars = axis.barh(names, [row["round_s"] for row in reversed(table)], color=colours)
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.set(title=workload, xlabel="seconds a round")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
