"""Results of the wire benchmark: results.json, Markdown tables and plots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wire.run import Run
from fleetune.protocols.files import write_atomically

SHARES = (0.90, 0.95, 0.99)
"""Shares of dense FedAvg's final accuracy, for which bytes are counted."""
REFERENCE = "dense"
_NEVER = "\u2013"
_HEAD = ("configuration", "seeds", "kB up to 90 %", "95 %", "99 %", "up and down to 99 %", "final accuracy")


def targets(reference: Run) -> list[float]:
    """Target accuracies for one seed."""
    return [share * reference.final for share in SHARES]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each configuration, over the seeds that the reference has; best at 99 % first.

    Bytes are None unless every seed reaches the accuracy.
    """
    reference = {run.seed: run for run in runs if run.configuration == REFERENCE}
    found = []
    for configuration in dict.fromkeys(run.configuration for run in runs):
        own = [run for run in runs if run.configuration == configuration and run.seed in reference]
        if own:
            found.append(_row(configuration, own, reference))
    return sorted(found, key=lambda row: (row["up"][-1] is None, row["up"][-1] or -row["final"]))


def _row(configuration: str, own: Sequence[Run], reference: dict[int, Run]) -> dict[str, Any]:
    ups = [[run.bytes_to(one) for one in targets(reference[run.seed])] for run in own]
    rounds = [_rounds(run, up[-1]) for run, up in zip(own, ups, strict=True)]
    both = [
        None if count is None or up[-1] is None else up[-1] + count * run.bytes_down
        for run, up, count in zip(own, ups, rounds, strict=True)
    ]
    return {
        "configuration": configuration,
        "seeds": len(own),
        "up": [_mean([up[place] for up in ups]) for place in range(len(SHARES))],
        "both": _mean(both),
        "reached": [sum(up[place] is not None for up in ups) for place in range(len(SHARES))],
        "final": float(np.mean([run.final for run in own])),
        "behind": float(np.mean([reference[run.seed].final - run.final for run in own])),
    }


def _rounds(run: Run, bytes_up: float | None) -> int | None:
    return None if bytes_up is None else run.bytes_up.index(bytes_up) + 1


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there and len(there) == len(values) else None


def markdown(setting: str, table: Sequence[dict[str, Any]]) -> str:
    """Markdown table of a setting; in brackets how many times fewer bytes than the reference."""
    dense = next((row for row in table if row["configuration"] == REFERENCE), None)
    lines = [f"**{setting}**", "", f"| {' | '.join(_HEAD)} |", "|---|" + "--:|" * (len(_HEAD) - 1)]
    for row in table:
        cells = [_bytes(row["up"][place], row, dense, place) for place in range(len(SHARES))]
        both = _NEVER if row["both"] is None else f"{row['both'] / 1e3:,.0f}"
        final = f"{100 * row['final']:.2f} ({0.0 - 100 * row['behind']:+.2f})"
        lines.append(f"| {' | '.join([row['configuration'], str(row['seeds']), *cells, both, final])} |")
    return "\n".join(lines) + "\n"


def _bytes(value: float | None, row: dict[str, Any], dense: dict[str, Any] | None, place: int) -> str:
    if value is None:
        reached = row["reached"][place]
        return f"{_NEVER} ({reached} of {row['seeds']})" if reached else _NEVER
    against = dense["up"][place] if dense else None
    times = f" ({against / value:.0f}x)" if against and row is not dense else ""
    return f"{value / 1e3:,.0f}{times}"


def written(runs: dict[str, list[Run]], out: Path) -> str:
    """Write results.json, results.md and a plot of each setting to `out`; return the Markdown."""
    tables = {setting: rows(own) for setting, own in runs.items()}
    text = "\n".join(markdown(setting, table) for setting, table in tables.items())
    write_atomically(out / "results.json", json.dumps(tables, indent=1).encode(), mode=None)
    write_atomically(out / "results.md", text.encode(), mode=None)
    for setting, own in runs.items():
        _plot(setting, own, out / f"{setting}.png")
    return text


def _plot(setting: str, runs: Sequence[Run], path: Path) -> None:
    """Draw accuracy over bytes up, one line for each configuration: the mean of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for configuration in dict.fromkeys(run.configuration for run in runs):
        own = [run for run in runs if run.configuration == configuration]
        length = min(len(run.accuracy) for run in own)
        sent = np.mean([run.bytes_up[:length] for run in own], axis=0)
        axes.plot(
            sent / 1e3, 100 * np.mean([run.accuracy[:length] for run in own], axis=0), label=configuration
        )
    axes.set(xscale="log", xlabel="kB up", ylabel="accuracy of the shared model, %", title=setting)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
