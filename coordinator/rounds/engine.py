"""The round engine: events in, actions out; no I/O, no clock, no method.

Everything that decides who is asked, which reply counts and when a round is over lives in this file and in
`participants.py`, `reply_objections.py` and `engine_state.py`. A simulation and a real fleet drive the same
engine:

    actions = engine.handle(event, now)     # for each event, in whatever order they come
    ...                                     # do the actions, in order
    sleep until engine.wake_at              # then handle(Tick(), now); None: only events matter

`now` is in seconds of any finite clock. When it jumps back, open deadlines move back with it; when it
jumps ahead, at most one attempt is lost. No event raises: a wrong one is counted, a reply that does not
count also answered with `DropReply`. After `FinishRun` nothing follows; what still comes is counted as late.

**What the driver must store.** One record: `engine.state` (of its members those that changed) and the
method's state, written together after each `handle`:

1. store a reply that counts (a round may close with it); do `Admit`, `StartRound`, `KeepReply`, `DropReply`,
   `CloseRound`, `AbandonRound`, `TakeBack`, `CloseFinalEvaluation`, in order;
2. write the record, in one transaction; that of several events may be one;
3. only then speak to devices: `SendTask`, `FinishRun`, and acknowledge the reply.

A crash before 2 loses the event, and nobody was told otherwise: the reply is not acknowledged, so the
device offers it again, and the same event leads to the same actions. A crash after 2 loses only words:
tasks are sent again when devices come back. The method's state in the record is the one **before** the
open round's plan. Between `StartRound` and its `CloseRound` or `AbandonRound` no `Admit` comes (devices
that join meanwhile are admitted, in ascending order, before the next `StartRound`), so that planning
again on the recorded state gives the same tasks; `CloseRound` aggregates on the planned state,
`AbandonRound` drops it.

Before a round is closed the driver is asked whether it may be (`judge`), which aggregates its updates. One
that does not aggregate to finite numbers is asked again, without those who are told to have spoilt it. One
that closed, but breaks the training of all who are asked next, is taken back (`TakeBack`) and asked again.
After `rollback.MAX_SPOILT` of either at the same round training ends.

When a round is over is decided in `_close_if_due` alone, how long it may take in
`coordinator.rounds.deadlines` alone, whether a reply counts in `coordinator.rounds.reply_objections` alone.
`coordinator.rounds.semi_asynchronous` closes in another way, semi-asynchronously.
"""

from typing import Self

from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Action,
    Admit,
    CloseFinalEvaluation,
    CloseRound,
    DropReply,
    FinishRun,
    KeepReply,
    SendTask,
    StartRound,
    TakeBack,
)
from fleetune.coordinator.rounds.deadlines import learn, proposed_s
from fleetune.coordinator.rounds.engine_state import NEVER, EngineState, Member, Turn
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady, Event, ReplyArrived, Tick
from fleetune.coordinator.rounds.participants import draw, final_evaluators, needed, pool, target
from fleetune.coordinator.rounds.reply_objections import objection_to
from fleetune.coordinator.rounds.rollback import (
    DIVERGED,
    Judge,
    Verdict,
    breaks_training,
    hopeless,
    take_back,
)
from fleetune.coordinator.rounds.unresponsive import note_answer, note_missed
from fleetune.protocols.settings.coordinator import RoundSection, RunSection
from fleetune.protocols.skeletons.choice import DeviceReport
from fleetune.protocols.skeletons.method import DeviceId, Round

GATHER_S = 60.0  # an agent whose broker was away tries again after 40 s at the latest


