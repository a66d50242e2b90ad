"""Devices that take their tasks and never answer: drawn after all others, and tried again ever more rarely.

A device that let `MISSES` whole deadlines pass in a row rests for 2 rounds, then for 4, up to `LONGEST_REST`,
until it answers once. An honest device that was cut off comes back this way; one that only pretends to be
there costs a round its deadline ever more rarely.
"""

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.coordinator import RoundSection

MISSES = 3
LONGEST_REST = 64  # rounds
_MOST = MISSES + LONGEST_REST.bit_length() - 2  # misses that count


def note_missed(state: EngineState, settings: RoundSection, *, paced: bool = False) -> None:
    """The open turn ends: if it had the whole deadline, whoever is still awaited has missed it.

    A deadline that was only predicted is no proof of silence; but where rounds keep a pace, who does not is
    asked more rarely, every eighth round at least, until an answer comes, however late.
    """
    overdue = state.timing.until is not None and state.timing.seen_at >= state.timing.until
    whole = paced or settings.mode == "window" or (state.timing.span_s or 0.0) >= settings.deadline_s
    if overdue and whole:
        for device in tuple(state.groups.awaited):
            miss(state, device, MISSES + 2 if paced else _MOST)


def miss(state: EngineState, device: DeviceId, most: int = _MOST) -> None:
    """It took too long for its task; `most`: times in a row that count."""
    state.put(device, missed=min(state.members[device].observed.missed + 1, most))


def note_answer(state: EngineState, device: DeviceId) -> None:
    """Whatever it says, it is there."""
    if state.members[device].observed.missed:
        state.put(device, missed=0)


def rests(member: Member, number: int) -> bool:
    """Whether it is asked in round `number` only if others are too few."""
    return member.observed.missed >= MISSES and number - member.asked.number < 2 ** (
        member.observed.missed - MISSES + 1
    )
