"""The simulator: the fleet's own round engine, methods, codec and sessions on a virtual clock.

Only time is imagined. Every payload is made by the real codec and its real length decides how long the
device's link is busy; every device really trains, and chooses its ratio by the agent's own rule. What is
simulated is how long that takes on its board and what it draws, how long the bytes take on its link, and
when it is there.
"""

from collections.abc import Callable
from typing import Any

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.events import ClockSet, Declined, DeviceGone, Paused, RoundsEnded, Tick
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_events import Happening, RoundClosed, RunFinished
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.task_preview import preview_task
from fleetune.protocols.errors import PacketNotFinite, SettingError
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator import event_queue
from fleetune.tools.simulator.attempts import Attempts
from fleetune.tools.simulator.availability import Availability
from fleetune.tools.simulator.checkpoint.checkpoints import Checkpoints
from fleetune.tools.simulator.checkpoint.snapshot import FORMAT, STOPPED, Snapshot
from fleetune.tools.simulator.event_queue import EventQueue
from fleetune.tools.simulator.fleet_streams import FleetStreams
from fleetune.tools.simulator.jobs import TrainingJob, TrainingResult
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import FinishedReply, RepeatableReplies, SimulatedDevice
from fleetune.tools.simulator.streams.daily_scores import Growing
from fleetune.tools.simulator.transfers import downloaded, uploaded
from fleetune.tools.simulator.world import World

OnRound = Callable[[RoundRecord], bool]  # told of a training round that closed: whether it was the last


