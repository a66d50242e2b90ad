"""Rolling back a closed round, and ending a run whose rounds fail again and again.

A round fails when its updates do not aggregate to finite numbers. It is then tried again. A closed round is
rolled back when the training of all devices that are asked next diverges. Where no round can be rolled back,
the open round is tried again.
"""

from fleetune.coordinator.rounds.engine_state import NEVER, EngineState

DIVERGED = "the training of all devices diverged"
MAX_RETRIES = 3  # how often one round is tried again
WITNESSES = 3  # devices, or all that are there, whose training must diverge before a round is rolled back


def breaks_training(state: EngineState) -> bool:
    """True if training diverged on every participant, and there are at least `WITNESSES` of them."""
    members = state.members
    if state.stage != "training" or not state.participants:
        return False
    if not all(members[d].answer == "declined" and members[d].diverged for d in state.participants):
        return False
    witnesses = sum(members[device].diverged for device in state.groups.declined)
    return witnesses >= min(WITNESSES, len(state.groups.eligible))


def roll_back(state: EngineState) -> None:
    """Undo the last closed round. The suspects, whose update-norm ratio stood out, are not asked at once."""
    closed, suspects = state.retries.closed, state.retries.suspects
    state.count("rolled-back")
    state.move(
        "round rolled back",
        rounds_done=closed.number - 1,
        attempt=closed.attempt + 1,
        next_attempt=state.attempt + 1,
        participants=(),
        until=None,
        closed=NEVER,
        suspects=(),
    )
    for device, member in list(state.members.items()):
        declined = member.declined_round if member.declined_round <= closed.number else 0
        state.put(device, admitted=False, declined_round=declined)
    for device in suspects:
        reason = "its update broke everybody's training"
        state.put(device, declined_round=closed.number, declined_reason=reason, diverged=False)


def hopeless(state: EngineState, number: int, why: str) -> str | None:
    """Count one more try of round `number`. Returns why training ends instead, or None: it is tried again."""
    failed, times = state.retries.failed
    times = times + 1 if failed == number else 1
    state.change(failed=(number, times))
    if times <= MAX_RETRIES:
        return None
    return f"round {number} was tried {times} times and each time {why}; see what was refused"
