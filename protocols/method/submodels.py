"""The family of sub-models: every device trains and sends its own part of the network, and lacks the rest.

These methods (FjORD, FedMP, Hermes, PruneFL, LotteryFL) differ in how a device comes by its part. `SubModels`
is both halves for those that rank neurons by `importance`; `PartAveraging` is the coordinator's half alone,
for a method whose devices choose otherwise. What is outside a part has the value 0 and is not trained, so
that a neuron outside gives nothing to the next layer; that is the same as a smaller network wherever channels
are normalised one by one, as BatchNorm does. (FedSPU freezes the rest at the device's own values instead.)
Each entry of the coordinator's model is averaged over the devices that sent it, weighted by their training
samples; entries that nobody sent stay.

The coordinator remembers the part that each device last sent and from then on sends no more than that. A
device it has not heard from, whose first update was lost, or whose ratio has changed, gets the whole model
and chooses (anew). The task names the part, so a device that lost its state goes on with the part it had.
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

Scores = NDArray[np.float64]  # of the neurons of one group, shape (neurons,)


@dataclass(frozen=True)
class ServerState:
    """w, shape (spec.size,); each device's ratio, and its part of the model as it last sent it."""

    weights: FlatArray
    ratios: dict[DeviceId, float]
    parts: dict[DeviceId, Selection]


@dataclass(frozen=True)
class Task:
    """The device's part of the model, or all of it for the device to choose `ratio` of the neurons from."""

    patch: Patch
    ratio: Ratio


def norms(values: FlatArray, spec: ModelSpec, order: int) -> list[Scores]:
    """Of each neuron: the sum of |value|^order over its incoming weights and its bias, group by group.

    Ranked like the l1 norm (order 1) or the l2 norm (order 2). Where residual additions couple the
    channels of several layers, a neuron has incoming weights in each of them.

    Args:
        values: weights or gradient, shape (spec.size,).
        spec: whose weights have their outputs along the first axis.
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
    """Of each group of n the num_active(n, ratio) neurons of the highest scores; of equals the leftmost."""
    chosen = []
    for group in scores:
        active = np.zeros(group.size, dtype=bool)
        active[np.argsort(-group, kind="stable")[: num_active(group.size, ratio)]] = True
        chosen.append(active)
    return ChosenNeurons(np.concatenate([np.empty(0, dtype=bool), *chosen]))


def cut(weights: FlatArray, part: MaskArray, spec: ModelSpec) -> FlatArray:
    """The sub-model `part` of `weights`, both shape (spec.size,): 0 outside; running statistics stay."""
    outside = ~part
    outside[spec.num_parameters :] = False
    return np.where(outside, weights.dtype.type(0), weights)


@dataclass(frozen=True)
class PartAveraging(Method[ServerState, D, Task, Update]):
    """The coordinator's half: each device gets its own part, and every entry is averaged over the parts that
    hold it.
    """

    spec: ModelSpec

    state_type, task_type, update_type = ServerState, Task, Update
    starts_from_task: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (ACTIVE_SHARE,)

    def first_selection(self, ratio: float) -> Selection:
        """What to send a device of which no part is known; `Everything` leaves the choice to it."""
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

    Of n neurons of a group, `num_active(n, ratio)` are kept, as in FedSPU, so that all of these methods
    send about the same at the same ratio. A part is trained as the smaller network that it is, where the
    model and the trainer can, and its work is that network's. The pass over the data for choosing once is
    not counted.
    """

    @abstractmethod
    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """On the device: how much each neuron of the whole model matters, group by group."""
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
        """Down, what a device gets the first time: that round has to fit the deadline too."""
        return [self._choice(ratio) for ratio in RATIOS]

    def _choice(self, ratio: float) -> Choice:
        part, whole = expected_count(self.spec, ratio), self.spec.num_parameters
        first = whole if isinstance(self.first_selection(ratio), Everything) else part
        down, up = estimate_bytes(first), estimate_bytes(part)
        held = 3 * BYTES_PER_ENTRY * part  # the smaller network's weights and gradients, and what it made
        smaller = smaller_spec(self.spec, [num_active(neurons, ratio) for neurons in self.spec.groups])
        alone = None if smaller is None else smaller_work(self.spec, smaller)
        cost = Cost(down, up, memory_bytes=held, trainable_share=part / whole, work_alone=alone)
        return Choice(ratio, cost)