class Simulation:
    """A fleet at work on a virtual clock.

    Args:
        run: opened, or to be gone on with.
        num_enrolment_bytes: what each device downloads before its first round.
        players: the devices, each with its first ratio chosen.
        at_hand: has their work done.
        world: when it begins and ends.
        growing: what comes to the devices, and how they do, where their data grow.
        observers: told of what happens, when it is written down.
        on_round: told of every training round before the next one opens; True: there shall be none. What it
            raises ends the simulation.
    """

    def __init__(
        self,
        run: Run,
        num_enrolment_bytes: int,
        players: list[SimulatedDevice],
        at_hand: PendingWork,
        *,
        world: World,
        growing: Growing | None = None,
        observers: Observers,
        on_round: OnRound | None = None,
    ) -> None:
        self._controller = run.controller
        self._controller.keeps_steps = False
        self._enrolment = run.enrolment
        self._num_enrolment_bytes = num_enrolment_bytes
        self._fleet = {player.name: player for player in players}
        self._at_hand = at_hand
        self._presence = Availability(run.settings, run.enrolment.seed)
        self._world = world
        self._intake = None if growing is None else FleetStreams(growing, at_hand.executor, players)
        self._observers = observers
        self._on_round = on_round
        self._overlapping = run.settings.round.mode != "synchronous"
        self._kept = Checkpoints(run)
        self._agenda = EventQueue()
        self._changed: set[str] = set()  # devices, since they were written down
        self._answered = RepeatableReplies(self._fleet)
        self._happened: list[Happening] = []  # and is not written down
        self._attempts = Attempts(all_are_there=self._presence.is_whole)
        self._standstill = ProgressGuard(len(players))
        self._closed = False  # a round has, and is not written down
        self._next_tick: float | None = None
        self._finished, self.now = False, 0.0

    def run(self) -> None:
        """Play until the run is finished.

        Raises:
            SettingError: it cannot be, because devices that are needed decline or stay away, or a round
                never has enough updates: a virtual clock would go on for ever.
            FleetuneError: it makes no progress (see `ProgressGuard`).
        """
        if not self._went_on():
            self._begin()
        while self._goes_on:
            with self._kept.one_round():
                self._play_round()
            happened, self._happened, self._closed = self._happened, [], False
            for event in happened:
                self._observers.tell(event)
            self._open_next([one.record for one in happened if isinstance(one, RoundClosed)])
        self._kept.settle()
        if not self._finished:
            raise SettingError("too few devices take part to reach round.quorum; lower it, or add devices")

    @property
    def _goes_on(self) -> bool:
        is_over = self._finished and not (self._intake and self._intake.turns_left)
        return bool(self._agenda) and not is_over

    def _play_round(self) -> None:
        """Until it has ended, and how the world stands then is written."""
        while self._goes_on and not self._can_be_gone_on_with:
            self.now, number, happening = self._agenda.pop()
            self._standstill.note(self.now, self._controller.turn, happening)
            self._happen(happening, number)
        if self._closed:
            changed = [self._fleet[name] for name in sorted(self._changed)]
            self._kept.write(self._snapshot, changed, self._answered.players)
            self._changed.clear()

    @property
    def _can_be_gone_on_with(self) -> bool:
        """A round has closed, and what is under way is written down, unless tasks of a final evaluation are:
        semi-asynchronously that opens with the close of the last round, and its tasks are nowhere but here.
        """
        state = self._controller.engine_state
        return self._closed and not (self._overlapping and state.stage == "rehearsing")

    def _open_next(self, closed: list[RoundRecord]) -> None:
        """No round opens before the one before it is written down and the caller has seen it."""
        trained = [record for record in closed if not record.final_evaluation]
        if self._on_round is not None and any(self._on_round(record) for record in trained):
            self._tell(RoundsEnded(STOPPED))
        if self._controller.engine_state.paused:
            self._tell(Paused(False))

    def _went_on(self) -> bool:
        """Whether this simulation was stopped before: then it goes on where its last round ended."""
        snapshot = self._kept.recall(self._fleet.values())
        if snapshot is None:
            return False
        self.now, self._next_tick = snapshot.now, snapshot.next_tick
        self._presence.idle_stretches = snapshot.idle_stretches
        self._agenda.restore(snapshot.agenda)
        self._at_hand.restore(snapshot.worked)
        self._controller.tasks_made = snapshot.tasks_made
        if self._intake is not None and snapshot.intake is not None:
            self._intake.restore(snapshot.intake)
        self._answered = RepeatableReplies(self._fleet)
        self._finished = self._controller.finished is not None
        if self._controller.engine_state.stage == "training":
            self._controller.replan()
        self._open_next([])
        return True

    def _snapshot(self, closed: int) -> Snapshot:
        return Snapshot(
            layout=FORMAT,
            closed=closed,
            now=self.now,
            agenda=self._agenda.entries,
            worked=self._at_hand.all_done,
            next_tick=self._next_tick,
            idle_stretches=self._presence.idle_stretches,
            tasks_made=self._controller.tasks_made,
            intake=None if self._intake is None else self._intake.state,
        )

    def _begin(self) -> None:
        if self._intake is not None:
            self._changed.update(self._fleet)
            for turn, time_s in enumerate(self._intake.begin(self.now, self._wall_s)):
                self._agenda.add(time_s, event_queue.SamplesArrive(turn))
        self._tell(ClockSet(self._world.ahead_s))
        if self._world.ends_s is not None:
            self._agenda.add(self._world.ends_s, event_queue.DaysEnd())
        self._enrol()

    def _happen(self, happening: event_queue.SimulationEvent, number: int) -> None:
        match happening:
            case event_queue.AvailabilityDrawn(stretch):
                self._draw_presence(stretch)
            case event_queue.SamplesArrive(turn):
                self._samples_come(turn)
            case event_queue.DaysEnd():
                self._tell(RoundsEnded("the simulated days are over"))
            case event_queue.EngineWakes(due):
                self._tick(due)
            case _:
                self._happen_to(self._player(happening.device), happening, number)

    def _happen_to(self, player: SimulatedDevice, happening: event_queue.DeviceEvent, number: int) -> None:
        match happening:
            case event_queue.TaskArrives(device, key, num_bytes):
                self._controller.note_delivered(device, key, num_bytes)
            case event_queue.Uploads(_, made):
                self._upload(player, made)
            case event_queue.TrainingDone():
                self._worked(player, happening, self._at_hand.take(number))
            case event_queue.ReplyArrives():
                self._arrive(player, happening)
            case event_queue.ReplyAcknowledged():
                self._after_round(player)
            case event_queue.DeviceRetries():
                self._try_again(player)

    def _player(self, name: str) -> SimulatedDevice:
        """A device that changes."""
        self._changed.add(name)
        return self._fleet[name]

    def _samples_come(self, turn: int) -> None:
        assert self._intake is not None, "else nothing comes"
        self._changed.update(self._fleet)
        for player in self._intake.come(turn, self.now, self._wall_s, self._kept.closed):
            self._report(player)
        self._intake.end(turn, self._controller.ledger.traffic.values())

    @property
    def _wall_s(self) -> float:
        """The time of day, seconds since 1970."""
        return self._world.ahead_s + self.now

    def _enrol(self) -> None:
        """Everybody enrols before the clock starts; who is away then comes later."""
        for name in self._fleet:
            key = TransferKey("enrolment", self._enrolment.run)
            self._controller.note_delivered(name, key, self._num_enrolment_bytes)
        self._draw_presence(0)
        for player in self._fleet.values():
            if player.there:
                self._report(player)

    def _report(self, player: SimulatedDevice) -> None:
        """It says that it is ready, or why it takes no part for the time being."""
        self._changed.add(player.name)
        refusal = player.refusal
        if refusal is None:
            self._tell(player.ready())
            return
        self._tell(Declined(player.name, 0, 0, refusal))
        controller = player.membership.ratio_controller
        if not controller.fits and controller.cost_history.past_rounds:
            self._agenda.add(self.now + self._enrolment.deadline_s, event_queue.DeviceRetries(player.name))

    def _try_again(self, player: SimulatedDevice) -> None:
        if player.there and player.membership.refusal is not None:
            player.membership.try_again(player.conditions)
            self._report(player)

    def _draw_presence(self, stretch: int) -> None:
        if self._presence.is_whole:
            return
        is_due = self._controller.is_due
        for player, there in self._presence.draw(stretch, self._fleet.values(), is_due=is_due):
            if stretch == 0:
                self._player(player.name).there = there
            elif there != player.there and not player.is_flat:
                self._come_or_go(player, there=there)
        self._agenda.add(
            self._enrolment.deadline_s * (stretch + 1), event_queue.AvailabilityDrawn(stretch + 1)
        )

    def _come_or_go(self, player: SimulatedDevice, *, there: bool) -> None:
        self._changed.add(player.name)
        player.there = there
        player.membership.interrupt()
        if there:
            self._standstill.note_back(player.name)
            self._report(player)
        else:
            self._tell(DeviceGone(player.name))

    def _tell(self, event: Any) -> None:
        if self._finished:  # samples go on coming to devices whose run has no rounds left
            return
        self._follow(self._controller.handle(event, self.now))

    def _follow(self, outcomes: list[Outcome]) -> None:
        unsent = []
        for outcome in outcomes:
            match outcome:
                case OutgoingTask():
                    try:
                        self._send(outcome)
                    except PacketNotFinite as problem:
                        unsent.append(outcome.declined(problem))
                case _:
                    self._note_happening(outcome)
        for declined in unsent:
            self._tell(declined)
        self._hold_next()
        self._attempts.check(self._controller.turn)
        wake_at = self._controller.wake_at
        if wake_at is not None and wake_at != self._next_tick:
            self._next_tick = wake_at
            self._agenda.add(max(wake_at, self.now), event_queue.EngineWakes(wake_at))

    def _hold_next(self) -> None:
        """While a round is open none shall follow at once, see `_open_next`; one that is asked again may."""
        if self._finished or self._overlapping or self._closed:
            return
        state = self._controller.engine_state
        if (trains := state.stage == "training") != state.paused:
            self._tell(Paused(trains))

    def _note_happening(self, event: Happening) -> None:
        self._happened.append(event)
        self._attempts.note(event)
        if isinstance(event, RoundClosed):
            self._closed = True
            self._presence.idle_stretches = 0
            self._changed.update(self._answered.forget(self._controller.awaited_turn))
            self._at_hand.forget_ahead()
            if self._intake is not None:
                self._intake.note_round(event.record)
        elif isinstance(event, RunFinished):
            self._finished = True

    def _tick(self, due: float) -> None:
        if due == self._controller.wake_at:
            self._next_tick = None
            self._tell(Tick())

    def _send(self, task: OutgoingTask) -> None:
        player, key, turn = self._player(task.device), task.transfer_key, task.transfer_key.turn
        self._standstill.note_sent(player.name, turn)
        payload, told = task.make(), self._controller.told
        num_bytes = len(payload)  # not the payload itself: a thousand of these may be on the agenda
        transfer = downloaded(player.device.link, self.now, num_bytes)
        arrives_at = transfer.arrives_at
        self._agenda.add(arrives_at, event_queue.TaskArrives(player.name, key, num_bytes))
        if turn in player.replies:
            self._agenda.add(arrives_at, event_queue.Uploads(player.name, player.replies[turn]))
            return
        if turn == player.working:
            return  # it came back in the midst of this very task
        player.working = turn
        asked = player.membership.ratio_controller.proposed
        proposed = preview_task(payload, self._enrolment.spec).budget if asked else None
        work = player.membership.begin(key, num_bytes, transfer.seconds, proposed, began_s=self.now)
        train_s, turns = player.train_s(work.budget, turn), player.turns
        where = player.name, player.device.index, work.budget, key, payload, self._wall_s, self._kept.closed
        job = TrainingJob(
            *where, told=told, mask_time=self._enrolment.mask_time(player.membership.report, "up")
        )
        done = event_queue.TrainingDone(player.name, work, train_s, turns)
        worked = self._at_hand.hand_out(player, job, lambda: self._controller.reading(player.name, turn))
        self._at_hand.note(self._agenda.add(arrives_at + train_s, done), worked)

    def _worked(
        self, player: SimulatedDevice, done: event_queue.TrainingDone, worked: TrainingResult
    ) -> None:
        """A device is done with a task."""
        work, reply, left_out = done.work, worked.reply, worked.left_out
        if worked.figures is not None and player.turns == done.turns:
            player.figures = worked.figures
        player.base = worked.base or player.base
        if reply is None:
            player.working = None
            player.membership.interrupt()
            why = worked.declined or player.membership.why_unread(work.key)
            self._tell(player.ready() if why is None else Declined(player.name, *work.key.turn, why))
            return
        if player.there and player.note_samples(self.now, claimed=worked.held):
            self._tell(player.ready())  # before the reply, which claims them
        turn = work.key.turn
        player.working = None if player.working == turn else player.working
        trained = player.membership.going_on(work.trained(done.train_s, len(reply), left_out=left_out))
        player.replies[turn] = made = FinishedReply(reply, trained)
        self._answered.add(player)
        self._upload(player, made)

    def _upload(self, player: SimulatedDevice, made: FinishedReply) -> None:
        transfer = uploaded(player.device.link, self.now, len(made.reply))
        work = player.sent(made.work, transfer.seconds)
        player.sends_until = transfer.arrives_at
        self._agenda.add(transfer.arrives_at, event_queue.ReplyArrives(player.name, made.reply, work))

    def _arrive(self, player: SimulatedDevice, arrived: event_queue.ReplyArrives) -> None:
        work = arrived.work
        if self._finished or not player.there:
            return  # it offers again when it is back, because it is sent its task again
        player.spend(work.taken, self.now)
        if self._intake is not None:
            self._intake.note_work(work)
        player.membership.learn(work, player.conditions)
        player.note_samples(self.now)
        turn, reply = Turn.of(work.key), arrived.reply
        ahead = self._at_hand.take_ahead(player.name, reply)
        self._agenda.add_next(self.now, event_queue.ReplyAcknowledged(player.name))
        outcomes = self._controller.receive(
            player.name, turn, reply, work.taken, self.now, predicted=work.expected, ahead=ahead
        )
        self._follow(outcomes)

    def _after_round(self, player: SimulatedDevice) -> None:
        if player.is_flat:
            player.there = False
            self._tell(DeviceGone(player.name))
            if (reason := self._presence.why_over(self._fleet.values())) is not None:
                self._tell(RoundsEnded(reason))
        elif player.membership.is_news or player.refusal:
            self._report(player)
