"""The round engine: events in, actions out. No I/O, no clock, no knowledge of the method.

A simulation and a fleet drive the same engine:

    actions = engine.handle(event, now)     # for each event, in any order
    ...                                     # do the actions, in order
    sleep until engine.wake_at              # then handle(Tick(), now); None: only events matter

`now` is in seconds of a finite clock that never goes back, such as `coordinator.run.run_clock`. When the
clock jumps ahead, at most one attempt is lost. No event raises an error: the engine counts an invalid event,
and answers a rejected reply with `DropReply`. After `FinishRun` no action follows; later replies are counted
as late.

Where each decision is made:

- stages and transitions: `rounds.stages`
- when a round closes, with or without its stragglers: `rounds.policies.stragglers`
- how long a round may take: `rounds.policies.deadline`
- which devices take part: `rounds.policies.selection`
- when a round may open: `rounds.policies.schedule`
- devices that never answer, and their back-off: `rounds.policies.unresponsive`
- whether a reply counts: `rounds.rejections`
- how many tasks a device may get: `rounds.policies.task_limit`
- rounds that break training: `rounds.rollback`
- semi-asynchronous rounds: `rounds.policies.semi_asynchronous`

**What the driver must store.** One record: the changed members of `engine.state` and the method's state,
written together after each `handle`:

1. Store an accepted reply, because a round may close with it. Do the actions in order. Answer `Aggregate` at
   once with `Aggregated` or `NotAggregated`; the actions that follow belong to the same step.
2. Write the record, in one transaction. One transaction may hold several events.
3. Only then send messages to devices: `SendTask`, `FinishRun`, and the acknowledgement of the reply.

A crash before 2 loses the event. The reply is not acknowledged, so the device offers it again, and the same
event leads to the same actions. A crash after 2 loses only messages: tasks are sent again when devices
reconnect.

The method's state in the record is the one **before** the open round's plan. Between `StartRound` and its
`CloseRound` or `AbandonRound` no `Admit` comes. Devices that join meanwhile are admitted, in ascending order,
before the next `StartRound`. So planning again on the recorded state gives the same tasks. `Aggregate` works
on the planned state, and `AbandonRound` drops it.
"""

from dataclasses import replace

from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Action,
    Admit,
    Aggregate,
    CloseFinalEvaluation,
    CloseRound,
    FinishRun,
    RollBack,
    SendTask,
    StartRound,
)
from fleetune.coordinator.rounds.engine_state import NEVER, EngineState
from fleetune.coordinator.rounds.events import Aggregated, Declined, Event, NotAggregated, ReplyArrived
from fleetune.coordinator.rounds.intake import mark_declined, take_in
from fleetune.coordinator.rounds.policies.deadline import keeps_pace, proposed_s
from fleetune.coordinator.rounds.policies.schedule import Schedule
from fleetune.coordinator.rounds.policies.selection import START_S, draw, final_evaluators, needed, pool
from fleetune.coordinator.rounds.policies.semi_asynchronous import decide_window, draw_idle, expire
from fleetune.coordinator.rounds.policies.stragglers import Decision, decide
from fleetune.coordinator.rounds.policies.task_limit import TaskLimit
from fleetune.coordinator.rounds.policies.unresponsive import note_missed
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.rounds.rollback import DIVERGED, breaks_training, hopeless, roll_back
from fleetune.protocols.method.method import DeviceId, Round
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection

ALL_DONE = "all rounds are done"
GATHER_S = 60.0  # longer than the 40 s after which an agent at the latest retries a broker that was away


