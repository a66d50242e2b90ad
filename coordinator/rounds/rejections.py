"""Decides whether a reply counts, and gives the rejection reason; no other module decides this.

`RunController` calls `rejection_of` once for every complete reply. Before that, `offer_rejection` in
`message_checks` calls it for every offered reply, so that a reply that would not count is not sent. The
engine also calls it when a device declines a round.
"""

from typing import Literal

from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.protocols.method.method import DeviceId

RejectionReason = Literal["late", "duplicate", "stale", "foreign", "unknown"]


def rejection_of(state: EngineState, device: DeviceId, round_attempt: RoundAttempt) -> RejectionReason | None:
    """Return why a reply of `device` to `round_attempt` does not count; None if it counts.

    "late": its round is closed; "stale": its attempt was abandoned or, semi-asynchronously, its task was
    planned more than `round.max_staleness` aggregations ago; "duplicate": the device has already answered;
    "foreign": the device was not a participant; "unknown": no such round was opened yet.
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
