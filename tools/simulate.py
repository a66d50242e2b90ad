"""The simulator: the fleet's own round engine, methods, codec and sessions on a virtual clock.

Only time is imagined. Every payload is made by the real codec and its real length decides how long the
device's link is busy; every device really trains. What is simulated is how long that takes on its board,
how long the bytes take on its link, and when it is there.
"""

import heapq
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coordinator.conductor import Closed, Conductor, Finished, Order, Send
from coordinator.events import Declined, DeviceGone, DeviceReady, Tick
from coordinator.records import RoundRecord
from protocols.errors import SettingError
from protocols.footprint import Footprint
from protocols.messages import Errand
from protocols.method import DeviceReport
from protocols.payloads import Enrolment, run_key
from tools.fleet import SimulatedDevice
from tools.worker import answer


@dataclass
class _Player:
    """A device on the virtual clock: is it there, what is it working on, what has it answered already."""

    device: SimulatedDevice
    report: DeviceReport
    there: bool = True
    job: Future[bytes] | None = None
    working: tuple[int, int] | None = None
    answered: dict[tuple[int, int], tuple[bytes, Footprint]] = field(default_factory=dict)


class Simulation:
    """A fleet at work on a virtual clock.

    Args:
        conductor: of the run.
        enrolment: of the run.
        num_enrolment_bytes: what each device downloads before its first round.
        devices: each with its report (ratio 0: it declines the run).
        executor: runs `tools.worker.answer`.
        max_in_flight: payloads handed to the executor at a time.
        availability: chance that a device is there, drawn anew for every stretch of `deadline_s`.
        on_closed: told of every closed round.
    """

    def __init__(
        self,
        conductor: Conductor,
        enrolment: Enrolment,
        num_enrolment_bytes: int,
        devices: list[tuple[SimulatedDevice, DeviceReport]],
        executor: Executor,
        *,
        max_in_flight: int,
        availability: float = 1.0,
        on_closed: Callable[[RoundRecord], None] = lambda _: None,
    ) -> None:
        self._conductor = conductor
        self._enrolment = enrolment
        self._num_enrolment_bytes = num_enrolment_bytes
        self._fleet = {device.name: _Player(device, report) for device, report in devices}
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._availability = availability
        self._on_closed = on_closed
        self._in_flight: list[Future[bytes]] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._next_tick: float | None = None
        self._finished = False
        self.now = 0.0

    def run(self) -> None:
        """Play until the run is finished.

        Raises:
            SettingError: it cannot be, because devices that are needed decline.
        """
        self._enrol()
        while self._agenda and not self._finished:
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()
        if not self._finished:
            raise SettingError("too few devices take part to reach round.quorum; lower it, or add devices")

    def _enrol(self) -> None:
        """Everybody enrols before the clock starts; who is away then comes later."""
        for name, player in self._fleet.items():
            errand = Errand("enrolment", self._enrolment.run)
            self._conductor.note_delivered(name, errand, self._num_enrolment_bytes)
            if not player.report.ratio:
                self._tell(Declined(name, 0, 0, player.report.reason))
        self._draw_presence(0)
        for player in self._fleet.values():
            if player.there and player.report.ratio:
                self._tell(DeviceReady(player.report))
            else:
                player.there = False

    def _draw_presence(self, stretch: int) -> None:
        if self._availability == 1:
            return
        key = run_key(self._enrolment.seed).child("availability", stretch)
        chances = key.uniform(len(self._fleet))
        for chance, (name, player) in zip(chances, self._fleet.items(), strict=True):
            there = bool(chance < self._availability)
            if stretch == 0:
                player.there = there
            elif there != player.there and player.report.ratio:
                player.there = there
                self._tell(DeviceReady(player.report) if there else DeviceGone(name))
        self._at(self._enrolment.deadline_s * (stretch + 1), lambda: self._draw_presence(stretch + 1))

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), happen))

    def _tell(self, event: Any) -> None:
        self._follow(self._conductor.handle(event, self.now))

    def _follow(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Send():
                    self._send(order)
                case Closed(record):
                    self._on_closed(record)
                    self._forget_answers()
                case Finished():
                    self._finished = True
        wake_at = self._conductor.engine.wake_at
        if wake_at is not None and wake_at != self._next_tick:
            self._next_tick = wake_at
            self._at(max(wake_at, self.now), lambda: self._tick(wake_at))

    def _forget_answers(self) -> None:
        """Of tasks that nobody waits for any more."""
        state = self._conductor.engine.state
        for name, player in self._fleet.items():
            open_turn = state.members[name].asked if state.awaits(name) else None
            player.answered = {turn: kept for turn, kept in player.answered.items() if turn == open_turn}

    def _tick(self, due: float) -> None:
        if due == self._conductor.engine.wake_at:
            self._next_tick = None
            self._tell(Tick())

    def _send(self, send: Send) -> None:
        player = self._fleet[send.device]
        turn = send.errand.round, send.errand.attempt
        payload = send.make()
        num_bytes = len(payload)  # not the payload itself: a thousand of these may be on the agenda
        download_s = num_bytes * 8 / player.device.downlink_bps
        self._at(
            self.now + download_s,
            lambda: self._conductor.note_delivered(send.device, send.errand, num_bytes),
        )
        if turn in player.answered:
            data, actual = player.answered[turn]
            arrives_at = self.now + download_s + (actual.upload_s or 0)
            self._at(arrives_at, lambda: self._arrive(player, data, actual))
            return
        if turn == player.working:
            return  # it came back in the midst of this very task
        player.working = turn
        reply = self._submit(player, payload)
        train_s = self._train_s(player)
        trained_at = self.now + download_s + train_s
        self._at(trained_at, lambda: self._trained(player, turn, reply.result(), download_s, train_s))

    def _submit(self, player: _Player, payload: bytes) -> Future[bytes]:
        device, ratio = player.device, player.report.ratio
        if player.job is not None:
            player.job.exception()  # perhaps at a task that was given up: one writer at a time for its state
        while len(self._in_flight) >= self._max_in_flight:
            self._in_flight.pop(0).exception()
        reply = self._executor.submit(answer, device.name, device.index, ratio, payload)
        player.job = reply
        self._in_flight = [*(one for one in self._in_flight if not one.done()), reply]
        return reply

    def _train_s(self, player: _Player) -> float:
        choices = self._conductor.choices(player.report)
        work = next((choice.cost.work for choice in choices if choice.ratio == player.report.ratio), 1.0)
        samples = self._enrolment.training.epochs * player.report.num_samples
        return work * player.device.train_s(samples, self._enrolment.flops_per_sample)

    def _trained(
        self, player: _Player, turn: tuple[int, int], data: bytes, download_s: float, train_s: float
    ) -> None:
        upload_s = len(data) * 8 / player.device.uplink_bps
        actual = Footprint(download_s=download_s, train_s=train_s, upload_s=upload_s)
        player.answered[turn] = data, actual
        player.working = None if player.working == turn else player.working
        self._at(self.now + upload_s, lambda: self._arrive(player, data, actual))

    def _arrive(self, player: _Player, data: bytes, actual: Footprint) -> None:
        if player.there:  # else it offers again when it is back, because it is sent its task again
            self._follow(self._conductor.receive(player.device.name, data, actual, self.now))
