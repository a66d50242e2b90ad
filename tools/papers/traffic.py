"""Count the traffic of a method as papers do: each number at its full width, masks at one bit an entry.

Compression and framing do not count. The method's own plan, work and aggregate steps are executed with the
run's keys, so the same devices take part with the same neurons as in a simulation. Only training is omitted,
because the traffic of FedAvg, FedCAC and FedSPU does not depend on it. A thousand rounds take seconds, and
need no data.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.coordinator.run.models import find_model
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit, FitPlan, Part, Rows
from fleetune.protocols.methods import from_section
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.paper_bytes import paper_bytes
from fleetune.protocols.wire.payloads import run_key, work_key
from fleetune.tools.simulator.device_specs import device_specs

_NUM_SAMPLES = 100  # samples of each device; averages are weighted by them
_DRAWS = 4096  # number of distinct random steps; a draw for each weight would take most of the time


@dataclass(frozen=True)
class Traffic:
    """Bytes of one run.

    Attributes:
        up: mean bytes of an update.
        down: mean bytes of a task after the first round; from then on a device may already have the model.
        total: bytes of all tasks and updates.
    """

    up: float
    down: float
    total: float


@dataclass(frozen=True)
class StillTrainer:
    """A trainer without learning: weights take small random steps, all losses are equal."""

    spec: ModelSpec
    num_samples: int = _NUM_SAMPLES
    num_classes_held: int = 1

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        step = np.resize(key.generator().normal(0, 0.01, _DRAWS).astype(np.float32), weights.size)
        step[self.spec.num_parameters :] = 0
        if plan.trainable is not None:
            step[~plan.trainable] = 0
        return Fit(weights + step, 1.0, 1, -step if plan.keep_last_gradient else None)

    def loss(self, weights: FlatArray, part: Part = "train") -> float:  # noqa: ARG002
        return 1.0

    def accuracy(self, weights: FlatArray, part: Part) -> float | None:  # noqa: ARG002
        return 0.5

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:  # noqa: ARG002
        return np.full_like(weights, 0.01)

    def batches(self, key: Key) -> Iterable[Rows]:  # noqa: ARG002
        return [np.arange(self.num_samples)]


def count_traffic(settings: RunSettings) -> Traffic:
    """Execute the rounds of a run without training, each device at the ratio that [fleet] assigns, else at
    1.

    Raises:
        SettingError, ModelError: the model or the method cannot be created; [model] must define its shape.
    """
    model = find_model(settings)
    method: Any = from_section(settings.method, model.spec)
    trainer, seed = StillTrainer(model.spec), settings.run.seed
    ratios = {
        one.name: settings.fleet.assigned_ratio(one.name) or 1.0
        for one in device_specs(settings.fleet, settings.run.seed)
    }
    state = method.init_coordinator(model.weights)
    for device, ratio in ratios.items():
        report = DeviceReport(device, num_samples=_NUM_SAMPLES, ratio=ratio)
        state = method.admit(state, report)
    devices = {device: method.init_device(model.weights) for device in ratios}
    up, down = [], []
    rounds = settings.run.rounds
    assert rounds != "open", "`run_cell_settings` refuses open runs"
    for number in range(1, rounds + 1):
        taking_part = participants(tuple(ratios), settings, number)
        state, tasks = method.plan(state, Round(number, taking_part), run_key(seed).child("plan", number, 1))
        updates = []
        for device in taking_part:
            task = tasks[device]
            key = work_key(seed, number, 1, device)
            devices[device], update = method.work(devices[device], task, trainer, Budget(ratios[device]), key)
            down.append((number, paper_bytes(task)))
            up.append(paper_bytes(update))
            updates.append((device, update))
        state = method.aggregate(state, updates)
    later = [size for number, size in down if number > 1] or [size for _, size in down]
    total = sum(up) + sum(size for _, size in down)
    return Traffic(sum(up) / len(up), sum(later) / len(later), total)


def participants(devices: tuple[str, ...], settings: RunSettings, number: int) -> tuple[str, ...]:
    """Return the participants of a round in a simulation in which no device is offline, ascending."""
    key = run_key(settings.run.seed).child("participants", number, 1)
    count = min(settings.round.participants or len(devices), len(devices))
    return tuple(sorted(devices[index] for index in key.sample(count, len(devices))))
