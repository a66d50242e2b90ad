"""The family of sub-models: each device trains and sends its own part of the network, and has no other part.

FjORD, FedMP, Hermes, PruneFL and LotteryFL differ in how a device gets its part. `SubModels` is both halves
for methods that rank neurons by `importance`. `PartAveraging` is the coordinator's half alone, for other
choices.

1. The coordinator sends a device the part that the device last sent. It sends the whole model to a new
    device, after a lost first update, and after a changed ratio; the device then chooses its part.
2. The device sets all entries outside its part to 0, trains the part alone, and sends it. This equals a
    smaller network if channels are normalised one by one, as BatchNorm does. (FedSPU freezes the rest at its
    own values.)
3. The coordinator averages each entry over the devices that sent it, weighted by their training samples.
    Entries that no device sent stay unchanged.

The task names the part, so a device that lost its state continues with the same part.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bounds import Ratio
from fleetune.protocols.finite import check_finite
from fleetune.protocols.method.averaging import PersonalDevice, PersonalModel, Update
from fleetune.protocols.method.choice import RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.smaller import smaller_spec, smaller_work
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, FlatArray, MaskArray, ModelSpec
from fleetune.protocols.model.weight_norm import directions
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import (
    ChosenNeurons,
    Everything,
    Selection,
    expected_count,
    num_active,
)

D = TypeVar("D")  # device state

BYTES_PER_ENTRY = 4

ACTIVE_SHARE = Diagnostic(
    "active_share",
    "trained and sent",
    "Share of the parameters that a device trained and sent, about p^2 (FedSPU's Lemma 1).",
    "share",
    "update",
)

Scores = NDArray[np.float64]  # scores of the neurons of one group, shape (neurons,)


@dataclass(frozen=True)
class ServerState:
    """The model w, shape (spec.size,), with each device's ratio and the part that it last sent."""

    weights: FlatArray
    ratios: dict[DeviceId, float]
    parts: dict[DeviceId, Selection]


@dataclass(frozen=True)
class Task:
    """A task with the device's part of the model, or the whole model.

    From the whole model, the device chooses `ratio` of the neurons.
    """

    patch: Patch
    ratio: Ratio


def norms(values: FlatArray, spec: ModelSpec, order: int) -> list[Scores]:
    """Return the sum of |value|^order over each neuron's incoming weights and bias, group by group.

    This ranks neurons like the l1 norm (order 1) or the l2 norm (order 2). If residual additions couple the
    channels of several layers, a neuron has incoming weights in each of them.

    Args:
        values: weights or gradient, shape (spec.size,).
        spec: model whose weights have their outputs along the first axis.
        order: 1 or 2.
    """
    scores = [np.zeros(neurons) for neurons in spec.groups]
    for tensor, view in spec.views(values):
        if tensor.kind in ("weight", "bias") and tensor.axes:
            rows = (np.abs(view.astype(np.float64)) ** order).reshape(tensor.shape[0], -1).sum(axis=1)
            for span in tensor.axes[0]:
                mine, rows = np.split(rows, [span.count * span.repeat])
                if span.group != ALWAYS_ACTIVE:
                    where = slice(span.start, span.start + span.count)
                    scores[span.group][where] += mine.reshape(span.count, span.repeat).sum(axis=1)
    return scores


def strongest(scores: Sequence[Scores], ratio: float) -> ChosenNeurons:
    """Return the num_active(n, ratio) highest-scoring neurons of each group of n; the leftmost ones among
    ties.
    """
    chosen = []
    for group in scores:
        active = np.zeros(group.size, dtype=bool)
        active[np.argsort(-group, kind="stable")[: num_active(group.size, ratio)]] = True
        chosen.append(active)
    return ChosenNeurons(np.concatenate([np.empty(0, dtype=bool), *chosen]))


