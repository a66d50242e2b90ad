"""The devices' side of a simulation: they enrol, report, train, reply, connect and disconnect."""

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


class DeviceSide:
    """Carries out the devices' events.

    Args:
        coordinator: receives their reports and replies.
        transfers: sends their replies.
        queue: event queue of the simulation.
        fleet: the devices.
        work: their training in workers.
        availability: draws which devices are connected.
        streams: their samples over time; None if their data do not grow.
        guard: counts the tasks of devices that reconnect.
        checkpoints: store devices' files from before a round.
        enrolment: enrolment of the run.
    """

    def __init__(
        self,
        coordinator: CoordinatorSide,
        transfers: Transfers,
        queue: EventQueue,
        fleet: Fleet,
        work: PendingWork,
        availability: Availability,
        streams: FleetStreams | None,
        guard: ProgressGuard,
        checkpoints: Checkpoints,
        enrolment: Enrolment,
    ) -> None:
        self._coordinator = coordinator
        self._transfers = transfers
        self._queue = queue
        self._fleet = fleet
        self._work = work
        self._availability = availability
        self._streams = streams
        self._guard = guard
        self._checkpoints = checkpoints
        self._enrolment = enrolment

    def begin_streams(self) -> None:
        """Give the devices their first samples, and schedule the others."""
        if self._streams is not None:
            self._fleet.all_changing()
            for delivery, time_s in enumerate(self._streams.begin(self._queue.now, self._queue.wall_s)):
                self._queue.add(time_s, SamplesArrive(delivery))

    def enrol(self, num_bytes: int) -> None:
        """Enrol all devices before the clock starts; disconnected devices report later.

        Args:
            num_bytes: bytes that each device downloads before its first round.
        """
        for device in self._fleet:
            key = TransferKey("enrolment", self._enrolment.run)
            self._coordinator.controller.note_delivered(device.name, key, num_bytes)
        self.draw_availability(0)
        for device in self._fleet:
            if device.connected:
                self._report(device)

    def handle(self, event: DeviceEvent, number: int) -> None:
        """Carry out an event of one device; `number`: number of the event in the queue."""
        device = self._fleet.changing(event.device)
        match event:
            case TaskArrives(name, key, num_bytes):
                self._coordinator.controller.note_delivered(name, key, num_bytes)
            case Uploads(_, made):
                self._transfers.send_reply(device, made)
            case TrainingDone():
                self._training_done(device, event, self._work.take(number))
            case ReplyArrives():
                self._reply_arrives(device, event)
            case ReplyAcknowledged():
                self._reply_acknowledged(device)
            case DeviceRetries():
                self._retry(device)

    def samples_arrive(self, delivery: int) -> None:
        """Store new samples at all devices; a device whose reported data changed reports."""
        assert self._streams is not None, "else no samples are scheduled"
        self._fleet.all_changing()
        now, wall_s = self._queue.now, self._queue.wall_s
        for device in self._streams.deliver(delivery, now, wall_s, self._checkpoints.num_closed):
            self._report(device)
        self._streams.end(delivery, self._coordinator.controller.ledger.traffic.values())

    def draw_availability(self, period: int) -> None:
        """Connect and disconnect devices, and schedule the next draw."""
        if self._availability.is_whole:
            return
        is_due = self._coordinator.controller.is_due
        for device, connected in self._availability.draw(period, self._fleet, is_due=is_due):
            if period == 0:
                self._fleet.changing(device.name).connected = connected
            elif connected != device.connected and not device.is_flat:
                self._connect(device, connected=connected)
        self._queue.add(self._enrolment.deadline_s * (period + 1), AvailabilityDrawn(period + 1))

    def _connect(self, device: SimulatedDevice, *, connected: bool) -> None:
        self._fleet.changing(device.name).connected = connected
        device.planner.interrupt()
        if connected:
            self._guard.note_reconnected(device.name)
            self._report(device)
        else:
            self._coordinator.handle(DeviceGone(device.name))

    def _report(self, device: SimulatedDevice) -> None:
        """Report that the device is ready, or why it does not take part now."""
        self._fleet.changing(device.name)
        refusal = device.refusal
        if refusal is None:
            self._coordinator.handle(device.ready())
            return
        self._coordinator.handle(Declined(device.name, 0, 0, refusal))
        controller = device.planner.ratio_controller
        if not controller.fits and controller.cost_history.past_rounds:
            self._queue.add(self._queue.now + self._enrolment.deadline_s, DeviceRetries(device.name))

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
            self._coordinator.handle(declined)
            return
        if device.connected and device.note_samples(self._queue.now, claimed=result.held):
            # this must precede the reply, which claims these samples
            self._coordinator.handle(device.ready())
        round_attempt = work.key.round_attempt
        device.working = None if device.working == round_attempt else device.working
        trained = work.trained(done.train_s, len(reply), compression_error=result.compression_error)
        made = FinishedReply(reply, device.planner.going_on(trained))
        self._fleet.keep_reply(device, round_attempt, made)
        self._transfers.send_reply(device, made)

    def _reply_arrives(self, device: SimulatedDevice, arrived: ReplyArrives) -> None:
        work, now = arrived.work, self._queue.now
        if self._coordinator.finished or not device.connected:
            return  # a device that reconnects gets its task again and resends this reply
        device.spend(work.taken, now)
        if self._streams is not None:
            self._streams.note_work(work)
        device.planner.learn(work, device.conditions)
        device.note_samples(now)
        ahead = self._work.take_read(device.name, arrived.reply)
        self._queue.add_next(ReplyAcknowledged(device.name))
        outcomes = self._coordinator.controller.receive(
            device.name,
            RoundAttempt.of(work.key),
            arrived.reply,
            work.taken,
            now,
            predicted=work.expected,
            ahead=ahead,
        )
        self._coordinator.carry_out(outcomes)

    def _reply_acknowledged(self, device: SimulatedDevice) -> None:
        if device.is_flat:
            device.connected = False
            self._coordinator.handle(DeviceGone(device.name))
            if (reason := self._availability.why_over(self._fleet)) is not None:
                self._coordinator.handle(RoundsEnded(reason))
        elif device.planner.is_news or device.refusal:
            self._report(device)
