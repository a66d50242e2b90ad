"""Who is missing from a round, and why: for the log of a coordinator, and for who looks at its run."""

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.rounds.actions import Miss
from fleetune.coordinator.rounds.engine import START_S
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.selection import eligible, needed, target
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundAbandoned
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.coordinator import RoundSection

_NAMED = 5  # more are only counted
_GIVEN_UP: dict[Miss, str] = {
    "deadline": "too few replied in time",
    "too-few": "too few are left to reply",
    "spoilt": "its updates do not aggregate to finite numbers",
    "diverged": "training diverges on the model that the round before made",
}
_LETTERS = 80  # of a reason
PATIENCE_S = 10.0
REPEAT_S = 300.0


def missing_from(record: RoundRecord, state: EngineState, settings: RoundSection) -> str:
    """Who was asked and is not in a round that was closed before all had answered; "" for nobody.

    A round that closed with as many updates as were wanted misses nobody.

    Args:
        record: of the round.
        state: as it is since.
        settings: of the run.
    """
    wanted = min(settings.participants or len(record.participants), len(record.participants))
    if settings.mode != "synchronous" or (len(record.devices) >= wanted and not record.final_evaluation):
        return ""
    absent = (device for device in record.participants if device not in record.devices)
    return _listed((device, _why(state.members.get(device), record.number)) for device in absent)


def abandoned_line(given_up: RoundAbandoned, state: EngineState) -> str:
    """That an attempt was given up, and who was missing; `state` as it is since."""
    number, asked = given_up.round, given_up.absent
    absent = _listed((device, _why(state.members.get(device), number)) for device in asked)
    words = f"round {number}, attempt {given_up.attempt} is given up: {_GIVEN_UP[given_up.reason]}"
    return f"{words}; missing: {absent}" if absent else words


def waiting_for(state: EngineState, settings: RoundSection, held: str = "") -> str:
    """What keeps the open or coming round; "" when there is none.

    E.g. `round 3 waits for device-1 (away), device-4 (working); 2 of 4 replied`.

    Args:
        state: of the engine.
        settings: of the run.
        held: what holds the coming round beside devices, see `reports.due`.
    """
    if state.stage == "finished":
        return ""
    if held and state.stage == "waiting":
        return f"round {state.turn.number}: {held}"
    return _needs(state, settings) if state.stage == "waiting" else _awaits(state, settings)


def _needs(state: EngineState, settings: RoundSection) -> str:
    number, there, wanted = state.turn.number, len(eligible(state)), needed(state, settings)
    members = sorted(state.members.items())
    absent = _listed((name, _why(one, number)) for name, one in members if not (one.ready and one.stays))
    words = f"round {number} waits for devices: {there} there, needs {wanted}"
    if state.start_by is not None and not state.start_is_overdue:
        words += f", or opens with fewer {START_S:g} s after the first came"
    if state.gather_until is not None:
        words = f"round {number} gives devices time to come back after the restart: {there} there"
    return f"{words}; {absent}" if absent else words


def _awaits(state: EngineState, settings: RoundSection) -> str:
    evaluating, number = state.stage == "rehearsing", state.turn.number
    awaited = _listed((device, _why(state.members[device], number)) for device in state.awaited)
    asked, replied = len(state.participants), len(state.replied)
    enough = asked if evaluating else target(state, settings)
    words = f"{'the final evaluation' if evaluating else f'round {number}'} waits for {awaited or 'its time'}"
    return f"{words}; {replied} of {asked} replied" + (f", closes with {enough}" if enough < asked else "")


@dataclass
class Impatience:
    """Says whom a round waits for once it has waited for a while, again when that changes, and now and then.

    Attributes:
        look_at: when it looks again; so often it costs next to nothing, however large the fleet.
        said_at: when it last said something.
    """

    look_at: float = 0.0
    said_at: float = 0.0
    _seen: tuple[object, ...] = ()
    _said: str = ""

    def word(self, state: EngineState, settings: RoundSection, now: float, held: str = "") -> str:
        """A line for the log, or "" for none, at `now` (seconds); `held`: see `waiting_for`, said once."""
        if now < self.look_at:
            return ""
        self.look_at = now + PATIENCE_S
        seen, self._seen = self._seen, (state.stage, state.turn)
        if seen != self._seen:  # it goes on
            return ""
        line = waiting_for(state, settings, held)
        if line == self._said and (held or now - self.said_at < REPEAT_S):
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
    """Their names and reasons in one printable line, the first few."""
    pairs = list(absent)
    named = [f"{device} ({shorten(why, _LETTERS, placeholder=' ...')})" for device, why in pairs[:_NAMED]]
    more = [f"{len(pairs) - _NAMED} more"] if len(pairs) > _NAMED else []
    return readable.printable(", ".join([*named, *more]))
