"""The simulator: the fleet's own round engine, methods, codec and sessions on a virtual clock.

Only time is imagined. Every payload is made by the real codec and its real length decides how long the
device's link is busy; every device really trains, and chooses its ratio by the agent's own rule. What is
simulated is how long that takes on its board and what it draws, how long the bytes take on its link, and
when it is there.
"""

import heapq
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from fleetune.coordinator.rounds.civil_time import instant
from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.events import (
    ClockSet,
    Declined,
    DeviceGone,
    Paused,
    RoundsEnded,
    Tick,
)
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.rounds.schedule import TOLD
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.run_events import Happening, RoundClosed, RunFinished
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.membership import RoundWork
from fleetune.edge_agent.run.session import asked_of
from fleetune.protocols.errors import PacketNotFinite, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.schedule import DAY_S, seconds_of_day
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment, run_key
from fleetune.tools.simulator import worker
from fleetune.tools.simulator.days import Growing
from fleetune.tools.simulator.simulated_device import MadeReply, Player
from fleetune.tools.simulator.transfers import downloaded, uploaded

OnRound = Callable[[RoundRecord], bool]  # told of a training round that closed: whether it was the last
STOPPED = "stopped by its caller"
MOST_ATTEMPTS = 300  # at one round
FIRST_DAY = 20_454  # since 1970: 1 January 2026
MOST_STRETCHES = 10_000  # between two rounds


@dataclass(frozen=True)
class World:
    """When a simulated world begins and ends.

    Attributes:
        ahead_s: the time of day when its clock begins, in seconds since 1970.
        ends_s: after so many seconds no round opens any more; None: when its rounds are done.
    """

    ahead_s: float = 0.0
    ends_s: float | None = None


def world_of(settings: RunSettings) -> World:
    """What [fleet] says of it."""
    schedule, fleet = schedule_of(settings.schedule), settings.fleet
    begins = instant(FIRST_DAY, seconds_of_day(fleet.starts_at, "starts_at"), schedule.zone)
    return World(begins, None if fleet.days is None else fleet.days * DAY_S)


