"""Rounds whose result nobody can go on from: found, undone, and not tried for ever.

A round is spoilt when its updates do not aggregate to finite numbers, and taken back when it closed but the
training of all who are asked next diverges; where there is nothing to take back, that round is tried again.
The engine changes its state here and nowhere else for either.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fleetune.coordinator.rounds.engine_state import NEVER, EngineState, Turn
from fleetune.protocols.method.method import DeviceId

DIVERGED = "the training of all devices diverged"
MAX_SPOILT = 3  # how often one round is tried again
WITNESSES = 3  # devices, or all that are there, whose training must diverge before a round is taken back


@dataclass(frozen=True)
class Verdict:
    """On a round that could close.

    Attributes:
        sound: its updates aggregate.
        suspects: whose are told to be the reason if not; if they do, whose strained it most.
    """

    sound: bool
    suspects: tuple[DeviceId, ...] = ()


Judge = Callable[[Turn, tuple[DeviceId, ...]], Verdict]


def breaks_training(state: EngineState) -> bool:
    """Whether all who were asked say that training diverges on this model, and they are enough."""
    members = state.members
    if state.stage != "training" or not state.participants:
        return False
    if not all(members[d].answer == "declined" and members[d].diverged for d in state.participants):
        return False
    witnesses = sum(members[device].diverged for device in state.groups.declined)
    return witnesses >= min(WITNESSES, len(state.groups.eligible))


def take_back(state: EngineState) -> None:
    """Undo the last closed round; whoever strained it most is not asked at once."""
    closed, suspects = state.closed, state.suspects
    state.count("taken-back")
    state.change(
        stage="waiting",
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
    """Note that round `number` is to be tried again; why training ends instead, None: it goes on."""
    spoilt, times = state.spoilt
    times = times + 1 if spoilt == number else 1
    state.change(spoilt=(number, times))
    if times <= MAX_SPOILT:
        return None
    return f"round {number} was tried {times} times and each time {why}; see what was refused"
