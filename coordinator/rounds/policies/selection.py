"""Who may take part in a round, how many it takes, and who is drawn."""

import math

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.speed_tiers import draw_by_speed_tier
from fleetune.coordinator.rounds.policies.unresponsive import rests
from fleetune.coordinator.rounds.policies.utility_selection import draw_by_utility
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.coordinator import RoundSection

START_S = 60.0  # after the first device came, round 1 opens with the devices that are there
USUAL_START = 2  # one device alone learns nothing from others


def eligible(state: EngineState) -> tuple[DeviceId, ...]:
    """Devices that could train now: there, not left, not refusing; ascending."""
    return state.groups.eligible_ascending


def final_evaluators(state: EngineState) -> tuple[DeviceId, ...]:
    """Devices for the final evaluation: all that are there, those that left too; ascending."""
    members = state.members.items()
    return tuple(sorted(name for name, member in members if member.ready and member.refusal is None))


def needed(state: EngineState, settings: RoundSection) -> int:
    """How many devices must be there for a round to start.

    The quorum, and before the first round `start_with`: devices that refused the run, or left, have answered
    and are not waited for. Without `start_with` see `usual_start`. Devices that left for good lower the
    quorum to those that remain, else the last few could never train to their end; devices that refused may
    come back and do not lower it.
    """
    if state.round_attempt != (1, 1):
        return _quorum(state, settings)
    if settings.start_with is None:
        return settings.quorum if state.start_is_overdue else usual_start(settings)
    answered = len(state.members) - len(state.groups.staying)
    return max(settings.start_with - answered, settings.quorum)


def usual_start(settings: RoundSection) -> int:
    """How many devices open round 1 at once where `start_with` is not set."""
    return max(settings.participants or USUAL_START, settings.quorum)


def short_start(state: EngineState, settings: RoundSection) -> str | None:
    """A line for people when round 1 has opened with fewer devices than it waits for; else None."""
    there, usual = len(state.participants), usual_start(settings)
    if state.round_attempt != (1, 1) or not state.start_is_overdue or there >= usual:
        return None
    return (
        f"round 1 opens with {there} of {usual} devices: {START_S:g} s have passed since the first one came;"
        " round.start_with in run.toml says how many to wait for"
    )


def pool(state: EngineState, settings: RoundSection) -> tuple[DeviceId, ...]:
    """Whom to draw the coming turn from, ascending.

    Devices that declined this round are in it only when too few others remain, and then not before the
    pause is over, so that a fleet that declines at once is asked once a deadline.
    """
    candidates, declined = eligible(state), state.groups.declined
    others = tuple(d for d in candidates if d not in declined) if declined else candidates
    if len(others) >= needed(state, settings) or state.timing.until is not None:
        return others
    return candidates


def target(state: EngineState, settings: RoundSection) -> int:
    """How many updates close the open round at once: K, or all that were asked if those are fewer.

    In `mode = "buffer"` the buffer's size; in `mode = "window"` time closes, unless all have answered.
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
    """Participants of the coming turn, ascending: ceil(K * over_selection) of `candidates`, at most all,
    those that `settings.prefer` first.

    Depends on the candidates, the turn and the run's seed alone, not on who came first.
    """
    key = Key.of("fleetune", seed).child("participants", *state.round_attempt)
    if settings.participants is None:
        count, least = len(candidates), _quorum(state, settings)
    else:
        product = settings.participants * settings.over_selection
        count, least = math.ceil(product - 1e-9), settings.participants  # 100 * 1.1 is 110.00000000000001
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
    """At most `count` of `candidates`, drawn with `key`, ascending.

    Only what is missing to `least` is filled up: with `prefer = "able"` with those that are not (see `able`),
    and then with those that never answer (see `rests`). With `prefer = "oort"` and `"pyramid"` see
    `usefulness`, with `"tiers"` see `tiers`.
    """
    number, others = state.round_attempt.number, set()
    silent = {d for d in state.groups.missing if rests(state.members[d], number)}
    if settings.prefer == "able":
        others = {d for d in candidates if not able(state.members[d].report, settings)} - silent
    later = others | silent
    first = tuple(d for d in candidates if d not in later) if later else candidates
    drawn = _drawn(first, state, settings, key, count)
    for name, group in ("others", others), ("silent", silent):
        rest = tuple(d for d in candidates if d in group) if group else ()
        drawn += _sample(rest, least - len(drawn), key.child(name))
    return tuple(sorted(drawn))


def _drawn(
    candidates: tuple[DeviceId, ...], state: EngineState, settings: RoundSection, key: Key, count: int
) -> tuple[DeviceId, ...]:
    if not settings.by_utility or not candidates or count <= 0:  # who came back may be one too many
        return _sample(candidates, count, key)
    draws = draw_by_speed_tier if settings.prefer == "tiers" else draw_by_utility
    return draws(candidates, state, settings, count, key)


def able(report: DeviceReport | None, settings: RoundSection) -> bool:
    """Whether nothing a device says of itself speaks against asking it; what it does not know does not."""
    if report is None:
        return True
    told = report.conditions
    slow = report.round_s is not None and report.round_s > settings.deadline_s
    drained = told.power == "battery" and told.battery is not None and told.battery < settings.min_battery
    return not (slow or drained or told.metered)


def _quorum(state: EngineState, settings: RoundSection) -> int:
    if not state.groups.left:
        return settings.quorum
    return max(1, min(settings.quorum, len(state.groups.staying)))


def _sample(devices: tuple[DeviceId, ...], count: int, key: Key) -> tuple[DeviceId, ...]:
    return tuple(devices[index] for index in key.sample(max(0, min(count, len(devices))), len(devices)))
