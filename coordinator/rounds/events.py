"""Events: the inputs of the round engine. Each is a fact about a device, the clock or the owner.

The engine answers events with `coordinator.rounds.actions`. A round that misses its quorum is tried again
under the same number, with the next attempt. The final evaluation works like any other round.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.identity import Identity


@dataclass(frozen=True)
class DeviceReady:
    """Event: a device is enrolled and connected: for the first time, late, or again.

    `base`: digest of the model that the device has, if tasks are sent as differences; None if it cannot use
    them.
    `agent`: program and version of its agent; "" if simulated or not reported.
    `identity`: the device's id, name and how it is known; None if simulated.
    """

    report: DeviceReport
    base: str | None = None
    agent: str = ""
    identity: Identity | None = None


@dataclass(frozen=True)
class DeviceGone:
    """Event: a device disconnected (last will, or a clean leave). It may reconnect."""

    device: DeviceId


@dataclass(frozen=True)
class ReplyArrived:
    """Event: a device's complete reply, to a round or the final evaluation, was verified and stored.

    `rejection`: why the reply does not count; None if it counts. This is checked once, when the reply is
    received (see `coordinator.rounds.rejections`).
    `leaving`: the device stops early, because further training gains it nothing.
    `loss`: training loss; None if unknown.
    `compression_error`: see `RoundCost.compression_error`.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason | None
    leaving: bool = False
    loss: float | None = None
    compression_error: float | None = None


@dataclass(frozen=True)
class Declined:
    """Event: a device declines this round. Round 0: it refuses to join the run.

    `diverged`: its training, or its task, had numbers that are not finite.
    `replied`: the device did its task, but the coordinator refused the reply and therefore declines for the
    device.
    """

    device: DeviceId
    round: int
    attempt: int
    reason: str
    diverged: bool = False
    replied: bool = False


@dataclass(frozen=True)
class Aggregated:
    """Event: the updates that `Aggregate` named gave finite numbers.

    `suspects`: devices with an outlying update-norm ratio. If the next round shows that this round broke
    training, the retry leaves out the suspects first.
    """

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class NotAggregated:
    """Event: the updates that `Aggregate` named gave non-finite numbers. `suspects`: the likely causes."""

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class ClockSet:
    """Event: the time of day is now `ahead_s` seconds ahead of the run's clock (see `schedule`)."""

    ahead_s: float


@dataclass(frozen=True)
class Paused:
    """Event: the owner pauses the run. An open round is completed; no other opens until `paused` is False."""

    paused: bool


@dataclass(frozen=True)
class RoundsEnded:
    """Event: the owner ends training. No further round opens, except the final evaluation."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Event: time has passed; due when `RoundEngine.wake_at` is reached."""


Event = (
    DeviceReady
    | DeviceGone
    | ReplyArrived
    | Declined
    | Aggregated
    | NotAggregated
    | ClockSet
    | Paused
    | RoundsEnded
    | Tick
)
