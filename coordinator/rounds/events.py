"""What the round engine is told: facts, each a noun with a past participle, from devices, clocks and owner.

What it wants done about them are `coordinator.rounds.actions`. A round and an attempt name one asking: a
round that missed its quorum is asked again under the same number with the next attempt. The final evaluation
is asked and answered like any other round.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId


@dataclass(frozen=True)
class DeviceReady:
    """A device is enrolled and there: for the first time, late, or again.

    `base`: digest of what it holds of the model, where tasks are differences to that; None: it reads none.
    `agent`: program and version of its agent; "": not reported, or simulated.
    """

    report: DeviceReport
    base: str | None = None
    agent: str = ""


@dataclass(frozen=True)
class DeviceGone:
    """A device is not reachable (last will, clean leave); it may come back."""

    device: DeviceId


@dataclass(frozen=True)
class ReplyArrived:
    """A device's whole reply, to a round or to the final evaluation, is verified and on disk.

    `rejection`: what speaks against counting it, asked once by whoever takes it in (see
    `coordinator.rounds.rejections`); None: it counts. `leaving`: the device has nothing more to gain
    and leaves the run (early stopping). `loss`: of its training; None: not known. `num_bytes`: of its
    payload. `joules`: that its round took, or was to take.
    `change`: how much its update changed what it was sent; None: not known, or nobody asks for it.
    `compression_error`: see `RoundCost.left_out`.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason | None
    leaving: bool = False
    loss: float | None = None
    num_bytes: int = 0
    joules: float | None = None
    change: float | None = None
    compression_error: float | None = None


@dataclass(frozen=True)
class Declined:
    """A device will not do this round; round 0: it will not join the run.

    `diverged`: its training ended in numbers that are not finite, or its task held such. `replied`: the
    coordinator says it, because it refused the device's reply: the device has done its task.
    """

    device: DeviceId
    round: int
    attempt: int
    reason: str
    diverged: bool = False
    replied: bool = False


@dataclass(frozen=True)
class Aggregated:
    """The updates that `Aggregate` named made finite numbers.

    `suspects`: devices whose update-norm ratio stood out. They are the first to be left out if the next round
    shows that this one broke training.
    """

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class NotAggregated:
    """The updates that `Aggregate` named made numbers that are not finite; `suspects`: the likely causes."""

    suspects: tuple[DeviceId, ...] = ()


@dataclass(frozen=True)
class ClockSet:
    """The time of day was found to be `ahead_s` seconds ahead of the run's clock (see `schedule`)."""

    ahead_s: float


@dataclass(frozen=True)
class Paused:
    """No round opens from now on; the one that runs is finished. `paused` False: they open again."""

    paused: bool


@dataclass(frozen=True)
class RoundsEnded:
    """There shall be no further round after the one that runs, but for the final evaluation."""

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
