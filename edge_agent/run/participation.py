"""The agent's part in its joined run: when it is ready, which task it works on, and what it sends."""

import logging
from collections.abc import Callable, Iterable

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.run.activity import ActivityNotifier
from fleetune.edge_agent.run.decline import declined
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.jobs import Jobs, Worked
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.protocols.errors import ReferenceModelUnknown, StoreError, TrainingStopped
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Item, PeerLink

LOOK_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Participation:
    """Works on the tasks of one run at a time, in the jobs' thread.

    Args:
        device: the device that takes part.
        jobs: the jobs' thread; each task ends with a `Worked` event.
        link: link to the coordinator.
        notifier: receives the agent's activity.
        send: sends a message.
        pass_on: receives the items that the link returns.
        download_s: returns the duration of a task's transfer, or None if the task was stored before.
        clock: monotonic clock, in seconds.

    Attributes:
        joined: the joined run; None if no run is joined.
        wake_at: time of the next call of `tick`; None for never.
    """

    def __init__(
        self,
        device: Device,
        jobs: Jobs,
        link: PeerLink,
        notifier: ActivityNotifier,
        *,
        send: Callable[[wire.Message | None], None],
        pass_on: Callable[[Iterable[Item]], None],
        download_s: Callable[[str], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._device, self._jobs, self._link, self._notifier = device, jobs, link, notifier
        self._send, self._pass_on, self._download_s, self._clock = send, pass_on, download_s, clock
        self.joined: JoinedRun | None = None
        self._working: TransferKey | None = None
        self._next: tuple[TransferKey, str] | None = None  # key and transfer of the newest task
        self._resting: str | None = None  # reason why the device takes no part now
        self.wake_at: float | None = None

    @property
    def run(self) -> str | None:
        """Id of the run; None if no run is joined."""
        return None if self.joined is None else self.joined.enrolment.run

    def after_join(self, joined: JoinedRun | wire.Message | None) -> None:
        """Take part in a joined run, or send the message that explains why the join failed."""
        if not isinstance(joined, JoinedRun):
            self._send(joined)
            return
        self.joined = joined
        self._notifier.note(run=joined.enrolment.run, round=joined.last_round, finished=None)
        self.report_ready()

    def report_ready(self) -> None:
        """Report to the coordinator that this device is ready, or why it is not ready yet."""
        joined = self._joined()
        self._link.compact = joined.compact
        self._resting = self._device.guard.reason_not_to_train() or joined.refusal
        if self._resting is None:
            joined.note_samples(replied=bool(self._link.outbox))
            self._notifier.note(resting=None)
            self._send(joined.ready())
        else:
            key = TransferKey("enrolment", joined.enrolment.run)
            self._send(declined(key, "resting", TrainingStopped(self._resting)))
        if self._device.guard.is_on or self._resting is not None or joined.grows:
            self.wake_at = self._clock() + LOOK_EVERY_S
        # a new coordinator process may not know the reason yet
        self._pass_on(self._link.reconnected(self._clock()))

    def tick(self, now: float) -> None:
        """Report changes of the board's state or of its samples to the coordinator."""
        if self.wake_at is None or now < self.wake_at:
            return
        self.wake_at = None
        if self.joined is None:
            return
        self.wake_at = now + LOOK_EVERY_S
        if self.joined.refusal is not None:
            self.joined.try_again()
        if self._working is not None or self._link.outbox:
            return
        reason = self._device.guard.reason_not_to_train() or self.joined.refusal
        if reason != self._resting or self.joined.note_samples():
            self.report_ready()
        if self.joined.loss_is_due():
            self._jobs.run(self.joined.test_loss)

    def work(self, key: TransferKey, transfer: str) -> None:
        """Work on a task now; if other work is in progress, do it afterwards if it is still the newest."""
        joined = self._joined()
        overtaken = self._link.drop(
            lambda waiting: waiting.run != key.run or waiting.round_attempt < key.round_attempt, self._clock()
        )
        self._pass_on(overtaken)
        if key.update in self._link.outbox.keys or key == self._working:
            return
        if self._working is not None:
            self._next = (key, transfer) if key.round_attempt > self._working.round_attempt else self._next
            return
        stored = self._device.store.task(key.run, transfer)
        try:
            payload = stored.read()
        except StoreError as problem:
            self._decline(key, problem)
            return
        if payload is None:
            return  # a late copy of an offer: a newer task has replaced this one
        log.info("%s: training", key.words)
        self._working = key
        self._notifier.note(round=key.round, training=True, resting=None)
        joined.begin(key, payload, self._download_s(transfer))
        self._jobs.work(key, lambda: joined.work(stored.read))

    def after_work(self, event: Worked, now: float) -> None:
        """Send the reply to a task, or report why there is none. Then start the newest task."""
        newer, self._working, self._next = self._next, None, None
        self._notifier.note(training=newer is not None)
        key = event.key
        if self.run != key.run:
            return
        if newer is not None:
            log.warning(
                "%s was over before this device's work was done; the work is discarded",
                key.words,
            )
            self.work(*newer)
            return
        problem = event.reply.exception()
        if problem is None:
            self._send_reply(event, now)
        elif isinstance(problem, ReferenceModelUnknown):
            self._after_unread(key, problem, now)
        else:
            self._after_failure(key, problem, now)

    def _send_reply(self, event: Worked, now: float) -> None:
        key, reply, joined = event.key, event.reply.result(), self._joined()
        log.info("%s: done in %.1f s; %d bytes to send", key.words, event.seconds, len(reply))
        if joined.note_samples(replied=True):  # sent before the reply, which claims these samples
            self._send(joined.ready())
        self._send(joined.measured(key))
        again = joined.taken.download_s is None  # an earlier process received this task, and perhaps replied
        self._pass_on(self._link.post(key.update, reply, now, perhaps_there=again))

    def _after_unread(self, key: TransferKey, problem: ReferenceModelUnknown, now: float) -> None:
        """Ask once for all of a task that could not be read; the second time, decline it."""
        why_declined = self._joined().planner.why_unread(key)
        if why_declined is None:
            log.info("%s: %s; asking the coordinator for the whole task", key.words, problem)
            self.report_ready()
        else:
            self._after_failure(key, ReferenceModelUnknown(why_declined), now)

    def _after_failure(self, key: TransferKey, problem: BaseException, now: float) -> None:
        self._decline(key, problem)
        self.wake_at = now if self._device.guard.is_on else self.wake_at

    def note_sent(self, sent: Sent) -> None:
        """Learn from the round of a delivered update, or handle the coordinator's refusal."""
        key, joined = sent.transfer_key, self.joined
        if sent.refused is not None:
            log.warning(
                "%s: the coordinator refused the update: %s",
                key.words,
                wire.readable(sent.refused),
            )
            return
        log.info("%s: update delivered", key.words)
        if joined is None or not joined.is_at(key):
            return
        joined.delivered(sent.seconds)
        self._send(joined.measured(key, late=True))
        joined.note_samples()
        if joined.planner.is_news or joined.refusal:
            self.report_ready()

    def report_progress(self, fraction: float) -> None:
        """Report the progress of local training to the coordinator, 0..1."""
        if self._working is not None:
            fraction = round(fraction, 2) if self._link.compact else fraction
            self._send(wire.Working(self._working.run, self._working.round, "training", fraction))

    def finish(self, run: str) -> None:
        """Leave a run that is over."""
        if self.run == run:
            self.joined, self._next, self._link.compact = None, None, False
        self._notifier.note(run=None, resting=None, finished=run)

    def _decline(self, key: TransferKey, problem: BaseException) -> None:
        self._send(declined(key, key.words, problem))

    def _joined(self) -> JoinedRun:
        assert self.joined is not None, "called in a run only"
        return self.joined
