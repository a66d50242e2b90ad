"""Why no round is open though devices may be there: a pause, or the run's schedule; in words, for people."""

import time

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.civil_time import utc
from fleetune.coordinator.rounds.policies.schedule import Schedule

PAUSED = "paused: no round opens until edge-coordinator resume"


def held_by(state: EngineState, schedule: Schedule, now: float, *, countdown: bool = True) -> str:
    """What the coming round waits for beside devices; "" when one is open, or nothing holds it.

    E.g. `due 2026-11-23 02:00, in 5 h 12 min` or `due when 2 devices have 100 new samples: 1 so far`.

    Args:
        state: of the engine.
        schedule: of the run.
        now: on the run's clock, seconds.
        countdown: say how long it is until then, too.
    """
    if state.stage != "waiting":
        return ""
    if state.paused:
        return PAUSED
    telling = len(state.groups.telling)
    look = schedule.look(state.plan, now, state.ahead_s, telling, state.rounds_done)
    if look.plan.due:
        return ""
    left = None if look.again_at is None else max(0.0, look.again_at - now)
    when = "" if look.again_at is None else _shown(look.again_at + state.ahead_s, schedule)
    within = f"in {readable.duration(left)}" if left is not None and countdown else ""
    words = [when, within, _asked(schedule, telling)]
    missed = f"; {state.plan.missed} went by without a round" if state.plan.missed else ""
    return "due " + ", ".join(filter(None, words)) + missed


def _shown(at: float, schedule: Schedule) -> str:
    """A time of day and its date as clocks on the wall show them."""
    civil = utc(at)
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(civil + schedule.zone(civil)))


def _asked(schedule: Schedule, telling: int) -> str:
    """What devices are to say, and how many of them do."""
    settings = schedule.settings
    if not settings.asks_devices:
        return ""
    new = f"{settings.new_samples:,} new samples" if settings.new_samples is not None else ""
    what = " or ".join(filter(None, [new, "changed data" if settings.drift else ""]))
    number = settings.devices
    return f"when {number} {'device has' if number == 1 else 'devices have'} {what}: {telling} so far"
