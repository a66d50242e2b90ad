"""Handles unresponsive devices, which take tasks and never answer: exponential back-off, drawn last.

A device that misses `MISSES` whole deadlines in a row rests for 2 rounds, then for 4, up to `LONGEST_REST`,
until it answers once. So an honest device that was cut off returns to training. A device that only pretends
to be connected makes rounds wait for their deadline more and more rarely.
"""

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.round import RoundSection

MISSES = 3
LONGEST_REST = 64  # rounds
_MOST = MISSES + LONGEST_REST.bit_length() - 2  # highest number of misses that is counted


def note_missed(state: EngineState, settings: RoundSection, *, paced: bool = False) -> None:
    """End the open attempt: count a missed deadline for every awaited device that had the whole deadline.

    A shorter, predicted deadline does not prove that a device is unresponsive. In rounds that follow the
    target duration (`paced`), a device that misses the deadline is selected less often, but at least every
    eighth round, until it answers, however late.
    """
    overdue = state.timing.until is not None and state.timing.seen_at >= state.timing.until
    whole = paced or settings.mode == "window" or (state.timing.span_s or 0.0) >= settings.deadline_s
    if overdue and whole:
        for device in tuple(state.groups.awaited):
            miss(state, device, MISSES + 2 if paced else _MOST)


def miss(state: EngineState, device: DeviceId, most: int = _MOST) -> None:
    """Count a missed deadline of the device, up to `most` in a row."""
    state.put(device, missed=min(state.members[device].observed.missed + 1, most))


def note_answer(state: EngineState, device: DeviceId) -> None:
    """Reset the device's missed deadlines: any answer shows that it is responsive."""
    if state.members[device].observed.missed:
        state.put(device, missed=0)


def rests(member: Member, number: int) -> bool:
    """True if the device rests in round `number`: it is selected only if others are too few."""
    return member.observed.missed >= MISSES and number - member.asked.number < 2 ** (
        member.observed.missed - MISSES + 1
    )
