"""Describes in one line what a round waits for, and which devices are missing and why."""

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.rounds.actions import Miss
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.schedule import Schedule
from fleetune.coordinator.rounds.policies.selection import START_S, eligible, needed, target
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundAbandoned
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.wire.identity import Identity

PAUSED = "paused: no round opens until edge-coordinator resume"
PATIENCE_S = 10.0
REPEAT_S = 300.0
_NAMED = 5  # devices that are listed by name; the rest is only counted
_REASON_LENGTH = 80  # longest reason, in characters
_ABANDONED: dict[Miss, str] = {
    "deadline": "too few replied in time",
    "too-few": "too few are left to reply",
    "non-finite": "its updates do not aggregate to finite numbers",
    "diverged": "training diverges on the model that the round before made",
}


def schedule_reason(state: EngineState, schedule: Schedule, now: float, *, countdown: bool = True) -> str:
    """Return the schedule or pause that keeps a round from opening; "" if neither applies.

    E.g. `due 2026-11-23 02:00, in 5 h 12 min` or `due when 2 devices have 100 new samples: 1 so far`.

    Args:
        state: state of the engine.
        schedule: schedule of the run.
        now: present time on the run's clock, in seconds.
        countdown: True to add the remaining time.
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
    at_s = None if look.again_at is None else look.again_at + state.timing.ahead_s
    when = "" if at_s is None else f"{schedule.local_time(at_s):%Y-%m-%d %H:%M}"
    within = f"in {readable.duration(left)}" if left is not None and countdown else ""
    parts = [when, within, _new_data(schedule, reporting)]
    return "due " + ", ".join(filter(None, parts))


def _new_data(schedule: Schedule, reporting: int) -> str:
    """Return how much new data devices must report before a round opens, and how many devices have reported
    it.
    """
    settings = schedule.settings
    if not settings.asks_devices:
        return ""
    new = f"{settings.new_samples:,} new samples" if settings.new_samples is not None else ""
    what = " or ".join(filter(None, [new, "changed data" if settings.drift else ""]))
    number = settings.devices
    return f"when {number} {'device has' if number == 1 else 'devices have'} {what}: {reporting} so far"


def waiting_reason(state: EngineState, settings: RoundSection, scheduled: str = "") -> str:
    """Return what the open or next round waits for; "" if the run is finished.

    E.g. `round 3 waits for device-1 (away), device-4 (working); 2 of 4 replied`.

    Args:
        state: state of the engine.
        settings: [round] settings of the run.
        scheduled: result of `schedule_reason`.
    """
    if state.stage == "finished":
        return ""
    if scheduled and state.stage == "waiting":
        return f"round {state.round_attempt.number}: {scheduled}"
    return _needs(state, settings) if state.stage == "waiting" else _awaits(state, settings)


def _needs(state: EngineState, settings: RoundSection) -> str:
    number, there = state.round_attempt.number, len(eligible(state))
    members = sorted(state.members.items())
    absent = _listed(
        (state.identity(name), _why(one, number)) for name, one in members if not (one.ready and one.stays)
    )
    line = f"round {number} waits for devices: {there} there, needs {needed(state, settings)}"
    if state.timing.start_by is not None and not state.start_is_overdue:
        line += f", or opens with fewer {START_S:g} s after the first came"
    if state.timing.gather_until is not None:
        line = f"round {number} gives devices time to come back after the restart: {there} there"
    return f"{line}; {absent}" if absent else line


def _awaits(state: EngineState, settings: RoundSection) -> str:
    evaluating, number = state.stage == "evaluating", state.round_attempt.number
    awaited = _missing(state.awaited, state, number)
    asked, replied = len(state.participants), len(state.replied)
    enough = asked if evaluating else target(state, settings)
    line = f"{'the final evaluation' if evaluating else f'round {number}'} waits for {awaited or 'its time'}"
    return f"{line}; {replied} of {asked} replied" + (f", closes with {enough}" if enough < asked else "")


def missing_from(record: RoundRecord, state: EngineState, settings: RoundSection) -> str:
    """Return the participants that did not reply to a round that closed early, with reasons; "" if none.

    The result is also "" for a round that closed with its target number of updates.

    Args:
        record: record of the round.
        state: present state of the engine.
        settings: [round] settings of the run.
    """
    wanted = min(settings.participants or len(record.participants), len(record.participants))
    if settings.mode != "synchronous" or (len(record.devices) >= wanted and not record.final_evaluation):
        return ""
    absent = (device for device in record.participants if device not in record.devices)
    return _missing(absent, state, record.number)


def abandoned_line(abandoned: RoundAbandoned, state: EngineState) -> str:
    """Return a log line about an abandoned attempt at a round, with the missing devices.

    Args:
        abandoned: event of the abandoned attempt.
        state: present state of the engine.
    """
    number = abandoned.round
    absent = _missing(abandoned.absent, state, number)
    line = f"round {number}, attempt {abandoned.attempt} is given up: {_ABANDONED[abandoned.reason]}"
    return f"{line}; missing: {absent}" if absent else line


@dataclass
class Impatience:
    """Decides when to log what a round waits for: after a delay, on each change, and then at intervals.

    Attributes:
        look_at: time of the next check. Checks are rare, so that they cost little even in a large fleet.
        said_at: time of the latest log line.
    """

    look_at: float = 0.0
    said_at: float = 0.0
    _seen: tuple[object, ...] = ()
    _said: str = ""

    def line(self, state: EngineState, settings: RoundSection, now: float, scheduled: str = "") -> str:
        """Return a line to log at time `now` (seconds), or "" if none is due. A schedule's reason is logged
        once.
        """
        if now < self.look_at:
            return ""
        self.look_at = now + PATIENCE_S
        seen, self._seen = self._seen, (state.stage, state.round_attempt)
        if seen != self._seen:  # the run makes progress
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
        return f"takes no part: {member.refusal}"
    if member.declined_round == number:
        return f"declined: {member.declined_reason}"
    if not member.ready:
        return "away"
    return "left" if member.left else "working"


def _missing(devices: Iterable[DeviceId], state: EngineState, number: int) -> str:
    return _listed((state.identity(device), _why(state.members.get(device), number)) for device in devices)


def _listed(absent: Iterable[tuple[Identity, str]]) -> str:
    """Return the first few missing devices with their reasons in one printable line, and the number of
    others.
    """
    pairs = list(absent)
    named = [
        f"{device} ({shorten(why, _REASON_LENGTH, placeholder=' ...')})" for device, why in pairs[:_NAMED]
    ]
    more = [f"{len(pairs) - _NAMED} more"] if len(pairs) > _NAMED else []
    return readable.printable(", ".join([*named, *more]))
