"""What is still to come on the virtual clock, as data: it can be written down, and gone on with."""

import heapq
from collections.abc import Iterable

from msgspec import Struct

from fleetune.edge_agent.run.round_planner import RoundWork
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator.simulated_device import FinishedReply


class TaskArrives(Struct, frozen=True, tag=True):
    """A task has reached its device."""

    device: str
    key: TransferKey
    num_bytes: int


class Uploads(Struct, frozen=True, tag=True):
    """A device that made this reply before sends it once more."""

    device: str
    made: FinishedReply


class TrainingDone(Struct, frozen=True, tag=True):
    """A device is done with a task, after `train_s`; `turns` of samples had come when it began."""

    device: str
    work: RoundWork
    train_s: float
    turns: int


class ReplyArrives(Struct, frozen=True, tag=True):
    """An encoded `Reply` has reached the coordinator."""

    device: str
    reply: bytes
    work: RoundWork


class ReplyAcknowledged(Struct, frozen=True, tag=True):
    """A device has heard that its reply is there."""

    device: str


class DeviceRetries(Struct, frozen=True, tag=True):
    """A device that nothing fitted looks again."""

    device: str


class AvailabilityDrawn(Struct, frozen=True, tag=True):
    """Devices come and go."""

    stretch: int


class SamplesArrive(Struct, frozen=True, tag=True):
    """To all devices; turns count from 0."""

    turn: int


class DaysEnd(Struct, frozen=True, tag=True):
    """No round opens any more."""


class EngineWakes(Struct, frozen=True, tag=True):
    """The engine asked to be woken then."""

    due: float


DeviceEvent = TaskArrives | Uploads | TrainingDone | ReplyArrives | ReplyAcknowledged | DeviceRetries
SimulationEvent = DeviceEvent | AvailabilityDrawn | SamplesArrive | DaysEnd | EngineWakes
QueueEntry = tuple[float, int, SimulationEvent]  # when, and which of those at the same time comes first


class EventQueue:
    """What happens next is what is due first; of things due at once, what was put down first."""

    def __init__(self) -> None:
        self._entries: list[QueueEntry] = []
        self._next_number = 0
        self._popped = 0

    def add(self, time_s: float, happening: SimulationEvent) -> int:
        """Put something down; its number."""
        number = self._next_number
        self._next_number += 1
        heapq.heappush(self._entries, (time_s, number, happening))
        return number

    def add_next(self, now: float, happening: SimulationEvent) -> None:
        """Put down what belongs to what happens now: it comes before all else that is due."""
        heapq.heappush(self._entries, (now, self._popped, happening))

    def pop(self) -> QueueEntry:
        """What is next."""
        entry = heapq.heappop(self._entries)
        self._popped = entry[1]
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[QueueEntry]:
        """All, in the order in which they come."""
        return sorted(self._entries, key=lambda entry: entry[:2])

    def restore(self, entries: Iterable[QueueEntry]) -> None:
        """Take over what `entries` told of another agenda."""
        self._entries = list(entries)
        self._next_number = 1 + max((number for _, number, _ in self._entries), default=-1)
