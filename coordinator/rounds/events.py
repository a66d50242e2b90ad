"""Events: the input of the round engine. Each is a fact from a device, the clock or the owner.

The engine answers them with `coordinator.rounds.actions`. A round that misses its quorum is tried again
under the same number, with the next attempt. The final evaluation works like any other round.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.identity import Identity


@dataclass(frozen=True)
class DeviceReady:
    """A device is enrolled and connected: for the first time, late, or again.

    `base`: digest of the model that it holds, where tasks are sent as differences; None: it cannot use them.
    `agent`: program and version of its agent; "": not reported, or simulated. `identity`: who it is; None:
    simulated.
    """

    report: DeviceReport
    base: str | None = None
    agent: str = ""
    identity: Identity | None = None


@dataclass(frozen=True)
class DeviceGone:
    """A device disconnected (last will, or a clean leave). It may reconnect."""

    device: DeviceId


@dataclass(frozen=True)
class ReplyArrived:
    """A device's complete reply, to a round or the final evaluation, was verified and stored.

    `rejection`: reason why it does not count; None: it counts. It is checked once, when the reply is received
    (see `coordinator.rounds.rejections`). `leaving`: further training gains the device nothing, so it leaves
    the run (early stopping). `loss`: training loss; None: not known. `compression_error`: see
    `RoundCost.compression_error`.
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
    """A device declines this round. Round 0: it refuses to join the run.

    `diverged`: its training, or its task, had numbers that are not finite. `replied`: the device did its
    task, but the coordinator refused the reply and therefore declines for it.
    """

    device: DeviceId
    round: int
    attempt: int
    reason: str
    diverged: bool = False
    replied: bool = False


@dataclass(frozen=True)
class Aggregated:
    """The updates that `Aggregate` named gave finite numbers.

    `suspects`: devices with an outlying update-norm ratio. They are left out first if the next round shows
    that this one broke training.
    """

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class NotAggregated:
    """The updates that `Aggregate` named gave numbers that are not finite. `suspects`: the likely causes."""

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class ClockSet:
    """The time of day is now `ahead_s` seconds ahead of the run's clock (see `schedule`)."""

    ahead_s: float


@dataclass(frozen=True)
class Paused:
    """No round opens from now on; an open round is completed. `paused` False: rounds open again."""

    paused: bool


@dataclass(frozen=True)
class RoundsEnded:
    """No further round opens after the current one, except the final evaluation."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed; due when `RoundEngine.wake_at` is reached."""


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
