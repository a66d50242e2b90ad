"""What a method is: how to plan a round, work on a device, and aggregate.

A method is one file in `protocols/methods/` with both halves side by side: pure steps on arrays, no
I/O, no clock, no global randomness. Engine, wire, store and simulator never ask which method runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from fleetune.protocols.method.choice import Budget, Choice, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.method.utility import default_utility
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.combine import MEAN, Combine

DeviceId = str


@dataclass(frozen=True)
class Round:
    """One round as the coordinator plans it.

    Attributes:
        number: counts from 1.
        participants: the devices chosen, in ascending order.
        final_evaluation: the closing evaluation: devices do the round's work on a copy and report what it
            does to their accuracy; nothing is kept, sent or aggregated.
    """

    number: int
    participants: tuple[DeviceId, ...]
    final_evaluation: bool = False


S = TypeVar("S")  # coordinator state
D = TypeVar("D")  # device state
T = TypeVar("T")  # task
U = TypeVar("U")  # update


class Method(Protocol[S, D, T, U]):
    """A federated method. Implementations are frozen dataclasses whose fields are `spec` and the
    method's settings; S, D, T and U are frozen dataclasses that the codec can carry.

    Class attributes name the four types, so that bytes can be read back.
    """

    state_type: ClassVar[type]
    device_state_type: ClassVar[type]
    task_type: ClassVar[type]
    update_type: ClassVar[type]

    semi_asynchronous: ClassVar[bool] = False
    """Whether updates may be aggregated that were planned in different rounds (`round.mode`). Then a device's
    task does not depend on the other participants, planning twice on the same state with the same key gives
    the same, and `discount` is there."""

    tasks: ClassVar[frozenset[str] | None] = None
    """Kinds of [task] that its idea is for; None: all. A run of another kind is refused when it begins."""

    serves_shared_model: ClassVar[bool] = False
    """Whether the shared model is one that a device may serve as it is (`adoption.canary`)."""

    starts_from_task: ClassVar[bool] = False
    """Whether the values that an update sends have come, by local training, from those that the task brought
    of the same entries. Where a lossy downlink brought less than was planned, they are moved by the
    difference before they are aggregated, or what was not sent would be lost."""

    diagnostics: ClassVar[tuple[Diagnostic, ...]] = ()
    """What it tells of its inner workings, by `diagnose_update` and `diagnose_round`."""

    spec: ModelSpec

    @property
    def needs_validation(self) -> bool:
        """Whether devices must hold validation samples out for it."""
        return False

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:  # noqa: ARG003 - for those that override it
        """Defaults that depend on the run, by setting: they are written into its [method] section when it
        begins, where that leaves them open. `rounds` are the run's then; more rounds later change nothing.

        A field's own default is what a section gets that never was a run's, and runs that began without.
        """
        return {}

    @classmethod
    def defaults_of_objective(cls) -> Mapping[str, Any]:
        """Likewise, where the coordinator proposes ratios so that a run takes little time or energy: without
        what costs a device much of these and brings the run little.
        """
        return {}

    @property
    def weighs_by_samples(self) -> bool:
        """Whether `aggregate` weighs an update by its field `num_samples`, where it has one: then
        `round.max_share` limits that.
        """
        return True

    def init_coordinator(self, weights: FlatArray) -> S:
        """The state before round 1, from the initial weights."""
        ...

    def admit(self, state: S, report: DeviceReport) -> S:
        """Take note of a device: at the start, when it joins late, or when it comes back."""
        return state

    def init_device(self, weights: FlatArray) -> D:
        """A device's state before its first task."""
        ...

    def start_from(self, state: D, weights: FlatArray) -> D:
        """`state`, of `init_device`, for a device that comes with a personal model, shape (spec.size,), from
        the run that this one continues. What all devices have alike stays as it is.
        """
        return replace(state, weights=weights)  # type: ignore[type-var]

    def plan(self, state: S, round_: Round, key: Key) -> tuple[S, Mapping[DeviceId, T]]:
        """A task for each participant. The mapping may be lazy (see `lazily`)."""
        ...

    def work(self, state: D, task: T, trainer: Trainer, budget: Budget, key: Key) -> tuple[D, U]:
        """Do a task: the device's next state and its update."""
        ...

    @property
    def combines(self) -> bool:
        """True if `aggregate` forms every mean of updates by the `combine` that it is given.

        Else a run that combines updates in another way than by their mean is refused with this method.
        """
        return False

    def aggregate(self, state: S, updates: Iterable[tuple[DeviceId, U]], combine: Combine = MEAN) -> S:
        """Take a round's updates in: any non-empty subset, in ascending order of devices, one by one.

        Args:
            state: as `plan` returned it.
            updates: by device; they can be read once.
            combine: makes an empty combination, to which weighted updates are added.
        """
        ...

    def discount(self, state: S, update: U, factor: float) -> U:
        """A stale update at `factor` in (0, 1) of its weight, the rest of which goes to `state`."""
        raise NotImplementedError(f"{type(self).__name__} is not semi-asynchronous")

    def personal_model(self, state: D) -> FlatArray:
        """The model this device would use, shape (spec.size,); its state's `weights` unless overridden."""
        return state.weights  # type: ignore[attr-defined,no-any-return]

    def shared_model(self, state: S) -> FlatArray:
        """The coordinator's model, shape (spec.size,); its state's `weights` unless overridden."""
        return state.weights  # type: ignore[attr-defined,no-any-return]

    def diagnose_update(self, update: U) -> Mapping[str, Figure]:
        """The `diagnostics` of an update, by name; what is not known of this one is left out."""
        return {}

    def diagnose_round(self, state: S) -> Mapping[str, Figure]:
        """Return the `diagnostics` of the state that `aggregate` gave, by name; unknown ones are left out."""
        return {}

    @classmethod
    def utility(cls, budget: Budget) -> float:
        """Utility of a device's round within a budget to the other devices; at most 1 at the run's epochs.

        Runs with an objective plan for the most utility at the least cost. The default was measured with
        FedSPU.
        """
        return default_utility(budget)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """The ratios a device could run at, ascending, each with its cost; at least one."""
        ...

    def finished(self, state: D) -> bool:
        """Whether this device has nothing more to gain and leaves the run (early stopping)."""
        return False


@dataclass(frozen=True)
class lazily(Mapping[DeviceId, T]):  # noqa: N801 - reads as the word it is: lazily(participants, make)
    """Tasks made when they are asked for, so that a round never holds all its payloads."""

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