class Simulation:
    """A fleet at work on a virtual clock.

    Args:
        controller: of the run.
        enrolment: of the run.
        num_enrolment_bytes: what each device downloads before its first round.
        players: the devices, each with its first ratio chosen.
        executor: runs `tools.simulator.worker.reply`.
        max_in_flight: payloads handed to the executor at a time.
        availability: chance that a device is there, drawn anew for every stretch of `deadline_s`.
        world: when it begins and ends.
        growing: what comes to the devices, and how they do, where their data grow.
        observers: told of what happens.
        on_round: told of every training round before the next one opens; True: there shall be none. What it
            raises ends the simulation.
        overlapping: rounds are semi-asynchronous; `on_round` is told when the next one is open already, which
            is finished in any case.
    """

    def __init__(
        self,
        controller: RunController,
        enrolment: Enrolment,
        num_enrolment_bytes: int,
        players: list[Player],
        executor: Executor,
        *,
        max_in_flight: int,
        availability: float = 1.0,
        world: World = World(),
        growing: Growing | None = None,
        observers: Observers,
        on_round: OnRound | None = None,
        overlapping: bool = False,
    ) -> None:
        self._controller = controller
        controller.keeps_steps = False
        self._enrolment = enrolment
        self._num_enrolment_bytes = num_enrolment_bytes
        self._fleet = {player.name: player for player in players}
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._availability = availability
        self._world = world
        self._growing = growing
        self._turns_left = 0 if growing is None else growing.deliveries.turns
        self._observers = observers
        self._on_round = on_round
        self._overlapping = overlapping
        self._in_flight: list[Future[worker.Worked]] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._next_tick: float | None = None
        self._finished = False
        self._idle_stretches = 0
        self.now = 0.0

    def run(self) -> None:
        """Play until the run is finished.

        Raises:
            SettingError: it cannot be, because devices that are needed decline or stay away, or a round
                never has enough updates: a virtual clock would go on for ever.
        """
        self._await_samples()
        self._tell(ClockSet(self._world.ahead_s))
        if self._world.ends_s is not None:
            self._at(self._world.ends_s, lambda: self._tell(RoundsEnded("the simulated days are over")))
        self._enrol()
        while self._agenda and not (self._finished and not self._turns_left):
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()
        if not self._finished:
            raise SettingError("too few devices take part to reach round.quorum; lower it, or add devices")

    def _await_samples(self) -> None:
        """Devices have their first samples, and all others are on the agenda."""
        if self._growing is None:
            return
        begun = [
            (player, self._executor.submit(worker.begin, player.name, player.device.index, self._wall_s))
            for player in self._fleet.values()
        ]
        for player, job in begun:
            player.figures = job.result()
            player.note_samples(self.now)
        every_s = DAY_S / self._growing.deliveries.arrivals.times_a_day
        for turn in range(self._growing.deliveries.turns):
            self._at((turn + 1) * every_s, partial(self._samples_come, self._growing, turn))

    def _samples_come(self, growing: Growing, turn: int) -> None:
        jobs = []
        for player in self._fleet.values():
            if player.job is not None:
                player.job.exception()  # one writer at a time for its samples
            where = player.name, player.device.index, turn, self._wall_s
            jobs.append((player, self._executor.submit(worker.come, *where)))
        for player, job in jobs:
            came = job.result()
            player.figures, player.turns = came.figures, turn + 1
            growing.days.note(player.name, came)
            if player.there and player.is_idle(self.now) and player.note_samples(self.now):
                self._report(player)
        self._turns_left -= 1
        if (turn + 1) % growing.deliveries.arrivals.times_a_day == 0:
            drifting = sum((player.drift or 0.0) >= TOLD for player in self._fleet.values())
            growing.days.end(self._controller.ledger.traffic.values(), drifting)

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

    def _report(self, player: Player) -> None:
        """It says that it is ready, or why it takes no part for the time being."""
        refusal = player.refusal
        if refusal is None:
            self._tell(player.ready())
            return
        self._tell(Declined(player.name, 0, 0, refusal))
        controller = player.membership.ratio_controller
        if not controller.fits and controller.cost_history.past_rounds:
            self._at(self.now + self._enrolment.deadline_s, lambda: self._try_again(player))

    def _try_again(self, player: Player) -> None:
        if player.there and player.membership.refusal is not None:
            player.membership.try_again(player.conditions)
            self._report(player)

    def _draw_presence(self, stretch: int) -> None:
        if self._availability == 1:
            return
        self._idle_stretches += int(self._controller.is_due)
        if self._idle_stretches > MOST_STRETCHES:
            raise SettingError(
                f"fleet.availability = {self._availability:g}: no round was closed in {MOST_STRETCHES} times"
                " round.deadline_s; raise it, or lower round.quorum"
            )
        key = run_key(self._enrolment.seed).child("availability", stretch)
        chances = key.uniform(len(self._fleet))
        for chance, player in zip(chances, self._fleet.values(), strict=True):
            there = bool(chance < self._availability)
            if stretch == 0:
                player.there = there
            elif there != player.there and not player.is_flat:
                player.there = there
                player.membership.interrupt()
                if there:
                    self._report(player)
                else:
                    self._tell(DeviceGone(player.name))
        self._at(self._enrolment.deadline_s * (stretch + 1), lambda: self._draw_presence(stretch + 1))

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), happen))

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
        self._ask_caller(outcomes)
        turn = self._controller.turn
        if turn.attempt > MOST_ATTEMPTS:
            raise SettingError(
                f"round {turn.number} was tried {MOST_ATTEMPTS} times and never had enough updates that"
                " count; see round.quorum, round.deadline_s, round.max_strain, and whether training diverges"
            )
        wake_at = self._controller.wake_at
        if wake_at is not None and wake_at != self._next_tick:
            self._next_tick = wake_at
            self._at(max(wake_at, self.now), lambda: self._tick(wake_at))

    def _ask_caller(self, outcomes: list[Outcome]) -> None:
        """Whether there shall be a next round. None opens before the caller has seen the one before it."""
        if self._on_round is None or self._finished:
            return
        closed = (one.record for one in outcomes if isinstance(one, RoundClosed))
        if any(self._on_round(record) for record in closed if not record.final_evaluation):
            self._tell(RoundsEnded(STOPPED))
        state = self._controller.engine_state
        trains = state.stage == "training"
        if not self._overlapping and not self._finished and trains != state.paused:
            self._tell(Paused(trains))

    def _note_happening(self, event: Happening) -> None:
        self._observers.tell(event)
        if isinstance(event, RoundClosed):
            self._idle_stretches = 0
            self._forget_replies()
            if self._growing is not None and not event.record.final_evaluation:
                self._growing.days.rounds = event.record.number
        elif isinstance(event, RunFinished):
            self._finished = True

    def _forget_replies(self) -> None:
        """Of tasks that nobody waits for any more."""
        for name, player in self._fleet.items():
            open_turn = self._controller.awaited_turn(name)
            player.replies = {turn: made for turn, made in player.replies.items() if turn == open_turn}

    def _tick(self, due: float) -> None:
        if due == self._controller.wake_at:
            self._next_tick = None
            self._tell(Tick())

    def _send(self, task: OutgoingTask) -> None:
        player, key = self._fleet[task.device], task.transfer_key
        turn = key.turn
        payload = task.make()
        num_bytes = len(payload)  # not the payload itself: a thousand of these may be on the agenda
        transfer = downloaded(player.device.link, self.now, num_bytes)
        arrives_at = transfer.arrives_at
        self._at(arrives_at, lambda: self._controller.note_delivered(task.device, key, num_bytes))
        if turn in player.replies:
            made = player.replies[turn]
            self._at(arrives_at, lambda: self._upload(player, made))
            return
        if turn == player.working:
            return  # it came back in the midst of this very task
        player.working = turn
        asked = player.membership.ratio_controller.proposed
        proposed = asked_of(payload, self._enrolment.spec).budget if asked else None
        work = player.membership.begin(key, num_bytes, transfer.seconds, proposed, began_s=self.now)
        train_s, turns = player.train_s(work.budget, turn), player.turns
        device = player.device
        job = self._submit(
            player, worker.Job(device.name, device.index, work.budget, key, payload, self._wall_s)
        )
        self._at(arrives_at + train_s, lambda: self._worked(player, work, job.result(), train_s, turns))

    def _submit(self, player: Player, job: worker.Job) -> Future[worker.Worked]:
        if player.job is not None:
            player.job.exception()  # perhaps at a task that was given up: one writer at a time for its state
        while len(self._in_flight) >= self._max_in_flight:
            self._in_flight.pop(0).exception()
        worked = self._executor.submit(worker.reply, job)
        player.job = worked
        self._in_flight = [*(one for one in self._in_flight if not one.done()), worked]
        return worked

    def _worked(
        self, player: Player, work: RoundWork, worked: worker.Worked, train_s: float, turns: int
    ) -> None:
        """A device is done with a task; `turns`: of samples that had come when it began."""
        if worked.figures is not None and player.turns == turns:
            player.figures = worked.figures
        player.base = worked.base or player.base
        if worked.reply is None:
            player.working = None
            player.membership.interrupt()
            if not worked.declined:
                self._tell(player.ready())  # it holds something else than was thought
                return
            self._tell(Declined(player.name, work.key.round, work.key.attempt, worked.declined))
            return
        if player.there and player.note_samples(self.now, claimed=worked.held):
            self._tell(player.ready())  # before the reply, which claims them
        self._trained(player, work, worked.reply, train_s)

    def _trained(self, player: Player, work: RoundWork, reply: bytes, train_s: float) -> None:
        turn = work.key.turn
        player.working = None if player.working == turn else player.working
        trained = player.membership.going_on(work.trained(train_s, len(reply)))
        player.replies[turn] = MadeReply(reply, trained)
        self._upload(player, player.replies[turn])

    def _upload(self, player: Player, made: MadeReply) -> None:
        transfer = uploaded(player.device.link, self.now, len(made.reply))
        work = player.sent(made.work, transfer.seconds)
        player.sends_until = transfer.arrives_at
        self._at(transfer.arrives_at, lambda: self._arrive(player, made.reply, work))

    def _arrive(self, player: Player, reply: bytes, work: RoundWork) -> None:
        if self._finished or not player.there:
            return  # it offers again when it is back, because it is sent its task again
        player.spend(work.taken, self.now)
        if self._growing is not None and not work.key.final_evaluation:
            self._growing.days.joules += work.taken.joules or 0.0
        player.membership.learn(work, player.conditions)
        player.note_samples(self.now)
        turn = Turn.of(work.key)
        self._follow(
            self._controller.receive(player.name, turn, reply, work.taken, self.now, predicted=work.expected)
        )
        self._after_round(player)

    def _after_round(self, player: Player) -> None:
        if player.is_flat:
            player.there = False
            self._tell(DeviceGone(player.name))
        elif player.membership.is_news or player.refusal:
            self._report(player)