class RoundEngine:
    """Decides the course of a run: when rounds open and close, and which devices take part.

    It runs `run.rounds` rounds and the final evaluation by the rules in `round_`, at the times of `schedule`.

    Args:
        planner: chooses each participant's budget: ratio, local training and encoding.
        limit: limits the tasks of each device; None for no limit.
    """

    def __init__(
        self,
        run: RunSection,
        round_: RoundSection,
        state: EngineState | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        planner: Planner = Planner(),  # noqa: B008 - frozen
        limit: TaskLimit | None = None,
    ) -> None:
        self._planner, self._limit = planner, limit or TaskLimit()
        self.state = state or EngineState()
        self.state.group(schedule.pays)
        self._limit.recall(self.state)
        self._run = run
        self._round = round_
        self.schedule = schedule
        self._semi_asynchronous = round_.mode != "synchronous"
        self._look_at: float | None = None  # when a round may open next

    def resume(self, now: float) -> list[Action]:
        """Continue from a stored state after a restart, and return the first actions.

        Every device counts as disconnected until it reports again. Open deadlines start again with their full
        length. An open round is started again, marked `resumed`; its participants get their tasks when they
        reconnect. Between two rounds the engine waits up to `GATHER_S` for devices to reconnect. Otherwise
        the first to reconnect would train alone.
        """
        state, deadline_s = self.state, self._round.deadline_s
        state.change(seen_at=now)
        gathering = state.timing.gather_until is not None
        for name in [name for name, member in state.members.items() if member.ready or member.returning]:
            state.put(name, ready=False, returning=state.members[name].ready or gathering)
        for name in tuple(state.groups.left) if self._run.is_open else ():
            state.put(name, left=False)  # the state is from before its number of rounds was made open
        if state.stage == "waiting" and state.groups.returning:
            state.change(gather_until=now + min(GATHER_S, deadline_s))
        if state.timing.until is not None:
            span_s = (state.timing.span_s if state.running else None) or deadline_s
            state.change(until=now + min(span_s, deadline_s))
        restart: list[Action] = [self._start_action(resumed=True)] if state.running else []
        return restart + self._advance(now)

    def reopen(self) -> None:
        """Return from the final evaluation, or the end of the run, to waiting for an added round.

        The final evaluation has already used the added round's number, so the round starts with a later
        attempt.
        """
        asked = any(member.asked >= self.state.round_attempt for member in self.state.members.values())
        attempt = self.state.attempt + int(asked)
        self.state.move("run reopened", attempt=attempt, participants=(), until=None, reason="")

    @property
    def wake_at(self) -> float | None:
        """Latest time at which `handle(Tick(), now)` is due; None if only another event matters."""
        waiting = self.state.stage == "waiting"
        first = self.state.round_attempt == (1, 1) and not self.state.start_is_overdue
        start_by = self.state.timing.start_by if first else None
        times = (
            self.state.timing.until,
            *((self.state.timing.gather_until, self._look_at, start_by) if waiting else ()),
        )
        return min((time for time in times if time is not None), default=None)

    @property
    def finished(self) -> bool:
        return self.state.stage == "finished"

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event at `now` (seconds), and return the actions to do, in this order."""
        if self.finished:
            if isinstance(event, ReplyArrived | Declined):
                self.state.count("late")
            return []
        self.state.change(seen_at=now)
        return self._take_in(event) + self._advance(now)

    def _take_in(self, event: Event) -> list[Action]:
        if not isinstance(event, Aggregated | NotAggregated):
            return take_in(event, self.state, is_open=self._run.is_open)
        if self.state.stage != "aggregating":
            self.state.count("unknown")
            return []
        if isinstance(event, Aggregated):
            return self._closed(event.suspects)
        return self._not_aggregated(event.suspects)

    def _advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.state.stage in ("training", "evaluating"):
            actions += self._close_if_due(now)
        if self.state.stage == "waiting":
            actions += self._start_if_possible(now)
        if self.state.stage == "training" and self._semi_asynchronous:
            actions += self._ask_idle()
        return actions

    def _ask_idle(self) -> list[Action]:
        """Select idle devices for the free places of a semi-asynchronous round, and return the actions."""
        devices = draw_idle(self.state, self._round, self._run.seed)
        if not devices:
            return []
        self.state.change(participants=tuple(sorted({*self.state.participants, *devices})))
        return self._ask(devices, resumed=True)

    def _close_if_due(self, now: float) -> list[Action]:
        state, decision = self.state, self._decision(now)
        if decision is None:
            return []
        if state.stage == "evaluating":
            return self._close_final_evaluation()
        if decision == "close":
            state.move("replies suffice")
            return [Aggregate(*state.round_attempt, state.replied)]
        pause_until = (
            state.timing.until if decision == "too-few" and now < (state.timing.until or now) else None
        )
        return self._abandon(AbandonRound(*state.round_attempt, decision), pause_until=pause_until)

    def _decision(self, now: float) -> Decision | None:
        """Return the decision about the open round or final evaluation at `now`; None if it stays open."""
        if self._semi_asynchronous and self.state.stage == "training":
            return decide_window(self.state, self._round, self._run.seed, now)
        return decide(self.state, self._round, now)

    def _closed(self, suspects: tuple[DeviceId, ...]) -> list[Action]:
        round_attempt, state = self.state.round_attempt, self.state
        action = CloseRound(*round_attempt, state.replied)
        self._planner.learn(state)
        at_work = tuple(state.awaited) if self._semi_asynchronous else ()
        if not self._semi_asynchronous:
            note_missed(state, self._round, paced=keeps_pace(self._round, self._planner.objective))
        state.change(closed=round_attempt, suspects=suspects)
        attempt, rounds_done = state.retries.next_attempt, round_attempt.number
        state.move(
            "updates aggregated",
            rounds_done=rounds_done,
            attempt=attempt,
            next_attempt=1,
            participants=(),
            until=None,
            plan=replace(state.plan, due=False),
        )
        state.change(participants=tuple(one for one in at_work if not expire(state, one, self._round)))
        return [action]

    def _not_aggregated(self, suspects: tuple[DeviceId, ...]) -> list[Action]:
        """Aggregate again without the suspects' updates; abandon the round if no suspect or no other update
        exists.
        """
        self.state.move("updates did not aggregate")
        for device in suspects:
            self.state.count("non-finite")
            mark_declined(
                self.state, Declined(device, *self.state.round_attempt, "its update would break the model")
            )
        if suspects and self.state.groups.replied:
            return []  # `_advance` decides again
        round_attempt = self.state.round_attempt
        actions = self._abandon(AbandonRound(*round_attempt, "non-finite"), pause_until=None)
        reason = hopeless(self.state, round_attempt.number, "its updates did not aggregate to finite numbers")
        return actions + (self._end(reason, self.state.timing.seen_at) if reason else [])

    def _abandon(self, action: AbandonRound, pause_until: float | None) -> list[Action]:
        broken, round_attempt = breaks_training(self.state), self.state.round_attempt
        if broken and self.state.retries.closed != NEVER:
            return self._roll_back()
        note_missed(self.state, self._round)
        self.state.count("abandoned")
        attempt = self.state.attempt + 1
        self.state.move("round abandoned", attempt=attempt, participants=(), until=pause_until)
        reason = hopeless(self.state, round_attempt.number, DIVERGED) if broken else None
        return [action, *(self._end(reason, self.state.timing.seen_at) if reason else [])]

    def _roll_back(self) -> list[Action]:
        round_attempt, closed = self.state.round_attempt, self.state.retries.closed
        roll_back(self.state)
        actions: list[Action] = [AbandonRound(*round_attempt, "diverged"), RollBack(*closed)]
        reason = hopeless(self.state, closed.number, f"{DIVERGED} after it")
        return actions + (self._end(reason, self.state.timing.seen_at) if reason else [])

    def _gathers(self, now: float) -> bool:
        """True while devices that were connected before a restart still have time to reconnect."""
        until = self.state.timing.gather_until
        if until is not None and self.state.groups.returning and now < until:
            return True
        if until is not None:
            self.state.change(gather_until=None)
        return False

    @property
    def _over(self) -> str | None:
        """Return why no further round follows; None if one does."""
        last, done = self._run.last_round, self.state.rounds_done
        if last is not None and done >= last:
            return self.state.ending.ends or ALL_DONE
        return self.state.ending.ends or self._limit.over(self.state, self._round)

    def _holds(self, now: float) -> bool:
        """True if the next round must wait, because the run is paused or its schedule has none due."""
        state = self.state
        telling = len(state.groups.telling)
        look = self.schedule.look(state.plan, now, state.timing.ahead_s, telling, state.rounds_done)
        if look.plan != state.plan:
            state.change(plan=look.plan)
        self._look_at = None if look.plan.due else look.again_at
        return not look.plan.due

    def _note_first_device(self, now: float) -> None:
        """Set the time until which round 1 waits for more devices, if `start_with` is not set."""
        if self._round.start_with is not None or self.state.round_attempt != (1, 1):
            return
        if not self.state.groups.eligible:
            self.state.change(start_by=None)
        elif self.state.timing.start_by is None:
            self.state.change(start_by=now + START_S)

    def _start_if_possible(self, now: float) -> list[Action]:
        self._note_first_device(now)
        if self._gathers(now):
            return []
        self._limit.retire(self.state)
        over = None if self.state.paused else self._over
        if over is not None:
            return self._end(over, now)
        if self.state.paused or self._holds(now):
            # devices at work are not awaited until the next window opens
            self.state.change(participants=())
            return []
        return self._reopen_window(now) if self.state.participants else self._begin_round(now)

    def _reopen_window(self, now: float) -> list[Action]:
        """Open the next semi-asynchronous round while devices still work on tasks of earlier rounds."""
        self.state.move("round opens")
        idle = draw_idle(self.state, self._round, self._run.seed)
        self.state.change(participants=tuple(sorted({*self.state.participants, *idle})))
        return self._open(idle, now)

    def _begin_round(self, now: float) -> list[Action]:
        overdue = self.state.timing.until is not None and now >= self.state.timing.until
        if overdue:
            self.state.change(until=None)
        if not self.state.groups.eligible:
            return self._without_devices(overdue, now)
        wanted = needed(self.state, self._round)
        candidates = pool(self.state, self._round) if len(self.state.groups.eligible) >= wanted else ()
        if len(candidates) < wanted:
            return []
        participants = draw(candidates, self.state, self._round, self._run.seed)
        self.state.move("round opens", participants=participants)
        return self._open(participants, now)

    def _without_devices(self, overdue: bool, now: float) -> list[Action]:
        """Wait for devices, or end training if all have left; called when no device that would train is
        connected.

        Disconnected devices get one deadline to reconnect, counted from when all other devices have left.
        """
        groups = self.state.groups
        if (overdue and groups.left_there) or (groups.left and not groups.staying):
            return self._end("every device has left", now)
        if groups.left_there and self.state.timing.until is None:
            self.state.change(until=now + self._round.deadline_s)
        return []

    def _end(self, reason: str, now: float) -> list[Action]:
        participants = final_evaluators(self.state)
        self.state.change(reason=reason, participants=participants)
        if not (self._run.final_evaluation and participants):
            return self._finish()
        self.state.move("evaluation opens")
        return self._open(participants, now)

    def _open(self, asked: tuple[DeviceId, ...], now: float) -> list[Action]:
        """Start the round or evaluation of the present stage, and send the devices in `asked` their tasks."""
        if self.state.stage == "training":
            self._planner.assign(self.state, asked)
        span_s = proposed_s(self.state, self._round, self._planner.objective)
        self.state.change(until=now + span_s, span_s=span_s, extended=0)
        return self._ask(asked, resumed=False)

    def _ask(self, devices: tuple[DeviceId, ...], *, resumed: bool) -> list[Action]:
        admits = self._admit_all()
        timed = {"asked_at": self.state.timing.seen_at} if self._round.by_utility else {}
        for device in devices:
            self.state.put(device, asked=self.state.round_attempt, answer=None, **timed)
        if self.state.stage == "training":
            self._limit.count(self.state, devices)
        tasks = [SendTask(device, *self.state.round_attempt) for device in devices]
        return [*admits, self._start_action(resumed=resumed), *tasks]

    def reopening(self) -> StartRound:
        """Return the action that plans the open round again; the same plan gives the same tasks."""
        return self._start_action(resumed=True)

    def _start_action(self, *, resumed: bool) -> StartRound:
        final_evaluation = self.state.stage == "evaluating"
        round_ = Round(self.state.round_attempt.number, self.state.participants, final_evaluation)
        return StartRound(round_, self.state.attempt, resumed)

    def _admit_all(self) -> list[Admit]:
        """Return actions that show the method every report it has not seen, in ascending order of devices."""
        admits = []
        for device in sorted(self.state.groups.unseen):
            report = self.state.members[device].at_work
            assert report is not None, "a device is in `unseen` only with a report"
            admits.append(Admit(report))
            self.state.put(device, admitted=True)
        return admits

    def _close_final_evaluation(self) -> list[Action]:
        return [CloseFinalEvaluation(*self.state.round_attempt, self.state.replied), *self._finish()]

    def _finish(self) -> list[Action]:
        self.state.move("run ends", participants=(), until=None)
        return [FinishRun(self.state.ending.reason)]
