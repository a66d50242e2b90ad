"""Rolls back a closed round, and ends a run whose rounds keep failing.

A round fails if its updates do not aggregate to finite numbers. It is then tried again. A closed round is
rolled back if the training of all devices in the next round diverges. If no round can be rolled back, the
open round is tried again.
"""

from fleetune.coordinator.rounds.engine_state import NEVER, EngineState

DIVERGED = "the training of all devices diverged"
MAX_RETRIES = 3  # maximum number of retries of one round
# training must diverge on this many devices, or on all that are connected, before a round is rolled back
WITNESSES = 3


def breaks_training(state: EngineState) -> bool:
    """True if training diverged on every participant, and there are at least `WITNESSES` participants."""
    members = state.members
    if state.stage != "training" or not state.participants:
        return False
    if not all(members[d].answer == "declined" and members[d].diverged for d in state.participants):
        return False
    witnesses = sum(members[device].diverged for device in state.groups.declined)
    return witnesses >= min(WITNESSES, len(state.groups.eligible))


def roll_back(state: EngineState) -> None:
    """Undo the last closed round. Its retry leaves out the suspects, devices with an outlying update-norm
    ratio.
    """
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
        reason = "its update made the training of all devices diverge"
        state.put(device, declined_round=closed.number, declined_reason=reason, diverged=False)


def hopeless(state: EngineState, number: int, why: str) -> str | None:
    """Count one more retry of round `number`; return the reason to end training, or None to try again."""
    failed, times = state.retries.failed
    times = times + 1 if failed == number else 1
    state.change(failed=(number, times))
    if times <= MAX_RETRIES:
        return None
    return (
        f"round {number} was tried {times} times and each time {why};"
        " the list of rejections shows the devices"
    )
