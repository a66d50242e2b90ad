"""`python -m benchmarks.robust.costs`: processor time and memory of each rule, relative to the mean.

The mean is the product's plain mean, without the figures of each update. All rules take turns in one process;
the ratios are of medians. A round is measured twice: only what combines the updates, and together with what
every round does besides, which is to decode each stored update and to measure its norm.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from fleetune.coordinator.combine.measured_steps import MeasuredSteps
from fleetune.coordinator.combine.rules import RULES, RoundInputs
from fleetune.coordinator.extensions.update_norms import sizes_of
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.model.spec import FlatArray, ModelSpec, TensorSpec
from fleetune.protocols.update import codec
from fleetune.protocols.update.combine import Combination, CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything
from fleetune.tools.stop_signals import in_one_line

MEAN = "mean"
CASES = ((20, 52_650, False), (20, 1_000_000, False), (100, 1_000_000, False), (20, 1_000_000, True))
BOUND = 0.1  # half of the steps are longer
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def spec_of(size: int) -> ModelSpec:
    """Return a model of one tensor."""
    return ModelSpec("flat", (TensorSpec("flat", (size,), "weight", "flat", ()),), (), (1,), 2)


def patch_of(base: FlatArray, number: int, *, masked: bool) -> Patch:
    """Return an update with a random step; masked: with half of the entries."""
    rng = np.random.default_rng(number)
    values = base + rng.standard_normal(base.size, np.float32) * np.float32(0.05 + 0.1 * (number % 2))
    if not masked:
        return Patch(Everything(), values)
    mask = rng.random(base.size) < 0.5
    return Patch(Entries(mask), values[mask])


def combination_of(name: str, base: FlatArray, count: int, folder: Path) -> Combination:
    """Return an empty combination by this rule, or the plain mean."""
    spec = spec_of(base.size)
    if name == MEAN:
        return CoveredMean(spec)
    rule = RULES[name]
    inner = rule.make(spec, RoundInputs(base, 0.2, folder))
    return MeasuredSteps(inner, base, spec, count, BOUND if rule.clips else None)


def combined_s(
    name: str, base: FlatArray, stored: Sequence[Patch | bytes], count: int, folder: Path
) -> float:
    """Return the processor time of one round of `count` updates; encoded ones are decoded first."""
    combination, began = combination_of(name, base, count, folder), time.process_time()
    for number in range(count):
        one = stored[number % len(stored)]
        if isinstance(one, bytes):
            update = codec.decode(one, Update, spec_of(base.size))
            sizes_of(update)
            one = update.patch
        combination.add(one, 300)
    combination.over(base)
    return time.process_time() - began


def ratios(
    count: int, size: int, *, masked: bool, whole: bool, repeats: int, folder: Path
) -> dict[str, float]:
    """Return each rule's median time relative to that of the mean; whole: with decoding and norms."""
    base = np.random.default_rng(0).standard_normal(size, np.float32)
    patches = [patch_of(base, number, masked=masked) for number in range(20)]
    stored: list[Patch | bytes] = [*patches]
    if whole:
        stored = [codec.encode(Update(one, 300), spec_of(size)) for one in patches]
    names = (MEAN, *RULES)
    rounds = [[combined_s(name, base, stored, count, folder) for name in names] for _ in range(repeats)]
    medians = [median(times) for times in zip(*rounds, strict=True)]
    return {name: round(one / medians[0], 2) for name, one in zip(names, medians, strict=True)}


def peak_mb(name: str, count: int, size: int) -> float:
    """Return the memory in MB that a process of its own needs for one round, beyond that before it."""
    command = [sys.executable, "-m", "benchmarks.robust.costs", "--peak", name, f"{count}x{size}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _peak(name: str, count: int, size: int) -> float:
    base = np.zeros(size, np.float32)
    patch = patch_of(base, 0, masked=False)  # one at a time is in memory, as in a round
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        combined_s(name, base, [patch], count, Path(folder))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@app.command()
def costs(
    out: Annotated[Path, typer.Option(help="folder of robust-costs.json")] = Path("runs/robust"),
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    peak: Annotated[tuple[str, str] | None, typer.Option(help="RULE COUNTxSIZE: print MB and end")] = None,
) -> None:
    """Measure, and write OUT/robust-costs.json."""
    with in_one_line("benchmarks.robust.costs"):
        if peak is not None:
            count, size = map(int, peak[1].split("x"))
            print(_peak(peak[0], count, size))
            return
        rows: list[list[str | float | None]] = []
        for (count, size, masked), whole in product(CASES, (False, True)):
            with tempfile.TemporaryDirectory() as folder:
                where = Path(folder)
                found = ratios(count, size, masked=masked, whole=whole, repeats=repeats, folder=where)
            sent = "half of them" if masked else "all"
            what = "whole aggregation" if whole else "combining alone"
            title = f"{count} updates of {size:,} entries"
            rows.append([title, sent, what, *(found[rule] for rule in RULES)])
            print(rows[-1], flush=True)
        memory = [round(peak_mb(name, 100, 1_000_000), 1) for name in (MEAN, *RULES)]
        print(dict(zip((MEAN, *RULES), memory, strict=True)))
        result = {
            "columns": ["round", "sent", "measured", *RULES],
            "rows": rows,
            "repeat": "python -m benchmarks.robust.costs",
            "date": datetime.now(UTC).strftime("%Y-%m"),
            "note": (
                "Processor time relative to the plain mean. Memory for 100 updates of 1,000,000 entries: "
                + ", ".join(f"{name} {one} MB" for name, one in zip((MEAN, *RULES), memory, strict=True))
                + "."
            ),
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "robust-costs.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
