"""Updates of real rounds, each with the reference that coordinator and device both know.

A run uses the product's methods, trainer and partition, without engine and clock. All devices take part
in every round. The reference of a device starts as the first weights. Its own updates and then its tasks
overwrite it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.stored_run import method_of
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.patch import Patch, patches_in
from fleetune.protocols.wire.payloads import Enrolment, run_key, work_key
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.run_devices import with_model_shape

RUN_TOML = """
[run]
name = "encodings"
seed = {seed}
rounds = {rounds}
[model]
name = "{model}"
[method]
name = "{method}"
[data]
source = "idx:fashion-mnist"
partition = {{ kind = "mix", alpha = 0.5, samples = {samples} }}
[training]
epochs = {epochs}
batch_size = 16
learning_rate = 0.05
[fleet]
devices = {devices}
"""


@dataclass(frozen=True)
class Fleet:
    """Settings of a recorded run.

    Attributes:
        model: name of a built-in model.
        devices, samples: number of devices, and of samples on each.
        epochs, rounds: local epochs in a round, and rounds.
        ratio: the ratio that every device uses.
        seed: seed of the run.
    """

    model: str = "lenet5"
    devices: int = 10
    samples: int = 500
    epochs: int = 1
    rounds: int = 6
    ratio: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Sent:
    """Values of one patch that a device sent.

    Attributes:
        known: what both sides know of the selected entries.
        values: float32, of the same entries.
        round: round number, from 1.
    """

    known: Known
    values: FlatArray
    round: int


@dataclass(frozen=True)
class DeviceRound:
    """Task and update of one device in a round, from 1."""

    round: int
    device: str
    task: Any
    update: Any


def updates_of(method_name: str, fleet: Fleet) -> Iterator[Sent]:
    """Yield the patches that devices send up, round by round."""
    settings, shares = _settings(method_name, fleet)
    enrolment = prepare(settings)
    spec, held = enrolment.spec, dict[str, FlatArray]()
    for one in _device_rounds(enrolment, shares, fleet):
        reference = held.setdefault(one.device, enrolment.weights.copy())
        _overlay(reference, patches_in(one.task), spec)
        for patch in patches_in(one.update):
            yield Sent(known_of(patch.selection.mask(spec), reference, spec), patch.values, one.round)
        _overlay(reference, patches_in(one.update), spec)


def _device_rounds(enrolment: Enrolment, shares: PartitionedData, fleet: Fleet) -> Iterator[DeviceRound]:
    spec, method = enrolment.spec, method_of(enrolment)
    names = tuple(f"device-{index}" for index in range(fleet.devices))
    backend = make_backend("torch", spec, None, 1, task=enrolment.learns)
    data = [shares.device_data(index, spec) for index in range(fleet.devices)]
    state, states = method.init_coordinator(enrolment.weights), dict[str, Any]()
    for name, each in zip(names, data, strict=True):
        states[name] = method.init_device(enrolment.weights)
        state = method.admit(state, DeviceReport(name, num_samples=each.size("train"), ratio=fleet.ratio))
    for number in range(1, fleet.rounds + 1):
        key = run_key(fleet.seed).child("plan", number, 1)
        state, tasks = method.plan(state, Round(number, names), key)
        updates = []
        for name, each in zip(names, data, strict=True):
            task = tasks[name]
            trainer = LocalTrainer(backend, each, enrolment.training)
            draws = work_key(fleet.seed, number, 1, name)
            states[name], update = method.work(states[name], task, trainer, Budget(fleet.ratio), draws)
            yield DeviceRound(number, name, task, update)
            updates.append((name, update))
        state = method.aggregate(state, updates)


def known_of(mask: MaskArray, reference: FlatArray, spec: ModelSpec) -> Known:
    """Return what both sides know of the entries in `mask` from `reference`, shape (spec.size,)."""
    sizes = [tensor.size for tensor in spec.tensors]
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    rows = tuple(
        tensor.size // tensor.shape[0] if tensor.shape and tensor.size else 1 for tensor in spec.tensors
    )
    if mask.all():
        return Known(reference.copy(), tensors, rows)
    places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    return Known(reference[mask], tensors[mask], rows, places[mask])


def _overlay(held: FlatArray, patches: Iterator[Patch], spec: ModelSpec) -> None:
    for patch in patches:
        held[patch.selection.mask(spec)] = patch.values


def _settings(method: str, fleet: Fleet) -> tuple[RunSettings, PartitionedData]:
    words = dict(fleet.__dict__, method=method)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(RUN_TOML.format(**words))
        settings = read_run(path)
    shares = PartitionedData.of_run(settings)
    return with_model_shape(settings, shares), shares
