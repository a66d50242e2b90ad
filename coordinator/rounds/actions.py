"""Actions: what the round engine asks its driver to do. Each names one round of one run.

The engine's input are `coordinator.rounds.events`. The results of its actions reach carriers and observers
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
    """Show the method a device's report (`Method.admit`)."""

    report: DeviceReport


@dataclass(frozen=True)
class StartRound:
    """Plan this round (`Method.plan`). A `SendTask` follows for each participant that is connected.

    `resumed`: the coordinator restarted during the round, so the same plan must be made again. In
    semi-asynchronous runs it is also True when devices join an open window: the same plan, with them added.
    """

    round: Round
    attempt: int
    resumed: bool = False


@dataclass(frozen=True)
class SendTask:
    """Send a participant its task. Repeated when the device reconnects without having replied."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class KeepReply:
    """Keep this accepted reply for its round."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class DropReply:
    """Drop this reply, for the reason `rejection`.

    The reply is acknowledged like any other, so that the device does not offer it again.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason


@dataclass(frozen=True)
class Aggregate:
    """Aggregate exactly the replies of these devices, in this (ascending) order; at least one.

    Answer with the event `Aggregated` or `NotAggregated` before any other event. The engine then closes the
    round, tries again without some of the updates, or abandons the round.
    """

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class CloseRound:
    """Adopt the result of the last `Aggregate` of these devices' replies, and record the round."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class AbandonRound:
    """Drop this attempt's plan and updates. The round is tried again under the same number.

    `reason`: "deadline": too few devices had replied in time; "too-few": no device is left that could still
    reply; "non-finite": the updates do not aggregate to finite numbers; "diverged": training diverges on this
    model.
    """

    number: int
    attempt: int
    reason: Miss


@dataclass(frozen=True)
class RollBack:
    """Undo this round, the last that was closed, and try it again under the same number.

    The method's state returns to that before the round's plan. Every device is admitted again.
    """

    number: int
    attempt: int


@dataclass(frozen=True)
class CloseFinalEvaluation:
    """End the final evaluation. `devices` (ascending, perhaps none) took part. Nothing is aggregated."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class FinishRun:
    """End the run and notify every device. The last action of a run."""

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
