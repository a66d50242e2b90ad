"""The family of FedAvg: one shared model at the coordinator, a personal model on each device.

1. The participants take over the shared part of the model, train, and send the shared part back.
2. The coordinator averages the updates entry by entry.

Most methods belong here. Some share only some layers (FedPer, FedRep, FedBN); some keep a second model
(Ditto, pFedSD). `AveragedModel` is the coordinator's half, `ModelAveraging` both halves. A method derives
from one of them and overrides `shared` (what travels) or `work` (what a device does).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, TypeVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from fleetune.protocols.bounds import NumSamples
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.staleness import blend_with
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers, Selection, split_at_head

S = TypeVar("S")  # coordinator state
D = TypeVar("D")  # device state
T = TypeVar("T")  # task
U = TypeVar("U")  # update


@dataclass(frozen=True)
class SharedModel:
    """Coordinator state: one model, shape (spec.size,).

    Attributes:
        weights: weights of the model.
        velocity: accumulated momentum of the coordinator, shape (spec.size,); UNSET without momentum.
    """

    weights: FlatArray
    velocity: FlatArray | UnsetType = UNSET


@dataclass(frozen=True)
class PersonalModel:
    """Device state: its own model, shape (spec.size,), running statistics included."""

    weights: FlatArray


@dataclass(frozen=True)
class Task:
    """A task with entries for the device to take over before it trains."""

    patch: Patch


@dataclass(frozen=True)
class Update:
    """An update with the entries after training, and the number of training samples."""

    patch: Patch
    num_samples: NumSamples


def covered_average(
    weights: FlatArray,
    updates: Iterable[tuple[DeviceId, Update]],
    spec: ModelSpec,
    combine: Combine = MEAN,
) -> FlatArray:
    """Return the average of each entry over the devices that sent it, weighted by their training samples.

    With the mean, this is FedAvg if every device sends everything, and FedSPU's Fig. 9 if devices send parts.

    Args:
        weights: shape (spec.size,); entries that no device sent keep this value.
        updates: updates of a round.
        spec: model.
        combine: makes the combination of updates.
    """
    combination = combine(spec)
    for _, update in updates:
        combination.add(update.patch, update.num_samples)
        del update  # before the next one is read
    return combination.over(weights)


def equally_weighted(updates: Iterable[tuple[DeviceId, Update]]) -> Iterator[tuple[DeviceId, Update]]:
    """Yield the updates with one sample each, so that their mean is 1/|S| * sum.

    A device without samples keeps 0.
    """
    for device, update in updates:
        yield device, replace(update, num_samples=min(1, update.num_samples))
        del update


@dataclass(frozen=True)
class PersonalDevice(Method[S, PersonalModel, T, U]):
    """The device's half of methods in which a device stores only its own model."""

    device_state_type = PersonalModel

    def init_device(self, weights: FlatArray) -> PersonalModel:
        return PersonalModel(weights)


@dataclass(frozen=True)
class AveragedModel(Method[SharedModel, D, Task, Update]):
    """The coordinator's half: send the shared part to every participant, and average their updates.

    A shared entry that no device sends back keeps its value. A device that joins late or was away gets the
    newest values with its next task. Entries that are not shared never travel; an update's values for them
    are ignored.

    Class attributes:
        by_samples: True if participants count by their training samples, False if they count equally.
        extra_models: whole models that the device holds in addition to the one in training.
    """

    spec: ModelSpec

    by_samples: ClassVar[bool] = True
    extra_models: ClassVar[int] = 0
    semi_asynchronous: ClassVar[bool] = True
    sends_same_entries: ClassVar[bool] = True
    starts_from_task: ClassVar[bool] = True

    state_type, task_type, update_type = SharedModel, Task, Update

    def __post_init__(self) -> None:
        if not self.shared.count(self.spec):
            raise SettingError(f"method: nothing of model {self.spec.name!r} is left to share")

    @property
    def shared(self) -> Selection:
        """The entries that travel both ways. Raises SettingError if the settings do not fit the model."""
        return Everything()

    @property
    def relative_work(self) -> float:
        """Relative cost of the run's own epochs with this method (see `Cost.work`)."""
        return 1.0

    @property
    def extra_epochs(self) -> float:
        """Epochs of training and evaluation in addition to the run's own (see `Cost.extra_epochs`)."""
        return 0.0

    @property
    def weighs_by_samples(self) -> bool:
        return self.by_samples

    def init_coordinator(self, weights: FlatArray) -> SharedModel:
        return SharedModel(weights)

    def plan(
        self, state: SharedModel, round_: Round, key: Key
    ) -> tuple[SharedModel, Mapping[DeviceId, Task]]:
        task = Task(Patch.of(state.weights, self.shared, self.spec))
        return state, lazily(round_.participants, lambda _: task)

    @property
    def combines(self) -> bool:
        return True

    def aggregate(
        self, state: SharedModel, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> SharedModel:
        counted = updates if self.by_samples else equally_weighted(updates)
        return self.apply(state, covered_average(state.weights, counted, self.spec, combine))

    def apply(self, state: SharedModel, average: FlatArray) -> SharedModel:
        """Return the next shared model, from the combined updates of a round, shape (spec.size,)."""
        if self.shared == Everything() and self.spec.num_parameters == self.spec.size:
            return SharedModel(average)
        return SharedModel(np.where(self.shared.mask(self.spec), average, state.weights))

    def discount(self, state: SharedModel, update: Update, factor: float) -> Update:
        return replace(update, patch=blend_with(update.patch, state.weights, factor, self.spec))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        size = estimate_bytes(self.shared.count(self.spec))
        cost = Cost(
            bytes_down=size,
            bytes_up=size,
            work=self.relative_work,
            memory_bytes=4 * self.spec.size * self.extra_models,
            extra_epochs=self.extra_epochs,
        )
        return [Choice(1.0, cost)]

    def update(self, weights: FlatArray, trainer: Trainer) -> Update:
        """Return the update for a device's model `weights`, shape (spec.size,)."""
        return Update(Patch.of(weights, self.shared, self.spec), trainer.num_samples)


@dataclass(frozen=True)
class BodyAveraging(AveragedModel[D]):
    """The coordinator's half of methods that share a body; the head stays on the device.

    Attributes:
        head_layers: number of last layers that form the head; the paper uses one.
    """

    head_layers: Annotated[int, Meta(ge=1)] = 1

    @cached_property
    def shared(self) -> Layers:
        return split_at_head(self.spec, self.head_layers)[0]

    @cached_property
    def head(self) -> Layers:
        return split_at_head(self.spec, self.head_layers)[1]


@dataclass(frozen=True)
class ModelAveraging(AveragedModel[PersonalModel], PersonalDevice[SharedModel, Task, Update]):
    """Both halves: a device takes over the shared part, trains its whole model, and sends the shared part
    back.
    """

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start = task.patch.over(state.weights, self.spec)
        fit = trainer.fit(start, self.fit_plan(state, start), key)
        return PersonalModel(fit.weights), self.update(fit.weights, trainer)

    def fit_plan(self, state: PersonalModel, start: FlatArray) -> FitPlan:
        """Return how the device trains from `start`; by default, as the run's [training] section sets."""
        return FitPlan()
