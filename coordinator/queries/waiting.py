"""What a round waits for, and which devices are missing from it and why, as one line of text."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.rounds.actions import Miss
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.civil_time import utc
from fleetune.coordinator.rounds.policies.schedule import Schedule
from fleetune.coordinator.rounds.policies.selection import START_S, eligible, needed, target
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundAbandoned
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.coordinator import RoundSection

PAUSED = "paused: no round opens until edge-coordinator resume"
PATIENCE_S = 10.0
REPEAT_S = 300.0
_NAMED = 5  # devices; more are only counted
_REASON_LENGTH = 80  # letters
_ABANDONED: dict[Miss, str] = {
    "deadline": "too few replied in time",
    "too-few": "too few are left to reply",
    "non-finite": "its updates do not aggregate to finite numbers",
    "diverged": "training diverges on the model that the round before made",
}


def schedule_reason(state: EngineState, schedule: Schedule, now: float, *, countdown: bool = True) -> str:
    """Why no round is open although devices may be there: a pause or the schedule; "" if neither holds it.

    E.g. `due 2026-11-23 02:00, in 5 h 12 min` or `due when 2 devices have 100 new samples: 1 so far`.

    Args:
        state: of the engine.
        schedule: of the run.
        now: on the run's clock, seconds.
        countdown: whether to say how long it is until then.
    """
    if state.stage != "waiting":
        return ""
    if state.paused:
        return PAUSED
    reporting = len(state.groups.telling)
    look = schedule.look(state.plan, now, state.timing.ahead_s, reporting, state.rounds_done)
    if look.plan.due:
        return ""
    left = None if look.again_at is None else max(0.0, look.again_at - now)
    when = "" if look.again_at is None else _local_time(look.again_at + state.timing.ahead_s, schedule)
    within = f"in {readable.duration(left)}" if left is not None and countdown else ""
    parts = [when, within, _new_data(schedule, reporting)]
    missed = f"; {state.plan.missed} went by without a round" if state.plan.missed else ""
    return "due " + ", ".join(filter(None, parts)) + missed


def _local_time(at: float, schedule: Schedule) -> str:
    """Date and time of day in the schedule's time zone."""
    civil = utc(at)
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(civil + schedule.zone(civil)))


def _new_data(schedule: Schedule, reporting: int) -> str:
    """Which data devices must report before a round opens, and how many did."""
    settings = schedule.settings
    if not settings.asks_devices:
        return ""
    new = f"{settings.new_samples:,} new samples" if settings.new_samples is not None else ""
    what = " or ".join(filter(None, [new, "changed data" if settings.drift else ""]))
    number = settings.devices
    return f"when {number} {'device has' if number == 1 else 'devices have'} {what}: {reporting} so far"


def waiting_reason(state: EngineState, settings: RoundSection, scheduled: str = "") -> str:
    """What the open or coming round waits for; "" if the run is finished.

    E.g. `round 3 waits for device-1 (away), device-4 (working); 2 of 4 replied`.

    Args:
        state: of the engine.
        settings: of the run.
        scheduled: see `schedule_reason`.
    """
    if state.stage == "finished":
        return ""
    if scheduled and state.stage == "waiting":
        return f"round {state.round_attempt.number}: {scheduled}"
    return _needs(state, settings) if state.stage == "waiting" else _awaits(state, settings)


def _needs(state: EngineState, settings: RoundSection) -> str:
    number, there = state.round_attempt.number, len(eligible(state))
    members = sorted(state.members.items())
    absent = _listed((name, _why(one, number)) for name, one in members if not (one.ready and one.stays))
    line = f"round {number} waits for devices: {there} there, needs {needed(state, settings)}"
    if state.timing.start_by is not None and not state.start_is_overdue:
        line += f", or opens with fewer {START_S:g} s after the first came"
    if state.timing.gather_until is not None:
        line = f"round {number} gives devices time to come back after the restart: {there} there"
    return f"{line}; {absent}" if absent else line


def _awaits(state: EngineState, settings: RoundSection) -> str:
    evaluating, number = state.stage == "evaluating", state.round_attempt.number
    awaited = _listed((device, _why(state.members[device], number)) for device in state.awaited)
    asked, replied = len(state.participants), len(state.replied)
    enough = asked if evaluating else target(state, settings)
    line = f"{'the final evaluation' if evaluating else f'round {number}'} waits for {awaited or 'its time'}"
    return f"{line}; {replied} of {asked} replied" + (f", closes with {enough}" if enough < asked else "")


def missing_from(record: RoundRecord, state: EngineState, settings: RoundSection) -> str:
    """The participants without a reply in a round that closed early, with reasons; "" for none.

    A round that closed with as many updates as it wanted misses none.

    Args:
        record: of the round.
        state: of the engine since then.
        settings: of the run.
    """
    wanted = min(settings.participants or len(record.participants), len(record.participants))
    if settings.mode != "synchronous" or (len(record.devices) >= wanted and not record.final_evaluation):
        return ""
    absent = (device for device in record.participants if device not in record.devices)
    return _listed((device, _why(state.members.get(device), record.number)) for device in absent)


def abandoned_line(abandoned: RoundAbandoned, state: EngineState) -> str:
    """That an attempt at a round was abandoned, and which devices were missing; `state`: since then."""
    number = abandoned.round
    absent = _listed((device, _why(state.members.get(device), number)) for device in abandoned.absent)
    line = f"round {number}, attempt {abandoned.attempt} is given up: {_ABANDONED[abandoned.reason]}"
    return f"{line}; missing: {absent}" if absent else line


@dataclass
class Impatience:
    """Decides when a log line about what a round waits for is due: after a while, on a change, now and then.

    Attributes:
        look_at: when to look again. Looking this seldom costs next to nothing, however large the fleet.
        said_at: when the last line was due.
    """

    look_at: float = 0.0
    said_at: float = 0.0
    _seen: tuple[object, ...] = ()
    _said: str = ""

    def line(self, state: EngineState, settings: RoundSection, now: float, scheduled: str = "") -> str:
        """A line for the log at `now` (seconds), or "" for none. A schedule's reason is said once."""
        if now < self.look_at:
            return ""
        self.look_at = now + PATIENCE_S
        seen, self._seen = self._seen, (state.stage, state.round_attempt)
        if seen != self._seen:  # rounds go on
            return ""
        line = waiting_reason(state, settings, scheduled)
        if line == self._said and (scheduled or now - self.said_at < REPEAT_S):
            return ""
        self._said, self.said_at = line, now
        return line


def _why(member: Member | None, number: int) -> str:
    if member is None:
        return "gone"
    if member.refusal is not None:
        return f"refuses the run: {member.refusal}"
    if member.declined_round == number:
        return f"declined: {member.declined_reason}"
    if not member.ready:
        return "away"
    return "left" if member.left else "working"


def _listed(absent: Iterable[tuple[DeviceId, str]]) -> str:
    """The first few devices with their reasons in one printable line, and how many more there are."""
    pairs = list(absent)
    named = [
        f"{device} ({shorten(why, _REASON_LENGTH, placeholder=' ...')})" for device, why in pairs[:_NAMED]
    ]
    more = [f"{len(pairs) - _NAMED} more"] if len(pairs) > _NAMED else []
    return readable.printable(", ".join([*named, *more]))