def cut(weights: FlatArray, part: MaskArray, spec: ModelSpec) -> FlatArray:
    """Return `weights` with 0 outside `part`, both of shape (spec.size,).

    Running statistics do not change, nor rows of weight norm's directions that lie outside: 0 has no
    direction, and their lengths are 0.
    """
    outside = ~part
    outside[spec.num_parameters :] = False
    for tensor, axis in directions(spec):
        rows = np.moveaxis(outside[spec.slices[tensor.name]].reshape(tensor.shape), axis, 0)
        rows[rows.reshape(len(rows), -1).all(axis=1)] = False
    return np.where(outside, weights.dtype.type(0), weights)


@dataclass(frozen=True)
class PartAveraging(Method[ServerState, D, Task, Update]):
    """The coordinator's half: send each device its part, and average each entry over the parts with it."""

    spec: ModelSpec

    state_type, task_type, update_type = ServerState, Task, Update
    starts_from_task: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (ACTIVE_SHARE,)

    def first_selection(self, ratio: float) -> Selection:
        """Return what to send a device with no known part; with `Everything`, the device chooses its part."""
        return Everything()

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, {}, {})

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        if state.ratios.get(report.device) == report.ratio:
            return state
        parts = {device: part for device, part in state.parts.items() if device != report.device}
        return replace(state, ratios={**state.ratios, report.device: report.ratio}, parts=parts)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        def task(device: DeviceId) -> Task:
            ratio = state.ratios.get(device, 1.0)
            part = state.parts.get(device) or self.first_selection(ratio)
            return Task(Patch.of(state.weights, part, self.spec), ratio)

        return state, lazily(round_.participants, task)

    @property
    def combines(self) -> bool:
        return True

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        combination, parts = combine(self.spec), dict(state.parts)
        for device, update in updates:
            combination.add(update.patch, update.num_samples)
            parts[device] = update.patch.selection
        return replace(state, weights=combination.over(state.weights), parts=parts)

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return {"active_share": update.patch.values.size / self.spec.num_parameters}


@dataclass(frozen=True)
class SubModels(PartAveraging[PersonalModel], PersonalDevice[ServerState, Task, Update]):
    """Both halves: a device's part consists of the neurons that rank highest by the method's `importance`.

    Each group of n neurons keeps `num_active(n, ratio)`, as in FedSPU, so these methods send about the same
    at the same ratio. If model and trainer allow it, a part trains as a smaller network, and its work is that
    network's. The one pass over the data for choosing the part is not counted.
    """

    selects_neurons: ClassVar[bool] = True

    @abstractmethod
    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """Return the importance of each neuron of the whole model, group by group; runs on the device."""
        ...

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        received, part = task.patch.apply(state.weights, self.spec), task.patch.selection
        if isinstance(part, Everything) and task.ratio < 1:
            scores = self.importance(received, trainer, key.child("importance"))
            check_finite(np.concatenate(scores), f"{type(self).__name__}: the neurons' importance")
            part = strongest(scores, task.ratio)
        mask = part.mask(self.spec)
        neurons = part if isinstance(part, ChosenNeurons) else None
        fit = trainer.fit(cut(received, mask, self.spec), FitPlan(trainable=mask, neurons=neurons), key)
        sent = Patch.of(fit.weights, part, self.spec)
        return PersonalModel(fit.weights), Update(sent, trainer.num_samples)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of ratio. The cost down is that of the first round, which must meet the deadline
        too.
        """
        return [self._choice(ratio) for ratio in RATIOS]

    def _choice(self, ratio: float) -> Choice:
        part, whole = expected_count(self.spec, ratio), self.spec.num_parameters
        first = whole if isinstance(self.first_selection(ratio), Everything) else part
        down, up = estimate_bytes(first), estimate_bytes(part)
        held = 3 * BYTES_PER_ENTRY * part  # weights, gradients and trained values of the smaller network
        smaller = smaller_spec(self.spec, [num_active(neurons, ratio) for neurons in self.spec.groups])
        alone = None if smaller is None else smaller_work(self.spec, smaller)
        cost = Cost(down, up, memory_bytes=held, trainable_share=part / whole, work_alone=alone)
        return Choice(ratio, cost)
