"""What became of a run's rounds: events, each a noun with a past participle, told when they are durable.

The run controller hands them to whoever carries payloads (the server, the simulator), which tells them to
observers.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.actions import Miss
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.rounds.reply_objections import Objection
from fleetune.protocols.errors import PacketError
from fleetune.protocols.skeletons.method import DeviceId


@dataclass(frozen=True)
class ReplyDropped:
    """A reply does not count, because of an `objection` (see `coordinator.rounds.reply_objections`).

    Its device is not told, but for an offer that was refused: a whole reply is acknowledged, so that it is
    not offered again.
    """

    device: DeviceId
    round: int
    attempt: int
    objection: Objection


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


RunEvent = ReplyDropped | ReplyRefused | RoundClosed | RoundAbandoned | RunFinished
