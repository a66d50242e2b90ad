"""What a local training gains that leaves whole layers alone, at FedSPU's p.

    python -m fleetune.tools.bench.frozen_layers

Against a share p of every layer's neurons, as FedSPU has them: `shallow_steps`; and, in the mean over all
draws, a share p of a model's layers (of ResNet-8: of its stem, blocks and last layer) that train whole, any
of them, a run of them, or the last ones. Batches of 16, SGD with momentum, one thread, processor time, all
taking turns, medians; a step's graphs are built before. In brackets what the forecast says.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fleetune.edge_agent.training import onnx_sessions
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import Kind, make_backend
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods.fedspu import FedSPU
from fleetune.protocols.model.compute_cost import compute_cost
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.update.layers import norm_layers
from fleetune.protocols.update.selection import Layers, Neurons
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.bench.smaller_networks import TRAINING, fitted, made_up_samples
from fleetune.tools.bench.trainers import MODELS, NUM_CLASSES

Units = tuple[int, ...]  # that train whole
NEURONS: Units = (-1,)  # beside choices of units, which are numbers from 0 on
SHALLOW: Units = (-2,)
WAYS = ("shallow steps", "any layers", "a run", "the last ones")


@dataclass(frozen=True)
class Gains:
    """Of a model and a trainer: milliseconds of a step today, and for each of `WAYS` how many times as fast
    it is, and how many times the forecast says.
    """

    model: str
    trainer: Kind
    step_ms: float
    found: list[tuple[float, float]]


def measured(model: str, kind: Kind, ratio: float, batches: int, fits: int) -> Gains:
    """The gains at p = `ratio`."""
    from fleetune.coordinator.export.make_bundle import make_bundle

    bundle = make_bundle(model, MODELS[model], NUM_CLASSES, run_key(0).child("weights"))
    spec, backend = bundle.spec, make_backend(kind, bundle.spec, bundle, 1)
    weights = make_backend("torch", spec, None, 1).weights.copy()
    trainer = LocalTrainer(backend, made_up_samples(model, batches), TRAINING)
    units = units_of(spec)
    draws = list(_draws(len(units), max(1, round(ratio * len(units)))))
    mask, lower = Neurons(ratio, 1).mask(spec), FedSPU(spec, shallow_steps=True).lower(ratio)
    plans = {NEURONS: FitPlan(trainable=mask), SHALLOW: FitPlan(trainable=mask, lower=lower)}
    work = {SHALLOW: _work(spec, ratio)}
    for some in {some for way in draws for some in way}:
        whole = Layers(tuple(name for unit in some for name in units[unit])).mask(spec)
        plans[some], work[some] = FitPlan(trainable=whole), compute_cost(spec, whole)
    seconds = dict[Units, list[float]]({which: [] for which in plans})
    for fit in range(fits + 1):
        for which, plan in plans.items():
            took = fitted(trainer, weights, plan, fit)[1]
            if fit:
                seconds[which].append(took)
    took_s = {which: median(some) for which, some in seconds.items()}
    return Gains(
        model,
        kind,
        1e3 * took_s[NEURONS] / batches,
        [
            (took_s[NEURONS] / mean(took_s[some] for some in way), 1 / mean(work[some] for some in way))
            for way in ([SHALLOW], *draws)
        ],
    )


def units_of(spec: ModelSpec) -> list[list[str]]:
    """Layers by what the model calls them at its top, each norm with the one before it."""
    units, norms = dict[str, list[str]](), norm_layers(spec)
    for name in spec.layers:
        top = name.split(".")[0]
        if name in norms and top == name and units:
            top = next(reversed(units))
        units.setdefault(top, []).append(name)
    return list(units.values())


def _draws(number: int, some: int) -> Iterator[Sequence[Units]]:
    """What may be drawn, in each of `WAYS` but the first."""
    yield list(combinations(range(number), some))
    yield [tuple(range(start, start + some)) for start in range(number - some + 1)]
    yield [tuple(range(number - some, number))]


def _work(spec: ModelSpec, ratio: float) -> float:
    choices = FedSPU(spec, shallow_steps=True).choices(DeviceReport("d"))
    return next(one.cost.work for one in choices if one.ratio == ratio)


def _table(found: list[Gains], ratio: float) -> Table:
    table = Table(title=f"times as fast as a share of the neurons at p = {ratio:g} (expected)")
    for column in ("model", "trainer", "ms a step", *WAYS):
        table.add_column(column)
    for one in found:
        gains = [f"{gain:.2f} ({expected:.2f})" for gain, expected in one.found]
        table.add_row(one.model, one.trainer, f"{one.step_ms:.2f}", *gains)
    return table


def main(
    models: Annotated[str, typer.Option(help="comma-separated")] = "cnn-kapc,resnet8,har-cnn,lenet5",
    trainers: Annotated[str, typer.Option(help="comma-separated")] = "torch,onnx",
    ratio: Annotated[float, typer.Option(help="p, one of FedSPU's")] = 0.4,
    batches: Annotated[int, typer.Option(help="of a local training")] = 20,
    fits: Annotated[int, typer.Option(help="local trainings of each kind")] = 9,
) -> None:
    """Hold layers that are left alone against neurons that are."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    onnx_sessions.MAX_SESSIONS = 64  # so that graphs are built once, though all kinds take turns
    found = []
    with one_line_errors("bench_frozen_layers"):
        for model in models.split(","):
            for kind in trainers.split(","):
                found.append(measured(model, kind, ratio, batches, fits))  # type: ignore[arg-type]
                print(f"{model}, {kind}: done", file=sys.stderr)
    Console(width=110).print(_table(found, ratio))


if __name__ == "__main__":
    typer.run(main)
