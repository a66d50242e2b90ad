"""The interface between a run and its features on the coordinator: hooks, their arguments, and a state slot.

A feature is one class here and one line in `coordinator.extensions.order`. Its hooks are called at fixed
points of a round. A hook that the class does not override changes nothing.

All hooks but `admit`, `check` and `weigh` run inside `store.step()`, so that what they write is durable
together with the round. Everything an extension remembers beyond one round lies in its `StateSlot`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from fleetune.coordinator.combine.round_combine import RoundCombine
from fleetune.coordinator.extensions.update_norms import UpdateNorms
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import Assignment, Reply

S = TypeVar("S")


@dataclass(frozen=True)
class RunContext:
    """What an extension may use of its run.

    Attributes:
        settings: of the run; an extension keeps only the section that it needs.
        learns: the run's task, with its scores.
        method: of the run.
        store: of the run.
        state: of the round engine; extensions read it and never change it.
        norms: measures updates against the shared model and against each other.
        combine: combines the updates of each round.
    """

    settings: RunSettings
    learns: Task
    method: Method[Any, Any, Any, Any]
    store: RunStore
    state: EngineState
    norms: UpdateNorms
    combine: RoundCombine


@dataclass(frozen=True)
class Arrival:
    """A reply that has arrived and is not accepted yet.

    Attributes:
        reply: the decoded reply.
        report: the latest report of its device; None if it gave none.
        counts: True if the reply is to count in the open round; otherwise only its claims are checked.
        others: returns the updates that the open round has from other devices, weighed.
    """

    reply: Reply[Any]
    report: DeviceReport | None
    counts: bool
    others: Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class RoundUpdates:
    """The round whose updates are weighed.

    Attributes:
        number: number of the round.
        devices: devices whose updates it takes, ascending.
        planned: the method's state after the plan of the round.
        tasks: planned tasks, by device.
        reply_of: reads a device's reply.
    """

    number: int
    devices: tuple[DeviceId, ...]
    planned: Any
    tasks: Mapping[DeviceId, Any]
    reply_of: Callable[[DeviceId], Reply[Any]]


@dataclass
class ClosedRound:
    """A round that has just closed, before its record is written.

    Attributes:
        record: of the round; extensions replace it to add to it.
        now: on the run's clock, seconds.
        ledger: counts over the whole run.
        method_state: of the method after the round.
        amended: devices whose part of the record was changed.
    """

    record: RoundRecord
    now: float
    ledger: Ledger
    method_state: Any
    amended: set[DeviceId] = field(default_factory=set)

    def amend(self, device: DeviceId, **changes: Any) -> None:
        """Change these fields of a device's part of the record."""
        devices = dict(self.record.devices)
        devices[device] = msgspec.structs.replace(devices[device], **changes)
        self.record = msgspec.structs.replace(self.record, devices=devices)
        self.amended.add(device)


class StateSlot(Generic[S]):
    """Stored state of one extension, under a name of its own.

    Args:
        store: the run's store.
        name: name of the value; no two extensions share one.
        kind: a msgspec type.
        new: initial state.
    """

    def __init__(self, store: RunStore, name: str, kind: type[S], new: S) -> None:
        self._store, self._name, self._kind, self._new = store, name, kind, new

    def read(self) -> S:
        """Return the stored state; the state of a new run if none was stored."""
        data = self._store.get(self._name)
        return self._new if data is None else msgspec.json.decode(data, type=self._kind)

    def write(self, state: S) -> None:
        """Replace the state, inside `store.step()`."""
        self._store.put(self._name, msgspec.json.encode(state))


class Extension:
    """One feature of a run. Every hook here does nothing."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of its values in the run's store."""

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        """Return the extension for this run; None if the run does not use it."""
        raise NotImplementedError

    def recall(self) -> None:
        """Load the stored state when a run is resumed."""

    def admit(self, report: DeviceReport) -> None:
        """Check a device's report when it joins. Raises PacketError if the device may not take part."""

    def check(self, arrival: Arrival) -> None:
        """Check a reply. Raises PacketError to refuse it."""

    def before_send(self, assignment: Assignment[Any]) -> Assignment[Any]:
        """Return the task as it should be sent."""
        return assignment

    def record(self, reply: Reply[Any], row: DeviceRound) -> DeviceRound:  # noqa: ARG002 - for those that use it
        """Return the record of an accepted reply."""
        return row

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:  # noqa: ARG002
        """Yield the replies of a round one by one, with their updates as they should count."""
        return replies

    def after_round(self, closed: ClosedRound) -> Iterable[str]:  # noqa: ARG002
        """Process a closed round, training or final evaluation; return messages for the log."""
        return ()

    def after_rollback(self, number: int) -> None:
        """Handle that closed round `number` was rolled back."""

    def forget(self, device: DeviceId) -> None:
        """Remove everything that is stored about a device, inside `store.step()`."""


class Extensions:
    """The extensions of one run, called in their order.

    Args:
        chain: in the order of `coordinator.extensions.order`.
    """

    def __init__(self, chain: tuple[Extension, ...]) -> None:
        self._chain = chain

    def recall(self) -> None:
        """Call `Extension.recall` of every extension."""
        for one in self._chain:
            one.recall()

    def admit(self, report: DeviceReport) -> None:
        """Call `Extension.admit` of every extension."""
        for one in self._chain:
            one.admit(report)

    def check(self, arrival: Arrival) -> None:
        """Call `Extension.check` of every extension."""
        for one in self._chain:
            one.check(arrival)

    def before_send(self, assignment: Assignment[Any]) -> Assignment[Any]:
        """Return the task after `Extension.before_send` of every extension."""
        for one in self._chain:
            assignment = one.before_send(assignment)
        return assignment

    def record(self, reply: Reply[Any], row: DeviceRound) -> DeviceRound:
        """Return the record after `Extension.record` of every extension."""
        for one in self._chain:
            row = one.record(reply, row)
        return row

    def updates(self, round_: RoundUpdates) -> Iterator[tuple[DeviceId, Any]]:
        """Yield the round's updates one by one, weighed by each extension in turn."""
        replies: Iterator[Reply[Any]] = map(round_.reply_of, round_.devices)
        for one in self._chain:
            replies = one.weigh(replies, round_)
        for reply in replies:
            yield reply.device, reply.update
            del reply  # before the next one is read

    def after_round(self, closed: ClosedRound) -> list[str]:
        """Call `Extension.after_round` of every extension; return their messages for the log."""
        return [line for one in self._chain for line in one.after_round(closed)]

    def after_rollback(self, number: int) -> None:
        """Call `Extension.after_rollback` of every extension."""
        for one in self._chain:
            one.after_rollback(number)

    def forget(self, device: DeviceId) -> None:
        """Call `Extension.forget` of every extension."""
        for one in self._chain:
            one.forget(device)
