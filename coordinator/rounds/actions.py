"""Actions: requests of the round engine to its driver. Each names one round of one run.

The engine's inputs are `coordinator.rounds.events`. The results of its actions reach other components as
`coordinator.run.run_events`.
"""

from dataclasses import dataclass
from typing import Literal

from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Round

Miss = Literal["deadline", "too-few", "non-finite", "diverged"]


@dataclass(frozen=True)
class Admit:
    """Action: show the method a device's report (`Method.admit`)."""

    report: DeviceReport


@dataclass(frozen=True)
class StartRound:
    """Action: plan this round (`Method.plan`). A `SendTask` follows for each connected participant.

    `resumed`: the coordinator restarted during the round, so the same plan must be made again. In
    semi-asynchronous runs it is also True when devices join an open window: the plan is then made again with
    these devices added.
    """

    round: Round
    attempt: int
    resumed: bool = False


@dataclass(frozen=True)
class SendTask:
    """Action: send a participant its task. Repeated if the device reconnects without having replied."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class KeepReply:
    """Action: store this accepted reply for its round."""

    device: DeviceId
    round: int
    attempt: int


@dataclass(frozen=True)
class DropReply:
    """Action: drop this reply; `rejection` is the reason.

    The reply is acknowledged like any other, so that the device does not offer it again.
    """

    device: DeviceId
    round: int
    attempt: int
    rejection: RejectionReason


@dataclass(frozen=True)
class Aggregate:
    """Action: aggregate exactly the replies of these devices (at least one), in this ascending order.

    Answer with the event `Aggregated` or `NotAggregated` before any other event. The engine then closes the
    round, tries again without some of the updates, or abandons the round.
    """

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class CloseRound:
    """Action: adopt the result of the last `Aggregate`, and record the round."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class AbandonRound:
    """Action: drop this attempt's plan and updates. The round is tried again under the same number.

    `reason`: "deadline": too few devices had replied in time; "too-few": no device is left that could still
    reply; "non-finite": the updates do not aggregate to finite numbers; "diverged": training diverges on this
    model.
    """

    number: int
    attempt: int
    reason: Miss


@dataclass(frozen=True)
class RollBack:
    """Action: undo this round, the last closed one, and try it again under the same number.

    The method's state is reset to its value before the round's plan. Every device is admitted again.
    """

    number: int
    attempt: int


@dataclass(frozen=True)
class CloseFinalEvaluation:
    """Action: end the final evaluation without aggregation; `devices` (ascending, may be empty) took part."""

    number: int
    attempt: int
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True)
class FinishRun:
    """Action: end the run and notify every device. This is the last action of a run."""

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
