"""What a live view or a report reads off the engine's state; read-only."""

from dataclasses import dataclass
from typing import Literal

from fleetune.coordinator.rounds.engine_state import EngineState, Stage
from fleetune.coordinator.rounds.policies.selection import target
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.coordinator import RoundSection

Part = Literal["idle", "awaited", "replied", "declined"]


@dataclass(frozen=True)
class DeviceView:
    """One device.

    Attributes:
        report: its latest; None when it refused the run before it gave one.
        ready, left, refusal: as in `Member`.
        part: what it does in the open round: idle when it was not asked, or left in the midst.
        declined_reason: why it declined the open or coming round, "" when it did not.
    """

    device: DeviceId
    report: DeviceReport | None
    ready: bool
    left: bool
    refusal: str | None
    part: Part
    declined_reason: str


@dataclass(frozen=True)
class RoundView:
    """The open round, or the one that comes next while `stage` is waiting.

    Attributes:
        asked, replied, declined, awaited: numbers of devices; all 0 while no round is open.
        target: the round closes at once with so many replies.
        until: when it is over at the latest, or when the engine looks again; on the driver's clock.
    """

    stage: Stage
    number: int
    attempt: int
    asked: int
    replied: int
    declined: int
    awaited: int
    target: int
    until: float | None


def view_devices(state: EngineState) -> tuple[DeviceView, ...]:
    """Every device ever heard of, ascending."""
    return tuple(_view_device(state, device) for device in sorted(state.members))


def view_round(state: EngineState, settings: RoundSection) -> RoundView:
    """How the open or coming round stands."""
    parts = [_part(state, device) for device in state.participants]
    return RoundView(
        stage=state.stage,
        number=state.turn.number,
        attempt=state.attempt,
        asked=len(parts),
        replied=parts.count("replied"),
        declined=parts.count("declined"),
        awaited=parts.count("awaited"),
        target=len(parts) if state.stage == "rehearsing" else target(state, settings),
        until=state.until,
    )


def _view_device(state: EngineState, device: DeviceId) -> DeviceView:
    member = state.members[device]
    declined = member.declined_round == state.turn.number
    return DeviceView(
        device=device,
        report=member.at_work,
        ready=member.ready,
        left=member.left,
        refusal=member.refusal,
        part=_part(state, device),
        declined_reason=member.declined_reason if declined else "",
    )


def _part(state: EngineState, device: DeviceId) -> Part:
    member = state.members[device]
    if state.awaits(device):
        return "awaited"
    if not state.takes_part(device) or member.answer is None:
        return "idle"
    return "replied" if member.answer == "update" else "declined"
