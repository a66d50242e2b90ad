"""The virtual clock of a simulation, and its future events, in a form that a checkpoint stores."""

import heapq
from collections.abc import Iterable

from msgspec import Struct

from fleetune.edge_agent.run.round_planner import RoundWork
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator.simulated_device import FinishedReply


class TaskArrives(Struct, frozen=True, tag=True):
    """Event: the last byte of a task has reached its device."""

    device: str
    key: TransferKey
    num_bytes: int


class Uploads(Struct, frozen=True, tag=True):
    """Event: a device that got its task again sends the reply that it already has."""

    device: str
    made: FinishedReply


class TrainingDone(Struct, frozen=True, tag=True):
    """Event: a device has finished a task, after `train_s` seconds.

    `deliveries` is the number of sample deliveries before the task was sent.
    """

    device: str
    work: RoundWork
    train_s: float
    deliveries: int


class ReplyArrives(Struct, frozen=True, tag=True):
    """Event: an encoded `Reply` has reached the coordinator."""

    device: str
    reply: bytes
    work: RoundWork


class ReplyAcknowledged(Struct, frozen=True, tag=True):
    """Event: a device has received the acknowledgement of its reply."""

    device: str


class DeviceRetries(Struct, frozen=True, tag=True):
    """Event: a device that could afford no option checks its conditions again."""

    device: str


class AvailabilityDrawn(Struct, frozen=True, tag=True):
    """Event: devices connect and disconnect; periods of `deadline_s` count from 0."""

    period: int


class SamplesArrive(Struct, frozen=True, tag=True):
    """Event: new samples reach all devices; deliveries count from 0."""

    delivery: int


class DaysEnd(Struct, frozen=True, tag=True):
    """Event: the simulated days are over; no further round opens."""


class EngineWakes(Struct, frozen=True, tag=True):
    """Event: the round engine is called at `due`, as it requested."""

    due: float


DeviceEvent = TaskArrives | Uploads | TrainingDone | ReplyArrives | ReplyAcknowledged | DeviceRetries
SimulationEvent = DeviceEvent | AvailabilityDrawn | SamplesArrive | DaysEnd | EngineWakes
QueueEntry = tuple[float, int, SimulationEvent]  # time, order among events at the same time, event


class EventQueue:
    """The virtual clock and its future events, ordered by time, then by when they were added.

    Args:
        starts_s: time of day at which the clock starts, seconds since 1970.

    Attributes:
        now: time of the last popped event, in seconds since the start.
    """

    def __init__(self, starts_s: float) -> None:
        self.starts_s = starts_s
        self.now = 0.0
        self._entries: list[QueueEntry] = []
        self._next_number = 0
        self._popped = 0

    @property
    def wall_s(self) -> float:
        """Current time of day, in seconds since 1970."""
        return self.starts_s + self.now

    def add(self, time_s: float, event: SimulationEvent) -> int:
        """Add an event; return its number."""
        number = self._next_number
        self._next_number += 1
        heapq.heappush(self._entries, (time_s, number, event))
        return number

    def add_next(self, event: SimulationEvent) -> None:
        """Add an event that directly follows the present one, before all others that are due now."""
        heapq.heappush(self._entries, (self.now, self._popped, event))

    def pop(self) -> QueueEntry:
        """Remove and return the next event, and set the clock to its time."""
        entry = heapq.heappop(self._entries)
        self.now, self._popped, _ = entry
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[QueueEntry]:
        """Return all events in their order."""
        return sorted(self._entries, key=lambda entry: entry[:2])

    def restore(self, now: float, entries: Iterable[QueueEntry]) -> None:
        """Set the clock, and replace all events by the stored `entries`."""
        self.now, self._entries = now, list(entries)
        self._next_number = 1 + max((number for _, number, _ in self._entries), default=-1)