class RoundEngine:
    """Runs `run.rounds` rounds and the final evaluation, under the rules of `round_`.

    Attributes:
        judge: told the turn and the devices whose updates a round would close with.
    """

    judge: Judge = staticmethod(lambda _, __: Verdict(True))

    def __init__(self, run: RunSection, round_: RoundSection, state: EngineState | None = None) -> None:
        self.state = state or EngineState()
        self._run = run
        self._round = round_

    @classmethod
    def resume(
        cls, run: RunSection, round_: RoundSection, state: EngineState, now: float
    ) -> tuple[Self, list[Action]]:
        """Go on from a stored state after a restart; also gives what is to be done first.

        Nobody counts as there until it reports again; open deadlines start afresh, as long as they were. An
        open round is started again, marked `resumed`; its participants get their tasks as they come back.
        Between two rounds those that were there get `GATHER_S` to come back, else the first to find the way
        would train alone.
        """
        engine = cls(run, round_, state.copy())
        engine.state.change(seen_at=now)
        gathering = state.gather_until is not None
        for name in [name for name, member in state.members.items() if member.ready or member.returning]:
            member = state.members[name]
            engine.state.put(name, ready=False, returning=member.ready or gathering)
        if state.stage == "waiting" and engine.state.groups.returning:
            engine.state.change(gather_until=now + min(GATHER_S, round_.deadline_s))
        if state.until is not None:
            span_s = (state.span_s if state.running else None) or round_.deadline_s
            engine.state.change(until=now + min(span_s, round_.deadline_s))
        restart: list[Action] = [engine._start_action(resumed=True)] if state.running else []
        return engine, restart + engine._advance(now)

    def reopen(self) -> None:
        """Go back from the final evaluation, or the end, to waiting for the next round: it may come after
        all.

        The final evaluation asked for this round already, so what comes is another attempt.
        """
        asked = any(member.asked >= self.state.turn for member in self.state.members.values())
        attempt = self.state.attempt + int(asked)
        self.state.change(stage="waiting", attempt=attempt, participants=(), until=None, reason="")

    @property
    def wake_at(self) -> float | None:
        """When `handle(Tick(), now)` is due at the latest; None: not before another event."""
        times = (self.state.until, self.state.gather_until if self.state.stage == "waiting" else None)
        return min((time for time in times if time is not None), default=None)

    @property
    def finished(self) -> bool:
        return self.state.stage == "finished"

    @property
    def _span_s(self) -> float:
        """How long the turn that opens may take at most before something is decided."""
        return proposed_s(self.state, self._round)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in at `now` (seconds); what is to be done, in this order."""
        if self.finished:
            if isinstance(event, ReplyArrived | Declined):
                self.state.count("late")
            return []
        self._see(now)
        return self._take(event) + self._advance(now)

    def _see(self, now: float) -> None:
        until, back_s = self.state.until, self.state.seen_at - now
        if until is not None and back_s > 0:
            until = min(until - back_s, now + self._round.deadline_s)
        self.state.change(until=until, seen_at=now)
        if self.state.gather_until is not None and back_s > 0:
            self.state.change(gather_until=self.state.gather_until - back_s)

    def _take(self, event: Event) -> list[Action]:
        match event:
            case DeviceReady(report):
                return self._take_ready(report)
            case DeviceGone(device):
                self._take_gone(device)
            case ReplyArrived():
                return self._take_reply(event)
            case Declined(round=0):
                self._take_refusal(event)
            case Declined():
                self._take_decline(event)
            case Tick():
                pass
        return []

    def _take_ready(self, report: DeviceReport) -> list[Action]:
        state = self.state
        member = state.members.get(report.device, Member())
        admitted = member.admitted and member.report == report
        state.put(report.device, report=report, admitted=admitted, ready=True, refusal=None, returning=False)
        if member.refusal is not None:  # it rested and is back: whatever it declined before, it would do now
            state.put(report.device, declined_round=0)
        if state.awaits(report.device):
            return [SendTask(report.device, *state.members[report.device].asked)]
        return []

    def _take_gone(self, device: DeviceId) -> None:
        if device not in self.state.members:
            self.state.count("foreign")
        elif self.state.members[device].ready:
            self.state.put(device, ready=False)
            self.state.count("gone")

    def _take_reply(self, event: ReplyArrived) -> list[Action]:
        objection = event.objection
        if event.leaving and objection not in ("foreign", "unknown"):
            self.state.put(event.device, left=True)
        if objection not in ("foreign", "unknown"):
            note_answer(self.state, event.device)
        if objection:
            self.state.count(objection)
            return [DropReply(event.device, event.round, event.attempt, objection)]
        self.state.put(event.device, answer="update")
        return [KeepReply(event.device, event.round, event.attempt)]

    def _take_decline(self, event: Declined) -> None:
        objection = objection_to(self.state, event.device, Turn(event.round, event.attempt))
        if not objection:
            self._mark_declined(event)
        if objection not in ("foreign", "unknown"):
            note_answer(self.state, event.device)
        self.state.count(objection or "declined")

    def _take_refusal(self, event: Declined) -> None:
        if self.state.awaits(event.device):
            self._mark_declined(event)
        self.state.put(event.device, refusal=event.reason)
        self.state.count("refused")

    def _mark_declined(self, event: Declined) -> None:
        self.state.put(
            event.device,
            answer="declined",
            declined_round=self.state.turn.number,
            declined_reason=event.reason,
            diverged=event.diverged,
        )

    def _advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.state.running:
            actions += self._close_if_due(now)
        if self.state.stage == "waiting":
            actions += self._start_if_possible(now)
        return actions

    def _close_if_due(self, now: float) -> list[Action]:
        state = self.state
        overdue = state.until is not None and now >= state.until
        settled = not state.groups.awaited
        if state.stage == "rehearsing":
            return self._close_final_evaluation() if overdue or settled else []
        enough, replies = target(state, self._round), len(state.groups.replied)
        if replies >= enough or ((overdue or settled) and replies >= self._round.quorum):
            return self._close()
        if overdue:
            return self._abandon(AbandonRound(*state.turn, "deadline"), pause_until=None)
        if settled:
            return self._abandon(AbandonRound(*state.turn, "too-few"), pause_until=state.until)
        return []

    def _close(self) -> list[Action]:
        verdict = self.judge(self.state.turn, self.state.replied)
        return self._closed(verdict) if verdict.sound else self._spoilt(verdict.suspects)

    def _closed(self, verdict: Verdict) -> list[Action]:
        turn, state = self.state.turn, self.state
        action = CloseRound(*turn, state.replied)
        learn(state, self._round)
        if self._round.mode == "synchronous":
            note_missed(state, self._round)
        state.change(closed=turn, suspects=verdict.suspects)
        attempt, rounds_done = state.next_attempt, turn.number
        state.change(
            stage="waiting",
            rounds_done=rounds_done,
            attempt=attempt,
            next_attempt=1,
            participants=(),
            until=None,
        )
        return [action]

    def _spoilt(self, suspects: tuple[DeviceId, ...]) -> list[Action]:
        """The updates do not aggregate: go on without the suspects', or ask everybody again."""
        for device in suspects:
            self.state.count("spoilt")
            self._mark_declined(Declined(device, *self.state.turn, "its update would break the model"))
        if suspects and self.state.groups.replied:
            return self._close_if_due(self.state.seen_at)
        turn = self.state.turn
        actions = self._abandon(AbandonRound(*turn, "spoilt"), pause_until=None)
        reason = hopeless(self.state, turn.number, "its updates did not aggregate to finite numbers")
        return actions + (self._end(reason, self.state.seen_at) if reason else [])

    def _abandon(self, action: AbandonRound, pause_until: float | None) -> list[Action]:
        broken, turn = breaks_training(self.state), self.state.turn
        if broken and self.state.closed != NEVER:
            return self._take_back()
        learn(self.state, self._round)
        note_missed(self.state, self._round)
        self.state.count("abandoned")
        attempt = self.state.attempt + 1
        self.state.change(stage="waiting", attempt=attempt, participants=(), until=pause_until)
        reason = hopeless(self.state, turn.number, DIVERGED) if broken else None
        return [action, *(self._end(reason, self.state.seen_at) if reason else [])]

    def _take_back(self) -> list[Action]:
        turn, closed = self.state.turn, self.state.closed
        take_back(self.state)
        actions: list[Action] = [AbandonRound(*turn, "diverged"), TakeBack(*closed)]
        reason = hopeless(self.state, closed.number, f"{DIVERGED} after it")
        return actions + (self._end(reason, self.state.seen_at) if reason else [])

    def _gathers(self, now: float) -> bool:
        """Whether those that were there before a restart are still given time to come back."""
        until = self.state.gather_until
        if until is not None and self.state.groups.returning and now < until:
            return True
        if until is not None:
            self.state.change(gather_until=None)
        return False

    def _start_if_possible(self, now: float) -> list[Action]:
        if self._gathers(now):
            return []
        if self.state.rounds_done >= self._run.rounds:
            return self._end("all rounds are done", now)
        overdue = self.state.until is not None and now >= self.state.until
        if overdue:
            self.state.change(until=None)
        if not self.state.groups.eligible:
            return self._without_devices(overdue, now)
        if len(self.state.groups.eligible) < needed(self.state, self._round):
            return []
        candidates = pool(self.state, self._round)
        if len(candidates) < needed(self.state, self._round):
            return []
        participants = draw(candidates, self.state, self._round, self._run.seed)
        self.state.change(stage="training", participants=participants)
        return self._open(participants, now)

    def _without_devices(self, overdue: bool, now: float) -> list[Action]:
        """Nobody who would train is there: wait, or end training when that is because they left.

        Devices that are only gone get one deadline to come back, from when all others have left.
        """
        groups = self.state.groups
        if (overdue and groups.left_there) or (groups.left and not groups.staying):
            return self._end("every device has left", now)
        if groups.left_there and self.state.until is None:
            self.state.change(until=now + self._round.deadline_s)
        return []

    def _end(self, reason: str, now: float) -> list[Action]:
        participants = final_evaluators(self.state)
        self.state.change(reason=reason, participants=participants)
        if not (self._run.final_evaluation and participants):
            return self._finish()
        self.state.change(stage="rehearsing")
        return self._open(participants, now)

    def _open(self, asked: tuple[DeviceId, ...], now: float) -> list[Action]:
        """Start what stage and participants say; those `asked` get a task."""
        span_s = self._span_s
        self.state.change(until=now + span_s, span_s=span_s, extended=0)
        return self._ask(asked, resumed=False)

    def _ask(self, devices: tuple[DeviceId, ...], *, resumed: bool) -> list[Action]:
        admits = self._admit_all()
        for device in devices:
            self.state.put(device, asked=self.state.turn, answer=None)
        tasks = [SendTask(device, *self.state.turn) for device in devices]
        return [*admits, self._start_action(resumed=resumed), *tasks]

    def reopening(self) -> StartRound:
        """The start of the open round, once more: planned again, it gives the same tasks."""
        return self._start_action(resumed=True)

    def _start_action(self, *, resumed: bool) -> StartRound:
        final_evaluation = self.state.stage == "rehearsing"
        round_ = Round(self.state.turn.number, self.state.participants, final_evaluation)
        return StartRound(round_, self.state.attempt, resumed)

    def _admit_all(self) -> list[Admit]:
        """Let the method know of every report it has not seen, in ascending order of devices."""
        admits = []
        for device in sorted(self.state.groups.unseen):
            report = self.state.members[device].report
            assert report is not None, "unseen are reports that were given"
            admits.append(Admit(report))
            self.state.put(device, admitted=True)
        return admits

    def _close_final_evaluation(self) -> list[Action]:
        return [CloseFinalEvaluation(*self.state.turn, self.state.replied), *self._finish()]

    def _finish(self) -> list[Action]:
        self.state.change(stage="finished", participants=(), until=None)
        return [FinishRun(self.state.reason)]
