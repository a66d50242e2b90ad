"""Transfers payloads over simulated links: tasks to devices, and replies back.

The exchange is that of `protocols.wire.transfer`: a payload follows its offer at once, and its last byte is
acknowledged. Control messages, such as offers, take the link's delay but none of its bandwidth.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.task_reader import preview_task
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.links.link import Link
from fleetune.tools.simulator.checkpoint.checkpoints import Checkpoints
from fleetune.tools.simulator.event_queue import EventQueue, ReplyArrives, TaskArrives, TrainingDone, Uploads
from fleetune.tools.simulator.jobs import TrainingJob
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import FinishedReply, Fleet, SimulatedDevice


@dataclass(frozen=True)
class Transfer:
    """A payload in transfer.

    Attributes:
        arrives_at: arrival time of its last byte.
        seconds: duration as the device measures it.
    """

    arrives_at: float
    seconds: float


def downloaded(link: Link, now_s: float, num_bytes: int) -> Transfer:
    """Return the transfer of a payload to the device, which measures time from the arrival of the offer."""
    arrives_at = link.finish_s(now_s, num_bytes, "down")
    return Transfer(arrives_at, arrives_at - now_s - link.delay_s)


def uploaded(link: Link, now_s: float, num_bytes: int) -> Transfer:
    """Return the transfer of a payload from the device, which measures until the last acknowledgement."""
    arrives_at = link.finish_s(now_s, num_bytes, "up")
    return Transfer(arrives_at, arrives_at - now_s + link.delay_s)


@dataclass(frozen=True)
class Transfers:
    """Sends tasks and replies, and starts the devices' work.

    Attributes:
        controller: controller of the run; it has the decoded values of each task.
        enrolment: enrolment of the run.
        queue: receives the arrivals.
        fleet: the devices.
        work: receives the devices' training.
        guard: counts tasks that are sent again.
        checkpoints: knows under which round devices' files are stored.
    """

    controller: RunController
    enrolment: Enrolment
    queue: EventQueue
    fleet: Fleet
    work: PendingWork
    guard: ProgressGuard
    checkpoints: Checkpoints

    def send_task(self, task: OutgoingTask) -> None:
        """Send a task; the device starts to train on it when it arrives.

        Raises:
            PacketNotFinite: the task cannot be encoded.
        """
        device, key = self.fleet.changing(task.device), task.transfer_key
        round_attempt = RoundAttempt.of(key)
        self.guard.note_sent(device.name, round_attempt)
        payload, content = task.make(), self.controller.content
        # without the payload, because the queue may hold a thousand of these
        now, num_bytes = self.queue.now, len(payload)
        transfer = downloaded(device.spec.link, now, num_bytes)
        self.queue.add(transfer.arrives_at, TaskArrives(device.name, key, num_bytes))
        if round_attempt in device.replies:
            self.queue.add(transfer.arrives_at, Uploads(device.name, device.replies[round_attempt]))
            return
        if round_attempt == device.working:
            return  # the device reconnected while it worked on this task
        device.working = round_attempt
        asked = device.planner.ratio_controller.proposed
        proposed = preview_task(payload, self.enrolment.spec).budget if asked else None
        work = device.planner.begin(key, num_bytes, transfer.seconds, proposed, began_s=now)
        train_s = device.train_s(work.budget, round_attempt)
        job = TrainingJob(
            device.name,
            device.spec.index,
            work.budget,
            key,
            payload,
            self.queue.wall_s,
            self.checkpoints.num_closed,
            content=content,
            mask_time=self.enrolment.mask_time(device.planner.report, "up"),
        )
        training = self.work.start(device, job, lambda: self.controller.reading(device.name, round_attempt))
        done = TrainingDone(device.name, work, train_s, device.deliveries)
        self.work.note_end(self.queue.add(transfer.arrives_at + train_s, done), training)

    def send_reply(self, device: SimulatedDevice, made: FinishedReply) -> None:
        """Send a finished reply."""
        transfer = uploaded(device.spec.link, self.queue.now, len(made.reply))
        work = device.sent(made.work, transfer.seconds)
        device.sends_until = transfer.arrives_at
        self.queue.add(transfer.arrives_at, ReplyArrives(device.name, made.reply, work))

    def forget_round(self) -> None:
        """Discard replies of earlier rounds, because the coordinator is unlikely to request them."""
        self.fleet.forget_replies(self.controller.awaited_attempt)
        self.work.forget_read()
