"""`python -m benchmarks.robust.flower`: Flower's rules and ours, applied to the same stored updates.

    python -m benchmarks.robust.flower --data DATA --runs runs/robust

It records the updates of round 10 of FedAvg under each attack (IID, 20 % hostile devices, no rule), and gives
them to both. Flower comes into an environment of its own below RUNS. Clipping is left out: Flower has none by
the RMS per entry. From the same updates it computes the figures of hostile and honest steps.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rival_environments import python_in
from benchmarks.robust.attacks import hostile_devices
from benchmarks.robust.cells import ATTACKS, Cell
from fleetune.coordinator.combine.measured_steps import MeasuredSteps, typical_rms
from fleetune.coordinator.combine.rules import RULES, RoundInputs
from fleetune.coordinator.extensions import order
from fleetune.coordinator.extensions.extension import Extension, RoundUpdates, RunContext
from fleetune.coordinator.rounds.records import StepFigures
from fleetune.protocols.model.spec import FlatArray, ModelSpec, TensorSpec
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Reply
from fleetune.tools.stop_signals import in_one_line

FLOWER = ("flwr==1.42.0",)
RULES_OF_BOTH = ("none", "median", "trimmed-mean", "krum")
FIGURES = ("size", "cosine", "outlying")
ROUND, SHARE = 10, 0.2
# read by the other environment: the updates of a file, combined by each of Flower's functions
_THEIRS = """
import sys, time
import numpy as np
from flwr.server.strategy.aggregate import aggregate, aggregate_krum, aggregate_median, aggregate_trimmed_avg
file = np.load(sys.argv[1])
results = [([values], int(samples)) for values, samples in zip(file["values"], file["samples"])]
share, hostile = 0.2, 4
calls = {
    "none": lambda: aggregate(results),
    "median": lambda: aggregate_median(results),
    "trimmed-mean": lambda: aggregate_trimmed_avg(results, share),
    "krum": lambda: aggregate_krum(results, hostile, len(results) - hostile),
}
found = {}
for name, call in calls.items():
    began = time.process_time()
    found[name] = call()[0]
    found[name + " s"] = time.process_time() - began
np.savez(sys.argv[2], **found)
"""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Recorder(Extension):
    """Stores the weighed updates of one round."""

    recorded: dict[str, Any]

    def __init__(self, run: RunContext) -> None:
        self._method = run.method

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run)

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        values, samples = [], []
        for reply in replies:
            update: Any = reply.update
            values.append(update.patch.values)
            samples.append(update.num_samples)
            yield reply
        if round_.number == ROUND:
            base = self._method.shared_model(round_.planned)
            type(self).recorded = {"values": np.array(values), "samples": np.array(samples), "base": base}


def recorded(attack: str, data: Path, runs: Path) -> Path:
    """Return the file with the updates of a run under this attack; make it if it is missing."""
    from benchmarks.robust.runs import played

    path = runs / f"updates-{attack}.npz"
    if not path.exists():
        before = order.ORDER
        order.ORDER = (*before, Recorder)
        try:
            played(Cell("fedavg", "iid", attack, SHARE, "none", 0), data, runs)
        finally:
            order.ORDER = before
        np.savez(path, **Recorder.recorded)
    return path


def spec_of(base: FlatArray) -> ModelSpec:
    """Return a model of one tensor."""
    return ModelSpec("flat", (TensorSpec("flat", base.shape, "weight", "flat", ()),), (), (1,), 2)


def ours(path: Path) -> dict[str, Any]:
    """Return what our rules make of the updates, and the processor time of each."""
    with np.load(path) as file:
        values, samples, base = file["values"], file["samples"], file["base"]
    spec = spec_of(base)
    found: dict[str, Any] = {}
    for rule in RULES_OF_BOTH:
        began = time.process_time()
        combination = RULES[rule].make(spec, RoundInputs(base, SHARE))
        for one, count in zip(values, samples, strict=True):
            combination.add(Patch(Everything(), one), int(count))
        found[rule] = combination.over(base)
        found[f"{rule} s"] = time.process_time() - began
    return found


def compared(attack: str, mine: dict[str, Any], theirs: dict[str, NDArray[Any]]) -> list[list[Any]]:
    """Return a row for each rule: largest difference, and milliseconds of processor time of both."""
    rows = []
    for rule in RULES_OF_BOTH:
        difference = float(np.abs(mine[rule] - theirs[rule]).max() / np.abs(theirs[rule]).max())
        seconds = mine[f"{rule} s"], float(theirs[f"{rule} s"])
        rows.append([attack, rule, f"{difference:.1e}", *(round(1000 * one, 1) for one in seconds)])
    return rows


def figures(attack: str, path: Path) -> list[Any]:
    """Return median size, median cosine and number of outlying steps, of hostile and of honest devices."""
    with np.load(path) as file:
        values, samples, base = file["values"], file["samples"], file["base"]
    spec = spec_of(base)
    measured = MeasuredSteps(CoveredMean(spec), base, spec, len(values))
    for one, count in zip(values, samples, strict=True):
        measured.add(Patch(Everything(), one), int(count))
    measured.over(base)
    typical = typical_rms(measured.steps) or 1.0
    found = [StepFigures(step.rms / typical, step.cosine) for step in measured.steps]
    hostile = hostile_devices(len(values), SHARE, 0)
    row: list[Any] = [attack]
    for members in (hostile, [one for one in range(len(values)) if one not in hostile]):
        mine = [found[one] for one in members]
        row += [round(median(one.ratio or 0.0 for one in mine), 2)]
        row += [round(median(one.cosine or 0.0 for one in mine), 2)]
        row += [f"{sum(one.is_outlying for one in mine)} of {len(mine)}"]
    return row


def write(name: str, columns: list[str], rows: list[list[Any]], runs: Path) -> None:
    """Write a table as docs/results takes it."""
    found = {
        "columns": columns,
        "rows": rows,
        "repeat": "python -m benchmarks.robust.flower --data DATA",
        "date": datetime.now(UTC).strftime("%Y-%m"),
        "note": "FedAvg, `mlp` (52,650 parameters), Fashion-MNIST IID; round 10, 20 updates, 4 hostile.",
    }
    (runs / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@app.command()
def flower(
    runs: Annotated[Path, typer.Option(help="where results are kept")] = Path("runs/robust"),
    data: Annotated[Path, typer.Option(help="folder with fashion-mnist")] = Path("data"),
    python: Annotated[Path | None, typer.Option(help="a Python with Flower; else one is made")] = None,
) -> None:
    """Compare, and write RUNS/robust-flower.json."""
    with in_one_line("benchmarks.robust.flower"):
        runs.mkdir(parents=True, exist_ok=True)
        there = python or python_in(runs / "flower", FLOWER)
        rows, steps = [], []
        for attack in ATTACKS:
            path, answer = recorded(attack, data, runs), runs / f"flower-{attack}.npz"
            subprocess.run([str(there), "-c", _THEIRS, str(path), str(answer)], check=True)
            with np.load(answer) as file:
                rows += compared(attack, ours(path), dict(file.items()))
            steps.append(figures(attack, path))
        columns = ["attack", "rule", "largest relative difference", "ours, ms", "Flower, ms"]
        write("robust-flower", columns, rows, runs)
        columns = ["attack", *(f"{figure}, {who}" for who in ("hostile", "honest") for figure in FIGURES)]
        write("robust-steps", columns, steps, runs)
        print("\n".join(map(str, rows + steps)))


if __name__ == "__main__":
    app()
