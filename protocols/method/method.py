"""The base class of a method: plan a round, work on a device, aggregate.

A method is one file in `protocols/methods/` with both halves next to each other. Its steps are pure functions
on arrays, without I/O, clock or global randomness. Engine, wire, store and simulator never ask which method
runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from fleetune.protocols.method.choice import Budget, Choice, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.forgetting import without
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.method.utility import default_utility
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.combine import MEAN, Combine

DeviceId = str


@dataclass(frozen=True)
class Round:
    """A round, as the coordinator plans it.

    Attributes:
        number: number of the round, from 1.
        participants: selected devices, ascending.
        final_evaluation: True for the final evaluation. Devices then do the work of a round on a copy and
            report how it changes their accuracy. Nothing is stored, sent or aggregated.
    """

    number: int
    participants: tuple[DeviceId, ...]
    final_evaluation: bool = False


S = TypeVar("S")  # coordinator state
D = TypeVar("D")  # device state
T = TypeVar("T")  # task
U = TypeVar("U")  # update


class Method(Protocol[S, D, T, U]):
    """A federated method: a frozen dataclass whose fields are `spec` and the method's settings.

    S, D, T and U are the types of coordinator state, device state, task and update. They are frozen
    dataclasses that the codec can carry. Class attributes name them, so that stored bytes can be decoded.
    """

    state_type: ClassVar[type]
    device_state_type: ClassVar[type]
    task_type: ClassVar[type]
    update_type: ClassVar[type]

    semi_asynchronous: ClassVar[bool] = False
    """True if one aggregation may use updates planned in different rounds (`round.mode`).

    Such a method implements `discount`. A device's task depends neither on the other participants nor on how
    often the round is planned with the same state and key.
    """

    tasks: ClassVar[frozenset[str] | None] = None
    """Kinds of [task] that the method supports; None means all. Runs of other kinds are refused at their
    start.
    """

    serves_shared_model: ClassVar[bool] = False
    """True if a device may serve the shared model without further training (`adoption.canary`)."""

    starts_from_task: ClassVar[bool] = False
    """True if local training of the sent entries starts from the values of the task.

    If a lossy downlink changed these values, the coordinator adds the lost difference to the update before it
    aggregates. Otherwise the compression error would stay in the model.
    """

    selects_neurons: ClassVar[bool] = False
    """True if the method sends only some neurons of each layer.

    A run warns at its start if little of its model is in groups of neurons.
    """

    leak: ClassVar[str | None] = "it does not state what its updates reveal (`leak`)"
    """What its messages reveal of a device's data besides one step's values, as a reason to refuse [privacy].

    None if they reveal nothing else. Then an update is one patch, its entries are chosen without the device's
    data and are part of the task's patch, and `aggregate` uses updates only in one combination, weighted by
    `num_samples`. A class states this itself; a subclass does not inherit it.
    """

    diagnostics: ClassVar[tuple[Diagnostic, ...]] = ()
    """Figures that `diagnose_update` and `diagnose_round` report."""

    spec: ModelSpec

    @property
    def needs_validation(self) -> bool:
        """True if devices must hold out validation samples for this method."""
        return False

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:  # noqa: ARG003 - for those that override it
        """Return defaults of settings that depend on the run's number of `rounds`.

        They are written into the [method] section when the run starts, for settings that it leaves open.
        Raising the number of rounds later does not change them. Outside a run, a field's own default applies.
        """
        return {}

    @classmethod
    def defaults_of_objective(cls) -> Mapping[str, Any]:
        """Return defaults for runs in which the coordinator proposes ratios to save time or energy.

        They switch off what costs a device much and gains the run little.
        """
        return {}

    @property
    def weighs_by_samples(self) -> bool:
        """True if `aggregate` weighs an update by its field `num_samples`; `round.max_share` then limits
        it.
        """
        return True

    def init_coordinator(self, weights: FlatArray) -> S:
        """Return the coordinator's state before round 1, from the initial weights."""
        ...

    def admit(self, state: S, report: DeviceReport) -> S:
        """Return the state after a device joined: at the start, late, or again after an absence."""
        return state

    def forget(self, state: S, device: DeviceId) -> S:
        """Return the state without everything that is stored about one device; its part in models stays.

        The default removes the device from all dictionaries and tuples. A method whose state has arrays with
        a row for each device overrides this.
        """
        return without(state, device)

    def init_device(self, weights: FlatArray) -> D:
        """Return a device's state before its first task, from the initial weights."""
        ...

    def start_from(self, state: D, weights: FlatArray) -> D:
        """Return `state` with a personal model that the device brings from the run that this one continues.

        `weights` is that model, shape (spec.size,). Parts that all devices have in common stay unchanged.
        """
        return replace(state, weights=weights)  # type: ignore[type-var]

    def plan(self, state: S, round_: Round, key: Key) -> tuple[S, Mapping[DeviceId, T]]:
        """Return the next state and a task for each participant. The mapping may be lazy (see `lazily`)."""
        ...

    def work(self, state: D, task: T, trainer: Trainer, budget: Budget, key: Key) -> tuple[D, U]:
        """Do a task on a device; return the device's next state and its update."""
        ...

    @property
    def combines(self) -> bool:
        """True if `aggregate` combines updates only by the `combine` that it receives.

        Otherwise a run with another rule than the mean (`round.robust`) refuses this method.
        """
        return False

    not_combined: ClassVar[str] = "its aggregate is not a mean of the updates"
    """Why `combines` is False, as the end of an error message."""

    sends_same_entries: ClassVar[bool] = False
    """True if all devices of a round send the same entries of the model, so that updates can be compared."""

    def aggregate(self, state: S, updates: Iterable[tuple[DeviceId, U]], combine: Combine = MEAN) -> S:
        """Return the state after a round, from any non-empty subset of updates.

        Args:
            state: state as `plan` returned it.
            updates: pairs of device and update, ascending by device; they can be iterated once.
            combine: makes an empty combination, to which weighted updates are added.
        """
        ...

    def discount(self, state: S, update: U, factor: float) -> U:
        """Return a stale update with `factor` in (0, 1) of its weight.

        The rest goes to the model in `state`.
        """
        raise NotImplementedError(f"{type(self).__name__} is not semi-asynchronous")

    def personal_model(self, state: D) -> FlatArray:
        """Return the model that the device would use, shape (spec.size,); by default the `weights` of its
        state.
        """
        return state.weights  # type: ignore[attr-defined,no-any-return]

    def shared_model(self, state: S) -> FlatArray:
        """Return the coordinator's model, shape (spec.size,); by default the `weights` of its state."""
        return state.weights  # type: ignore[attr-defined,no-any-return]

    def diagnose_update(self, update: U) -> Mapping[str, Figure]:
        """Return diagnostics of an update by name; unknown ones are left out."""
        return {}

    def diagnose_round(self, state: S) -> Mapping[str, Figure]:
        """Return diagnostics of the state after `aggregate`, by name; unknown ones are left out."""
        return {}

    @classmethod
    def utility(cls, budget: Budget) -> float:
        """Return the utility of a device's round to the other devices; at most 1 at the run's epochs.

        The planner of a run with an objective weighs this utility against cost. The default was measured with
        FedSPU.
        """
        return default_utility(budget)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the ratios at which a device could run, ascending, each with its cost; at least one."""
        ...

    def finished(self, state: D) -> bool:
        """True if this device gains nothing more and leaves the run (early stopping)."""
        return False


@dataclass(frozen=True)
class lazily(Mapping[DeviceId, T]):  # noqa: N801 - reads as the word it is: lazily(participants, make)
    """A mapping whose tasks are made on access, so that a round never holds all payloads at once."""

    participants: tuple[DeviceId, ...]
    make: Callable[[DeviceId], T] = field(repr=False)

    def __getitem__(self, device: DeviceId) -> T:
        if device not in self.participants:
            raise KeyError(device)
        return self.make(device)

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self.participants)

    def __len__(self) -> int:
        return len(self.participants)
