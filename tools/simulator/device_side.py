"""The devices of a simulation: they enrol, report, train, reply, connect and disconnect."""

from dataclasses import dataclass

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Declined, DeviceGone, RoundsEnded
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.availability import Availability
from fleetune.tools.simulator.checkpoint.checkpoints import Checkpoints
from fleetune.tools.simulator.coordinator_side import CoordinatorSide
from fleetune.tools.simulator.event_queue import (
    AvailabilityDrawn,
    DeviceEvent,
    DeviceRetries,
    EventQueue,
    ReplyAcknowledged,
    ReplyArrives,
    SamplesArrive,
    TaskArrives,
    TrainingDone,
    Uploads,
)
from fleetune.tools.simulator.fleet_streams import FleetStreams
from fleetune.tools.simulator.jobs import TrainingResult
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import FinishedReply, Fleet, SimulatedDevice
from fleetune.tools.simulator.transfers import Transfers


@dataclass(frozen=True)
class DeviceSide:
    """Carries out the devices' events on the virtual clock.

    Attributes:
        coordinator: receives their reports and replies.
        transfers: sends their replies.
        queue: event queue of the simulation.
        fleet: the devices.
        work: training in workers.
        availability: draws which devices are connected.
        streams: arriving samples; None if the devices' data do not grow.
        guard: limits how often a task is sent; raises its limit for devices that reconnect.
        checkpoints: knows under which round devices' files are stored.
        enrolment: enrolment of the run.
    """

    coordinator: CoordinatorSide
    transfers: Transfers
    queue: EventQueue
    fleet: Fleet
    work: PendingWork
    availability: Availability
    streams: FleetStreams | None
    guard: ProgressGuard
    checkpoints: Checkpoints
    enrolment: Enrolment

    def begin_streams(self) -> None:
        """Give the devices their first samples, and schedule later deliveries."""
        if self.streams is not None:
            self.fleet.all_changing()
            for delivery, time_s in enumerate(self.streams.begin(self.queue.now, self.queue.wall_s)):
                self.queue.add(time_s, SamplesArrive(delivery))

    def enrol(self, num_bytes: int) -> None:
        """Enrol all devices before the clock starts; disconnected devices report later.

        Args:
            num_bytes: bytes that each device downloads before its first round.
        """
        for device in self.fleet:
            key = TransferKey("enrolment", self.enrolment.run)
            self.coordinator.controller.note_delivered(device.name, key, num_bytes)
        self.draw_availability(0)
        for device in self.fleet:
            if device.connected:
                self._report(device)

    def handle(self, event: DeviceEvent, number: int) -> None:
        """Carry out an event of one device; `number` is the event's number in the queue."""
        device = self.fleet.changing(event.device)
        match event:
            case TaskArrives(name, key, num_bytes):
                self.coordinator.controller.note_delivered(name, key, num_bytes)
            case Uploads(_, made):
                self.transfers.send_reply(device, made)
            case TrainingDone():
                self._training_done(device, event, self.work.take(number))
            case ReplyArrives():
                self._reply_arrives(device, event)
            case ReplyAcknowledged():
                self._reply_acknowledged(device)
            case DeviceRetries():
                self._retry(device)

    def samples_arrive(self, delivery: int) -> None:
        """Store new samples at all devices; a device whose data changed enough sends a report."""
        assert self.streams is not None, "else no samples are scheduled"
        self.fleet.all_changing()
        now, wall_s = self.queue.now, self.queue.wall_s
        for device in self.streams.deliver(delivery, now, wall_s, self.checkpoints.num_closed):
            self._report(device)
        self.streams.end(delivery, self.coordinator.controller.ledger.traffic.values())

    def draw_availability(self, period: int) -> None:
        """Connect and disconnect devices, and schedule the next draw."""
        if self.availability.is_whole:
            return
        is_due = self.coordinator.controller.is_due
        for device, connected in self.availability.draw(period, self.fleet, is_due=is_due):
            if period == 0:
                self.fleet.changing(device.name).connected = connected
            elif connected != device.connected and not device.is_flat:
                self._connect(device, connected=connected)
        self.queue.add(self.enrolment.deadline_s * (period + 1), AvailabilityDrawn(period + 1))

    def _connect(self, device: SimulatedDevice, *, connected: bool) -> None:
        self.fleet.changing(device.name).connected = connected
        device.planner.interrupt()
        if connected:
            self.guard.note_reconnected(device.name)
            self._report(device)
        else:
            self.coordinator.handle(DeviceGone(device.name))

    def _report(self, device: SimulatedDevice) -> None:
        """Report that the device is ready, or why it does not take part now."""
        self.fleet.changing(device.name)
        refusal = device.refusal
        if refusal is None:
            self.coordinator.handle(device.ready())
            return
        self.coordinator.handle(Declined(device.name, 0, 0, refusal))
        controller = device.planner.ratio_controller
        if not controller.fits and controller.cost_history.past_rounds:
            self.queue.add(self.queue.now + self.enrolment.deadline_s, DeviceRetries(device.name))

    def _retry(self, device: SimulatedDevice) -> None:
        if device.connected and device.planner.refusal is not None:
            device.planner.try_again(device.conditions)
            self._report(device)

    def _training_done(self, device: SimulatedDevice, done: TrainingDone, result: TrainingResult) -> None:
        work, reply = done.work, result.reply
        if result.figures is not None and device.deliveries == done.deliveries:
            device.figures = result.figures
        device.base = result.base or device.base
        if reply is None:
            device.working = None
            device.planner.interrupt()
            why = result.declined or device.planner.why_unread(work.key)
            declined = device.ready() if why is None else Declined(device.name, *work.key.round_attempt, why)
            self.coordinator.handle(declined)
            return
        if device.connected and device.note_samples(self.queue.now, claimed=result.held):
            # this must precede the reply, which claims these samples
            self.coordinator.handle(device.ready())
        round_attempt = work.key.round_attempt
        device.working = None if device.working == round_attempt else device.working
        trained = work.trained(done.train_s, len(reply), compression_error=result.compression_error)
        made = FinishedReply(reply, device.planner.going_on(trained))
        self.fleet.keep_reply(device, round_attempt, made)
        self.transfers.send_reply(device, made)

    def _reply_arrives(self, device: SimulatedDevice, arrived: ReplyArrives) -> None:
        work, now = arrived.work, self.queue.now
        if self.coordinator.finished or not device.connected:
            return  # a device that reconnects gets its task again and resends this reply
        device.spend(work.taken, now)
        if self.streams is not None:
            self.streams.note_work(work)
        device.planner.learn(work, device.conditions)
        device.note_samples(now)
        ahead = self.work.take_read(device.name, arrived.reply)
        self.queue.add_next(ReplyAcknowledged(device.name))
        outcomes = self.coordinator.controller.receive(
            device.name,
            RoundAttempt.of(work.key),
            arrived.reply,
            work.taken,
            now,
            predicted=work.expected,
            ahead=ahead,
        )
        self.coordinator.carry_out(outcomes)

    def _reply_acknowledged(self, device: SimulatedDevice) -> None:
        if device.is_flat:
            device.connected = False
            self.coordinator.handle(DeviceGone(device.name))
            if (reason := self.availability.why_over(self.fleet)) is not None:
                self.coordinator.handle(RoundsEnded(reason))
        elif device.planner.is_news or device.refusal:
            self._report(device)
