"""Results of the growth benchmark: results.json, results.md and log-log plots."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.growth.runs import Run, exponent
from benchmarks.growth.summing import Summed
from fleetune.protocols.files import write_atomically

_HEAD = ("", "a round, s", "processor a round, s", "first round after, s", "memory, MB")
_SUMMING = ("parameters", "density", "an update, ms", "floor, ms", "times the floor")


def markdown(name: str, runs: Sequence[Run]) -> str:
    """Markdown table of the runs along one axis."""
    power = exponent(runs)
    grows = "" if power is None else f": a round's processor time grows with its power of {power:.2f}"
    lines = [f"**{name}**{grows}", "", f"| {' | '.join(_HEAD)} |", "|--:" * len(_HEAD) + "|"]
    for one in runs:
        cells = (
            f"{one.value:,}",
            f"{one.round_s:.3f}",
            f"{one.round_processor_s:.3f}",
            f"{one.first_s:.1f}",
            f"{one.memory_bytes / 1e6:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summing_markdown(found: Sequence[Summed]) -> str:
    """Markdown table of the sums."""
    lines = ["**summing updates**", "", f"| {' | '.join(_SUMMING)} |", "|--:" * len(_SUMMING) + "|"]
    for one in found:
        cells = (
            f"{one.parameters:,}",
            f"{one.density:g}",
            f"{one.ms:.3g}",
            f"{one.floor_ms:.3g}",
            f"{one.ms / one.floor_ms:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_results(
    runs: Mapping[str, Sequence[Run]], found: Sequence[Summed], machine: str, folder: Path
) -> str:
    """Write all files and return the tables."""
    tables = [markdown(name, own) for name, own in runs.items()]
    text = "\n".join([*tables, *([summing_markdown(found)] if found else [])])
    whole = {
        "machine": machine,
        "runs": {name: [asdict(one) for one in own] for name, own in runs.items()},
        "exponents": {name: exponent(own) for name, own in runs.items()},
        "summing": [asdict(one) for one in found],
    }
    write_atomically(folder / "results.json", json.dumps(whole, indent=1).encode(), mode=None)
    write_atomically(folder / "results.md", f"{machine}\n\n{text}".encode(), mode=None)
    if runs:
        _draw(runs, folder / "results.png")
    return text


def _draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw a log-log panel for each axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(runs), 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for axes, (name, own) in zip(panels, runs.items(), strict=True):
        x = np.array([one.value for one in own], float)
        axes.loglog(x, [one.round_processor_s for one in own], "o-", color="#1f6f50", label="processor")
        axes.loglog(x, [one.round_s for one in own], "o-", color="#9aa5ad", label="by the clock")
        power = exponent(own)
        axes.set(title=name if power is None else f"{name}: power {power:.2f}", xlabel=name)
        axes.set_ylabel("seconds a round")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
