"""Payloads over simulated links: tasks to devices, and replies back.

The exchange is that of `protocols.wire.transfer`: a payload follows its offer at once, and its last byte is
acknowledged. Control messages, such as offers, take the link's delay but none of its bandwidth.
"""

from dataclasses import dataclass

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.task_preview import preview_task
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
    """A payload to the device, which measures from the arrival of the offer."""
    arrives_at = link.finish_s(now_s, num_bytes, "down")
    return Transfer(arrives_at, arrives_at - now_s - link.delay_s)


def uploaded(link: Link, now_s: float, num_bytes: int) -> Transfer:
    """A payload from the device, which measures until the last acknowledgement."""
    arrives_at = link.finish_s(now_s, num_bytes, "up")
    return Transfer(arrives_at, arrives_at - now_s + link.delay_s)


class Transfers:
    """Sends tasks and replies, and starts the devices' work.

    Args:
        controller: controller of the run; it has the decoded values of each task.
        enrolment: enrolment of the run.
        queue: receives the arrivals.
        fleet: the devices.
        work: receives the devices' training.
        guard: counts tasks that are sent again.
        checkpoints: store devices' files from before a round.
    """

    def __init__(
        self,
        controller: RunController,
        enrolment: Enrolment,
        queue: EventQueue,
        fleet: Fleet,
        work: PendingWork,
        guard: ProgressGuard,
        checkpoints: Checkpoints,
    ) -> None:
        self._controller = controller
        self._enrolment = enrolment
        self._queue = queue
        self._fleet = fleet
        self._work = work
        self._guard = guard
        self._checkpoints = checkpoints

    def send_task(self, task: OutgoingTask) -> None:
        """Send a task; its device trains on it from the arrival on.

        Raises:
            PacketNotFinite: the task cannot be encoded.
        """
        device, key = self._fleet.changing(task.device), task.transfer_key
        round_attempt = RoundAttempt.of(key)
        self._guard.note_sent(device.name, round_attempt)
        payload, content = task.make(), self._controller.content
        # without the payload, because the queue may hold a thousand of these
        now, num_bytes = self._queue.now, len(payload)
        transfer = downloaded(device.spec.link, now, num_bytes)
        self._queue.add(transfer.arrives_at, TaskArrives(device.name, key, num_bytes))
        if round_attempt in device.replies:
            self._queue.add(transfer.arrives_at, Uploads(device.name, device.replies[round_attempt]))
            return
        if round_attempt == device.working:
            return  # the device reconnected while it worked on this task
        device.working = round_attempt
        asked = device.planner.ratio_controller.proposed
        proposed = preview_task(payload, self._enrolment.spec).budget if asked else None
        work = device.planner.begin(key, num_bytes, transfer.seconds, proposed, began_s=now)
        train_s = device.train_s(work.budget, round_attempt)
        job = TrainingJob(
            device.name,
            device.spec.index,
            work.budget,
            key,
            payload,
            self._queue.wall_s,
            self._checkpoints.num_closed,
            content=content,
            mask_time=self._enrolment.mask_time(device.planner.report, "up"),
        )
        training = self._work.start(device, job, lambda: self._controller.reading(device.name, round_attempt))
        done = TrainingDone(device.name, work, train_s, device.deliveries)
        self._work.note_end(self._queue.add(transfer.arrives_at + train_s, done), training)

    def send_reply(self, device: SimulatedDevice, made: FinishedReply) -> None:
        """Send a finished reply."""
        transfer = uploaded(device.spec.link, self._queue.now, len(made.reply))
        work = device.sent(made.work, transfer.seconds)
        device.sends_until = transfer.arrives_at
        self._queue.add(transfer.arrives_at, ReplyArrives(device.name, made.reply, work))

    def forget_round(self) -> None:
        """Discard replies of earlier rounds, because the coordinator is unlikely to request them."""
        self._fleet.forget_replies(self._controller.awaited_attempt)
        self._work.forget_read()
