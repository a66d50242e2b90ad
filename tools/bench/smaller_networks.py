"""What it gains to train a sub-model as the smaller network that it is, instead of masking the whole one.

    python -m fleetune.tools.bench.smaller_networks

A device's local training as FjORD has it at a ratio p, from gathering to putting back: batches of 16, SGD
with momentum, one thread, processor time. Masked and smaller take turns, and what is built once for all
rounds is built before. Ratios are of medians; beside them how far weights are apart after a few steps (the
most of all entries), what Cost.work_alone expects, and what building took, in masked steps.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fleetune.edge_agent.training import smaller_network
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import Kind, make_backend
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.submodels import cut
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods.fjord import FjORD
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.bench.trainers import BATCH_SIZE, MODELS, NUM_CLASSES

COMPARED = 3
TRAINING = TrainingSection(epochs=1, batch_size=BATCH_SIZE, learning_rate=0.01, momentum=0.9)


@dataclass(frozen=True)
class Gain:
    """Of a model, a trainer and a ratio.

    Attributes:
        masked_ms, smaller_ms: of a step in the median, without and with what a fit takes beside its steps.
        apart: the most by which an entry of the weights differs after `COMPARED` steps. More of them drive
            apart what rounding began, where a network of ReLU stands at a kink.
        expected: what `Cost.work_alone` says.
        building_steps: what it took to build the smaller network, in masked steps.
    """

    model: str
    trainer: Kind
    ratio: float
    masked_ms: float
    smaller_ms: float
    apart: float
    expected: float
    building_steps: float


def measured(model: str, kind: Kind, ratios: list[float], batches: int, fits: int) -> list[Gain]:
    """The gain at each ratio; all take turns."""
    from fleetune.coordinator.export.make_bundle import make_bundle

    bundle = make_bundle(model, MODELS[model], NUM_CLASSES, run_key(0).child("weights"))
    backend = make_backend(kind, bundle.spec, bundle, 1)
    weights = make_backend("torch", bundle.spec, None, 1).weights.copy()
    trainer = LocalTrainer(backend, made_up_samples(model, batches), TRAINING)
    method = FjORD(bundle.spec)
    work = {one.ratio: one.cost.work_alone or 1.0 for one in method.choices(DeviceReport("d"))}
    few = replace(trainer, data=made_up_samples(model, COMPARED))
    found = {ratio: ([], []) for ratio in ratios}  # type: dict[float, tuple[list[float], list[float]]]
    apart, building = dict[float, float](), dict[float, float]()
    for fit in range(fits + 1):
        for ratio, seconds in found.items():
            part = method.known(ratio)
            start = cut(weights, mask := part.mask(bundle.spec), bundle.spec)
            masks = FitPlan(trainable=mask)
            alone = replace(masks, neurons=part)
            if fit == 0:
                masked, _ = fitted(few, start, masks, fit)
                smaller, building[ratio] = fitted(few, start, alone, fit)
                apart[ratio] = float(np.abs(masked - smaller).max())
                building[ratio] -= fitted(few, start, alone, fit)[1]
            else:
                seconds[0].append(fitted(trainer, start, masks, fit)[1])
                seconds[1].append(fitted(trainer, start, alone, fit)[1])
    return [
        Gain(
            model,
            kind,
            ratio,
            1e3 * median(masked) / batches,
            1e3 * median(smaller) / batches,
            apart[ratio],
            work[ratio],
            building[ratio] / median(masked) * batches,
        )
        for ratio, (masked, smaller) in found.items()
    ]


def fitted(trainer: LocalTrainer, start: FlatArray, plan: FitPlan, fit: int) -> tuple[FlatArray, float]:
    began = time.process_time()
    weights = trainer.fit(start, plan, Key(fit)).weights
    return weights, time.process_time() - began


def made_up_samples(model: str, batches: int) -> DeviceData:
    draw, size = Key.of("bench").generator(), batches * BATCH_SIZE
    x = draw.standard_normal((size, *MODELS[model])).astype(np.float32)
    y = draw.integers(0, NUM_CLASSES, size)
    return DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])


def _table(found: list[Gain], ratios: list[float]) -> Table:
    table = Table(title="times as fast as masking (expected)")
    for column in ("model", "trainer", "masked, ms a step", *(f"p = {ratio:g}" for ratio in ratios)):
        table.add_column(column)
    table.add_column("apart, building")
    for model, kind in dict.fromkeys((one.model, one.trainer) for one in found):
        mine = [one for one in found if (one.model, one.trainer) == (model, kind)]
        gains = [f"{one.masked_ms / one.smaller_ms:.2f} ({1 / one.expected:.2f})" for one in mine]
        step, apart = median(one.masked_ms for one in mine), max(one.apart for one in mine)
        building = max(one.building_steps for one in mine)
        table.add_row(model, kind, f"{step:.2f}", *gains, f"{apart:.0e}, {building:.0f} steps")
    return table


def main(
    models: Annotated[str, typer.Option(help="comma-separated")] = "cnn-kapc,resnet8,har-cnn,lenet5",
    trainers: Annotated[str, typer.Option(help="comma-separated")] = "torch,onnx",
    ratios: Annotated[str, typer.Option(help="comma-separated")] = "0.2,0.4,0.6,0.8,0.9",
    batches: Annotated[int, typer.Option(help="of a local training")] = 30,
    fits: Annotated[int, typer.Option(help="local trainings of each kind")] = 15,
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
) -> None:
    """Hold smaller networks against masks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    smaller_network.TORCH_LEAST_PRODUCTS = 0  # what is left whole, because it gains little, is measured too
    wanted, found = [float(ratio) for ratio in ratios.split(",")], list[Gain]()
    with one_line_errors("bench_smaller_networks"):
        for model in models.split(","):
            for kind in trainers.split(","):
                found += measured(model, kind, wanted, batches, fits)  # type: ignore[arg-type]
                print(f"{model}, {kind}: done", file=sys.stderr)
    Console(width=110).print(_table(found, wanted))
    if out is not None:
        out.write_text(json.dumps([one.__dict__ for one in found], indent=1))


if __name__ == "__main__":
    typer.run(main)
