"""Whether a reply counts: the one place that says so, and why not.

It is asked once of every reply, by `RunController` as it comes in whole, and before that of every offer of
one (`coordinator.serving.message_checks.offer_rejection`), so that what would not count does not travel.
A round that a device declines is asked about as well: the engine does that itself.
"""

from typing import Literal

from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.protocols.method.method import DeviceId

RejectionReason = Literal["late", "duplicate", "stale", "foreign", "unknown"]


def rejection_of(state: EngineState, device: DeviceId, turn: RoundAttempt) -> RejectionReason | None:
    """What speaks against counting a reply of `device` to `turn`; None: it counts.

    "late": its round is closed; "stale": its attempt was abandoned or, semi-asynchronously, its task was
    planned more than `round.max_staleness` aggregations ago; "duplicate": the device has already answered;
    "foreign": the device was not asked; "unknown": nobody was asked that yet.
    """
    member = state.member(device)
    asked, answer = member.asked, member.answer
    if min(turn) < 1 or turn > state.turn or (turn == state.turn and not state.running):
        return "unknown"
    if turn > asked:
        return "foreign"
    if turn == asked and answer == "expired":
        return "stale"
    if turn == asked and answer is not None and turn.number <= state.rounds_done:
        return "duplicate"
    if turn < state.turn and (turn < asked or not state.takes_part(device)):
        return "late" if turn.number <= state.rounds_done else "stale"
    return "duplicate" if answer is not None else None
