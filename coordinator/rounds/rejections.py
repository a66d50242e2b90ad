"""Whether a reply counts: the one place that says so, and why not.

It is asked once of every reply, by `RunController` as it comes in whole, and before that of every offer of
one (`coordinator.serving.message_checks.offer_rejection`), so that what would not count does not travel.
A round that a device declines is asked about as well: the engine does that itself.
"""

from typing import Literal

from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.protocols.method.method import DeviceId

RejectionReason = Literal["late", "duplicate", "stale", "foreign", "unknown"]


def rejection_of(state: EngineState, device: DeviceId, round_attempt: RoundAttempt) -> RejectionReason | None:
    """What speaks against counting a reply of `device` to `round_attempt`; None: it counts.

    "late": its round is closed; "stale": its attempt was abandoned or, semi-asynchronously, its task was
    planned more than `round.max_staleness` aggregations ago; "duplicate": the device has already answered;
    "foreign": the device was not asked; "unknown": nobody was asked that yet.
    """
    member = state.member(device)
    asked, answer = member.asked, member.answer
    if (
        min(round_attempt) < 1
        or round_attempt > state.round_attempt
        or (round_attempt == state.round_attempt and not state.running)
    ):
        return "unknown"
    if round_attempt > asked:
        return "foreign"
    if round_attempt == asked and answer == "expired":
        return "stale"
    if round_attempt == asked and answer is not None and round_attempt.number <= state.rounds_done:
        return "duplicate"
    if round_attempt < state.round_attempt and (round_attempt < asked or not state.takes_part(device)):
        return "late" if round_attempt.number <= state.rounds_done else "stale"
    return "duplicate" if answer is not None else None
