"""What the round engine is told (events) and what it wants done (actions).

A round and an attempt name one asking: a round that missed its quorum is asked again under the same
number with the next attempt. The final evaluation is asked and answered like any other round.
"""

from dataclasses import dataclass
from typing import Literal

from fleetune.protocols.skeletons.choice import DeviceReport
from fleetune.protocols.skeletons.method import DeviceId, Round

Reason = Literal["late", "duplicate", "stale", "foreign", "unknown"]
Miss = Literal["deadline", "too-few", "spoilt", "diverged"]


@dataclass(frozen=True)
class DeviceReady:
    """A device is enrolled and there: for the first time, late, or again."""

    report: DeviceReport


@dataclass(frozen=True)
class DeviceGone:
    """A device is not reachable (last will, clean leave); it may come back."""

    device: DeviceId


@dataclass(frozen=True)
class UpdateArrived:
    """A device's whole update, or its final evaluation's, is verified and on disk.

    `leaving`: the device has nothing more to gain and leaves the run (early stopping).
    """

    device: DeviceId
    round: int
    attempt: int
    leaving: bool = False


@dataclass(frozen=True)
class Declined:
    """A device will not do this round; round 0: it will not join the run.

    `diverged`: its training ended in numbers that are not finite, or its task held such.
    """

    device: DeviceId
    round: int
    attempt: int
    reason: str
    diverged: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed; due when `RoundEngine.wake_at` is reached."""


Event = DeviceReady | DeviceGone | UpdateArrived | Declined | Tick


@dataclass(frozen=True)
class Admit:
    """Let the method take note of a device (`Method.admit`)."""

    report: DeviceReport


@dataclass(frozen=True)
class StartRound:
    """Plan this round (`Method.plan`); a `SendTask` follows for each participant that is there.

    `resumed`: the coordinator restarted in mid-round; make the same plan once more. Semi-asynchronously,
    also when devices come in while a window is open: the same plan, with them among the participants.
    """

    round: Round
    attempt: int
    resumed: bool = False


@dataclass(frozen=True)
class SendTask:
    """Send a participant its task; again when it came back without having replied."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class AcceptUpdate:
    """Keep this update for its round."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class RejectUpdate:
    """Drop this update and tell the device.

    `reason`: "late", its round is closed; "stale", its attempt was abandoned or, semi-asynchronously, its
    task was planned more than `round.max_staleness` aggregations ago; "duplicate", the device has already
    answered; "foreign", the device was not asked; "unknown", nobody was asked that yet.
    """

    device: DeviceId
    round: int
    attempt: int
    reason: Reason


@dataclass(frozen=True)
class CloseRound:
    """Aggregate exactly the updates of these devices, in this (ascending) order; at least one."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class AbandonRound:
    """The quorum was missed: drop this attempt's plan and updates. The same number is asked again.

    `reason`: "deadline", too few had replied by then; "too-few", nobody is left who could still reply;
    "spoilt", the updates do not aggregate to finite numbers; "diverged", training breaks on this model.
    """

    number: int
    attempt: int
    reason: Miss


@dataclass(frozen=True)
class TakeBack:
    """Undo this round, the last that was closed: the method's state is again that of before its plan, and
    every device is admitted again. The same number is asked again.
    """

    number: int
    attempt: int


@dataclass(frozen=True)
class CloseFinalEvaluation:
    """The final evaluation is over; these devices (ascending, perhaps none) took part. Nothing is
    aggregated.
    """

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class FinishRun:
    """The run is over; tell every device. The last action of a run."""

    reason: str


Action = (
    Admit
    | StartRound
    | SendTask
    | AcceptUpdate
    | RejectUpdate
    | CloseRound
    | AbandonRound
    | TakeBack
    | CloseFinalEvaluation
    | FinishRun
)
