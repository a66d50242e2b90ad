"""Events of a run, sent after they are durable. Each is named by a noun with a past participle.

The run controller returns the results of its rounds to the server or the simulator, which sends them to
observers (`coordinator.run.observers`). `RunBegan` is the first event and `RunLeft` the last. The simulator
sends no `Moment`: its virtual clock does not wait for observers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetune.coordinator.rounds.actions import Miss
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.errors import PacketError
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.run_settings import RunSettings


@dataclass(frozen=True)
class RunBegan:
    """Event: a process works on the run from now on.

    Attributes:
        run: its unique id.
        settings: the run's settings.
        closed: records of the rounds closed before, ascending, if the run continues.
        simulated: True if times are of a virtual clock.
    """

    run: str
    settings: RunSettings
    closed: Sequence[RoundRecord]
    simulated: bool


@dataclass(frozen=True)
class Notice:
    """Event: a message for the log and the screen."""

    line: str


@dataclass(frozen=True)
class Activity:
    """A device's present activity, as far as its messages show; `fraction` 0..1, None if unknown."""

    doing: Literal["receiving", "training", "evaluating", "sending"]
    fraction: float | None = None


@dataclass(frozen=True)
class Moment:
    """Event: the run's present state, sent regularly; observers use at most 5 % of the server's time for it.

    Attributes:
        now: on the run's clock.
        problem: why the broker cannot be reached; None if it can.
        activities: returns the activities of all busy devices; its cost grows with the number of devices.
    """

    now: float
    problem: str | None
    activities: Callable[[], Mapping[DeviceId, Activity]]


@dataclass(frozen=True)
class ReplyDropped:
    """Event: a reply does not count, for the reason `rejection` (see `coordinator.rounds.rejections`).

    The device is informed only if its offer was refused. A complete reply is acknowledged, so that it is not
    offered again.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason


@dataclass(frozen=True)
class ReplyRefused:
    """Event: a reply is damaged or implausible. The device is informed, and counts as if it had declined."""

    device: DeviceId
    round: int
    attempt: int
    problem: PacketError


@dataclass(frozen=True)
class RoundClosed:
    """Event: a round, or the final evaluation, is aggregated and stored."""

    record: RoundRecord


@dataclass(frozen=True)
class RoundAbandoned:
    """Event: an attempt at a round was abandoned; `absent`: participants that had not replied."""

    round: int
    attempt: int
    reason: Miss
    absent: tuple[DeviceId, ...]


@dataclass(frozen=True)
class RunFinished:
    """Event: the run is over, for the given reason."""

    reason: str


@dataclass(frozen=True)
class RunLeft:
    """Event, always the last: the process stops working on the run, because it is finished, stopped, or
    failed.
    """


Happening = ReplyDropped | ReplyRefused | RoundClosed | RoundAbandoned | Notice | RunFinished
RunEvent = RunBegan | Moment | Happening | RunLeft
