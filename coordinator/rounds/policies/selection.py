"""Client selection: which devices may take part in a round, how many it needs, and which are drawn."""

import math

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.speed_tiers import draw_by_speed_tier
from fleetune.coordinator.rounds.policies.unresponsive import rests
from fleetune.coordinator.rounds.policies.utility_selection import draw_by_utility
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.round import RoundSection

# seconds after the first device joined, until round 1 opens with the devices that are connected
START_S = 60.0
USUAL_START = 2  # a single device has no others to learn from


def eligible(state: EngineState) -> tuple[DeviceId, ...]:
    """Return the devices that could train now: connected, not left, not refusing; ascending."""
    return state.groups.eligible_ascending


def final_evaluators(state: EngineState) -> tuple[DeviceId, ...]:
    """Return the devices for the final evaluation: all connected ones, also those that left; ascending."""
    members = state.members.items()
    return tuple(sorted(name for name, member in members if member.ready and member.refusal is None))


def needed(state: EngineState, settings: RoundSection) -> int:
    """Return the number of devices that must be connected for a round to start.

    The number is the quorum; before the first round, it is `start_with` (or `usual_start`). Devices that
    refused the run or left it count towards `start_with`, because they have answered. The quorum is at most
    the number of devices that have not left; otherwise the last few could never finish training. Devices that
    refused may still join, so they do not lower the quorum.
    """
    if state.round_attempt != (1, 1):
        return _quorum(state, settings)
    if settings.start_with is None:
        return settings.quorum if state.start_is_overdue else usual_start(settings)
    answered = len(state.members) - len(state.groups.staying)
    return max(settings.start_with - answered, settings.quorum)


def usual_start(settings: RoundSection) -> int:
    """Return the number of connected devices that opens round 1 at once if `start_with` is not set."""
    return max(settings.participants or USUAL_START, settings.quorum)


def short_start(state: EngineState, settings: RoundSection) -> str | None:
    """Return a log line if round 1 opened with fewer devices than `usual_start`; else None."""
    there, usual = len(state.participants), usual_start(settings)
    if state.round_attempt != (1, 1) or not state.start_is_overdue or there >= usual:
        return None
    return (
        f"round 1 opens with {there} of {usual} devices, because {START_S:g} s have passed since the first"
        " one joined; set round.start_with in run.toml to the number of devices to wait for"
    )


def pool(state: EngineState, settings: RoundSection) -> tuple[DeviceId, ...]:
    """Return the candidates for the next attempt, ascending.

    Devices that declined this round are candidates only if too few others remain, and only after a pause. So
    a fleet that always declines at once is asked once in each deadline.
    """
    candidates, declined = eligible(state), state.groups.declined
    others = tuple(d for d in candidates if d not in declined) if declined else candidates
    if len(others) >= needed(state, settings) or state.timing.until is not None:
        return others
    return candidates


def target(state: EngineState, settings: RoundSection) -> int:
    """Return the number of updates that closes the open round: K, or the number of participants if smaller.

    K is `round.participants`. In `mode = "buffer"` the result is the buffer's size. In `mode = "window"` the
    round closes by time, or when all participants have answered.
    """
    if settings.mode == "buffer" and state.stage == "training":
        return max(settings.buffer or 1, settings.quorum)
    asked = len(state.participants)
    if settings.mode == "window":
        return asked
    return min(settings.participants or asked, asked)


def draw(
    candidates: tuple[DeviceId, ...], state: EngineState, settings: RoundSection, seed: int
) -> tuple[DeviceId, ...]:
    """Draw the participants of the next attempt, ascending: ceil(K * over_selection) of `candidates`, at most
    all.

    The rule `settings.prefer` selects them. The draw depends on the candidates, the attempt
    and the run's seed only, not on the order in which devices joined.
    """
    key = Key.of("fleetune", seed).child("participants", *state.round_attempt)
    if settings.participants is None:
        count, least = len(candidates), _quorum(state, settings)
    else:
        product = settings.participants * settings.over_selection
        # avoids a rounding error: 100 * 1.1 is 110.00000000000001
        count, least = math.ceil(product - 1e-9), settings.participants
    return choose(candidates, state, settings, key, count=count, least=least)


def choose(
    candidates: tuple[DeviceId, ...],
    state: EngineState,
    settings: RoundSection,
    key: Key,
    *,
    count: int,
    least: int,
) -> tuple[DeviceId, ...]:
    """Draw at most `count` of `candidates` with `key`, and return them ascending.

    Unresponsive devices (see `rests`) are drawn only if fewer than `least` others exist. For
    `prefer = "oort"` see `utility_selection`, for `"tiers"` see `speed_tiers`.
    """
    number = state.round_attempt.number
    silent = {d for d in state.groups.missing if rests(state.members[d], number)}
    first = tuple(d for d in candidates if d not in silent) if silent else candidates
    drawn = _drawn(first, state, settings, key, count)
    rest = tuple(d for d in candidates if d in silent) if silent else ()
    return tuple(sorted(drawn + _sample(rest, least - len(drawn), key.child("silent"))))


def _drawn(
    candidates: tuple[DeviceId, ...], state: EngineState, settings: RoundSection, key: Key, count: int
) -> tuple[DeviceId, ...]:
    # a device that returned from its rest may be one too many
    if not settings.by_utility or not candidates or count <= 0:
        return _sample(candidates, count, key)
    draws = draw_by_speed_tier if settings.prefer == "tiers" else draw_by_utility
    return draws(candidates, state, count, key)


def _quorum(state: EngineState, settings: RoundSection) -> int:
    if not state.groups.left:
        return settings.quorum
    return max(1, min(settings.quorum, len(state.groups.staying)))


def _sample(devices: tuple[DeviceId, ...], count: int, key: Key) -> tuple[DeviceId, ...]:
    return tuple(devices[index] for index in key.sample(max(0, min(count, len(devices))), len(devices)))
