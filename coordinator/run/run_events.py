"""What became of a run's rounds: events, each a noun with a past participle, told when they are durable.

The run controller hands what became of its rounds to whoever carries payloads (the server, the simulator),
which tells it to observers (`coordinator.run.observers`), between `RunBegan`, the first, and `RunLeft`, the
last. The simulator has no `Moment`s: its clock does not wait for anybody to look.
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
    """Somebody is at the run from now on.

    Attributes:
        run: its unique id.
        settings: of the run.
        closed: records of the rounds that were closed before, ascending, of a run that goes on.
        simulated: times are of a virtual clock.
    """

    run: str
    settings: RunSettings
    closed: Sequence[RoundRecord]
    simulated: bool


@dataclass(frozen=True)
class Notice:
    """A line for people."""

    line: str


@dataclass(frozen=True)
class Activity:
    """What a device is busy with right now, as far as the wire shows; `fraction` 0..1, None: not known."""

    doing: Literal["receiving", "training", "evaluating", "sending"]
    fraction: float | None = None


@dataclass(frozen=True)
class Moment:
    """The run as it stands, told now and then; looking at moments takes 5 % of the server's time at most.

    Attributes:
        now: on the run's clock.
        problem: why the broker is not reached; None: it is.
        activities: makes the activities of all devices that are busy; it costs as much as there are devices.
    """

    now: float
    problem: str | None
    activities: Callable[[], Mapping[DeviceId, Activity]]


@dataclass(frozen=True)
class ReplyDropped:
    """A reply does not count, because of an `rejection` (see `coordinator.rounds.rejections`).

    Its device is not told, but for an offer that was refused: a whole reply is acknowledged, so that it is
    not offered again.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason


@dataclass(frozen=True)
class ReplyRefused:
    """A reply's content is damaged or implausible; its device is told, and is as if it had declined."""

    device: DeviceId
    round: int
    attempt: int
    problem: PacketError


@dataclass(frozen=True)
class RoundClosed:
    """A round, or the final evaluation, is aggregated and written down."""

    record: RoundRecord


@dataclass(frozen=True)
class RoundAbandoned:
    """An attempt at a round was given up; `absent` are those that were asked and had not replied."""

    round: int
    attempt: int
    reason: Miss
    absent: tuple[DeviceId, ...]


@dataclass(frozen=True)
class RunFinished:
    """The run is over, and why."""

    reason: str


@dataclass(frozen=True)
class RunLeft:
    """Nobody is at the run any more: it is finished, was stopped, or could not go on. The last event."""


Happening = ReplyDropped | ReplyRefused | RoundClosed | RoundAbandoned | Notice | RunFinished
RunEvent = RunBegan | Moment | Happening | RunLeft
