"""Applies an event to the engine's state, before any decision: connections and reports of devices."""

from fleetune.coordinator.rounds.actions import Action, DropReply, KeepReply, SendTask
from fleetune.coordinator.rounds.engine_state import EngineState, Introduction, Member, RoundAttempt
from fleetune.coordinator.rounds.events import (
    Aggregated,
    ClockSet,
    Declined,
    DeviceGone,
    DeviceReady,
    Event,
    NotAggregated,
    Paused,
    ReplyArrived,
    RoundsEnded,
    Tick,
)
from fleetune.coordinator.rounds.policies.unresponsive import note_answer
from fleetune.coordinator.rounds.rejections import rejection_of
from fleetune.protocols.method.method import DeviceId


def take_in(event: Event, state: EngineState, *, is_open: bool) -> list[Action]:
    """Apply an event to the state, and return the actions that follow at once.

    `is_open`: the run has no last round. No device leaves such a run, because training may pay again when the
    device's data have changed.
    """
    match event:
        case DeviceReady():
            return _take_ready(state, event)
        case DeviceGone(device):
            _take_gone(state, device)
        case ReplyArrived():
            return _take_reply(state, event, may_leave=not is_open)
        case Declined(round=0):
            _take_refusal(state, event)
        case Declined():
            _take_decline(state, event)
        case ClockSet(ahead_s):
            state.change(ahead_s=ahead_s)
        case Paused(paused):
            state.change(paused=paused)
        case RoundsEnded(reason):
            state.change(ends=reason)
        case Tick() | Aggregated() | NotAggregated():
            pass
    return []


def mark_declined(state: EngineState, event: Declined) -> None:
    """Record that the device takes no part in the open or next attempt."""
    state.put(
        event.device,
        answer="declined",
        declined_round=state.round_attempt.number,
        declined_reason=event.reason,
        diverged=event.diverged,
    )


def _take_ready(state: EngineState, event: DeviceReady) -> list[Action]:
    report = event.report
    member = state.members.get(report.device, Member())
    admitted = member.admitted and member.report == report
    back = {"ready": True, "refusal": None, "returning": False, "trained": False}
    introduction = Introduction(event.identity, event.agent)
    state.put(report.device, report=report, admitted=admitted, introduction=introduction, **back)
    state.put(report.device, seen_at=state.timing.seen_at)
    if member.refusal is not None:  # the device rested and is back, so an earlier decline no longer holds
        state.put(report.device, declined_round=0)
    if state.awaits(report.device):
        return [SendTask(report.device, *state.members[report.device].asked)]
    return []


def _take_gone(state: EngineState, device: DeviceId) -> None:
    if device not in state.members:
        state.count("foreign")
    elif state.members[device].ready:
        state.put(device, ready=False, seen_at=state.timing.seen_at)
        state.count("gone")


def _take_reply(state: EngineState, event: ReplyArrived, *, may_leave: bool) -> list[Action]:
    rejection = event.rejection
    if event.leaving and may_leave and rejection not in ("foreign", "unknown"):
        state.put(event.device, left=True)
    if rejection not in ("foreign", "unknown"):
        note_answer(state, event.device)
    if rejection:
        state.count(rejection)
        return [DropReply(event.device, event.round, event.attempt, rejection)]
    state.put(event.device, answer="update", trained=True, **_seen_of(state, event))
    return [KeepReply(event.device, event.round, event.attempt)]


def _seen_of(state: EngineState, event: ReplyArrived) -> dict[str, float | None]:
    """Return a reply's duration and the reported values that client selection or deadlines use."""
    member = state.members[event.device]
    seen: dict[str, float | None] = (
        {} if member.assigned is None else {"compression_error": event.compression_error}
    )
    if member.observed.asked_at is None or state.timing.seen_at < member.observed.asked_at:
        return seen
    seen["took_s"] = state.timing.seen_at - member.observed.asked_at
    return seen if event.loss is None else seen | {"loss": event.loss}


def _take_decline(state: EngineState, event: Declined) -> None:
    rejection = rejection_of(state, event.device, RoundAttempt(event.round, event.attempt))
    if not rejection:
        mark_declined(state, event)
    if rejection not in ("foreign", "unknown"):
        note_answer(state, event.device)
    state.count(rejection or "declined")


def _take_refusal(state: EngineState, event: Declined) -> None:
    if state.awaits(event.device):
        mark_declined(state, event)
    state.put(event.device, refusal=event.reason)
    state.count("refused")
