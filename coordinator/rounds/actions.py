"""What the round engine wants done: imperatives, in order, each about one round of one run.

The engine is told `coordinator.rounds.events`; what became of its actions is told to carriers and observers
as `coordinator.run.run_events`.
"""

from dataclasses import dataclass
from typing import Literal

from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Round

Miss = Literal["deadline", "too-few", "non-finite", "diverged"]


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
class KeepReply:
    """Keep this reply for its round: it counts."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class DropReply:
    """Drop this reply: it does not count, because of its `rejection`.

    Its device is not told: its reply is acknowledged like any other, so that it is not offered again.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason


@dataclass(frozen=True)
class Aggregate:
    """Aggregate exactly the replies of these devices, in this (ascending) order; at least one.

    Answer with the event `Aggregated` or `NotAggregated` before any other event. The engine then closes the
    round, tries it without some of the updates, or abandons it.
    """

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class CloseRound:
    """Take over what the last `Aggregate` made of the replies of these devices, and record the round."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class AbandonRound:
    """The quorum was missed: drop this attempt's plan and updates. The same number is asked again.

    `reason`: "deadline", too few had replied by then; "too-few", nobody is left who could still reply;
    "non-finite", the updates do not aggregate to finite numbers; "diverged", training breaks on this model.
    """

    number: int
    attempt: int
    reason: Miss


@dataclass(frozen=True)
class RollBack:
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
    | KeepReply
    | DropReply
    | Aggregate
    | CloseRound
    | AbandonRound
    | RollBack
    | CloseFinalEvaluation
    | FinishRun
)
