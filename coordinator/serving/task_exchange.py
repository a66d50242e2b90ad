"""Exchanges tasks and replies with devices: the bridge between device sessions and the run controller."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.rounds.engine_state import NEVER, RoundAttempt
from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_events import (
    Happening,
    ReplyDropped,
    ReplyRefused,
    RoundClosed,
    RunFinished,
)
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.event_batch import EventBatch
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.transfers import Transfers
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.protocols.errors import PacketNotFinite, StoreError
from fleetune.protocols.pages_on_disk import bytes_on_disk
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Refuse, Resume, TransferKey, readable
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item

log = logging.getLogger(__name__)

MAX_REQUESTS = 5  # answers to one request until the device connects again
_HARMLESS = {"late", "stale", "duplicate"}  # rejections of offers that a correct agent may make


@dataclass
class TaskExchange:
    """Passes devices' messages to the run controller, and carries out the controller's decisions.

    Attributes:
        run: the run.
        sessions: the sessions of all devices.
        transfers: publishes packets.
        rejected: counts and logs rejected messages.
        observers: receive the events of the run, once these are durable.
        batch: delays messages and observers' events until the commit.
        clock: the run's clock, in seconds.
        timer: a monotonic clock for transfers, in seconds.
        finished: why the run is over; None while it goes on.
    """

    run: Run
    sessions: DeviceSessions
    transfers: Transfers
    rejected: RejectedMessages
    observers: Observers
    batch: EventBatch
    clock: Callable[[], float]
    timer: Callable[[], float]
    finished: str | None = None
    _resumed: RoundAttempt | None = None  # the attempt whose tasks an earlier process may have sent

    def resume(self) -> None:
        """Continue the run where an earlier process stopped. A new run has nothing to continue."""
        controller = self.run.controller
        self._resumed = controller.round_attempt if self.run.resumed else None
        self.carry_out(controller.resume(self.clock()))
        # The earlier process may have finished the run without being able to announce it.
        self.finished = controller.finished

    def report(self, event: Any) -> None:
        """Pass an event to the run controller, and carry out its decisions."""
        self.carry_out(self.run.controller.handle(event, self.clock()))

    def carry_out(self, outcomes: Iterable[Outcome]) -> None:
        """Send the tasks among the outcomes, and pass the other outcomes to the observers."""
        unsent = []
        for outcome in outcomes:
            match outcome:
                case OutgoingTask():
                    try:
                        self._send_task(outcome)
                    except PacketNotFinite as problem:
                        unsent.append(outcome.declined(problem))
                case _:
                    self._note_happening(outcome)
        for declined in unsent:
            log.warning("%s", declined.reason)
            self.report(declined)

    def advance(self, session: DeviceSession, items: Iterable[Item]) -> None:
        """Publish the packets of a link, and handle transfers that arrived, ended or were answered."""
        for event in self.transfers.carry(session, items):
            match event:
                case Arrived():
                    self._receive(session, event)
                case Sent():
                    self._note_sent(session, event)
                case Answered():
                    self._note_answered(session, event)

    def wake(self, devices: Iterable[str]) -> None:
        """Send again what these devices have not answered in time."""
        for session in map(self.sessions.__getitem__, devices):
            self.advance(session, session.link.tick(self.timer()))

    def note_work(self, session: DeviceSession, message: wire.Working | wire.Measured) -> None:
        """Record a device's progress, or the cost that it measured."""
        if isinstance(message, wire.Working):
            session.stage, session.progress = message.stage, min(max(message.progress, 0.0), 1.0)
            self.transfers.refresh(session)
            return
        attempt = RoundAttempt(message.round, message.attempt)
        if self.run.controller.awaited_attempt(session.device) == attempt:
            session.measured = message
        else:  # the round closed without this device, but its cost still informs later plans
            self.run.controller.note_measured(session.device, attempt, message.actual)

    def note_declined(
        self, session: DeviceSession, attempt: RoundAttempt, reason: str, *, diverged: bool = False
    ) -> None:
        """Log and record that a device declines a round, or the run (round 0)."""
        reason, what = wire.readable(reason), f"round {attempt.number}" if attempt.number else "the run"
        self.rejected.say(logging.WARNING, session.device, f"{session.identity} declines {what}: {reason}")
        self.report(Declined(session.device, *attempt, reason, diverged))

    def _note_happening(self, event: Happening) -> None:
        if isinstance(event, RoundClosed):
            self._cancel_old_transfers()
        elif isinstance(event, RunFinished):
            self.finished = event.reason
        self.batch.after_commit(partial(self.observers.tell, event))

    def _send_task(self, task: OutgoingTask) -> None:
        session, attempt = self.sessions[task.device], RoundAttempt.of(task.transfer_key)
        session.reset_measurements()
        self._cancel_tasks(session, lambda key: RoundAttempt.of(key) != attempt)
        payload = bytes_on_disk(task.make(), self.run.folder)
        # The device may hold this task already. Then only its offer is sent, and the device says so.
        perhaps_there = attempt in (session.task_attempt, self._resumed)
        session.task_attempt = attempt
        items = session.link.post(task.transfer_key, payload, self.timer(), perhaps_there=perhaps_there)
        self.advance(session, items)

    def _cancel_old_transfers(self) -> None:
        """Cancel all transfers of earlier rounds, whose replies would be stale."""
        controller = self.run.controller
        for session in self.sessions.busy():
            awaited = controller.awaited_attempt(session.device)
            if awaited is None or awaited == controller.round_attempt:
                session.stage = ""
            self._cancel_tasks(session, lambda key, awaited=awaited: RoundAttempt.of(key) != awaited)  # type: ignore[misc]
            self.advance(session, session.link.refuse_unwanted())

    def _cancel_tasks(self, session: DeviceSession, unwanted: Callable[[TransferKey], bool]) -> None:
        items = session.link.drop(lambda key: key.kind == "task" and unwanted(key), self.timer())
        self.advance(session, items)

    def _receive(self, session: DeviceSession, arrived: Arrived) -> None:
        """Store a reply and pass it to the run controller, then acknowledge or refuse it."""
        refusal, outcomes = self._hand_over(session, arrived)
        session.offered_at = None
        link = session.link
        answer = link.accept(arrived) if refusal is None else link.refuse(arrived, refusal)
        self.transfers.publish(session, answer)
        self.carry_out(outcomes)

    def asks_too_often(self, session: DeviceSession, what: str, attempt: RoundAttempt = NEVER) -> bool:
        """Count a request; True if the device has now made it more than `MAX_REQUESTS` times.

        Such a request gets no answer. The count restarts when the device reconnects, and at each new attempt
        at a round.
        """
        times = session.count_request(what, attempt)
        if times <= MAX_REQUESTS:
            return False
        self.run.controller.count_refused("asked-too-often", device=session.device)
        if times == MAX_REQUESTS + 1:
            line = (
                f"{session.identity} asked {MAX_REQUESTS} times {what}; it gets no answer until it connects"
                " again"
            )
            self.rejected.say(logging.WARNING, session.device, line)
        return True

    def _hand_over(self, session: DeviceSession, arrived: Arrived) -> tuple[str | None, list[Outcome]]:
        """Pass a reply to the run controller; return the reason of a refusal (or None) and the outcomes.

        Only damaged or implausible replies are refused. A reply that does not count, e.g. a late one, is
        acknowledged like any other, so that the device does not offer it again.

        Raises:
            StoreError: the reply cannot be stored.
        """
        controller, device = self.run.controller, session.device
        actual, turn = session.actual(self.timer()), RoundAttempt.of(arrived.offer.transfer_key)
        try:
            outcomes = controller.receive(
                device, turn, arrived.payload(), actual, self.clock(), predicted=session.predicted
            )
        except StoreError:
            raise
        except Exception as fault:  # noqa: BLE001 - whatever it is, one device must not stop the others
            reason = self.rejected.blame(device, fault)  # the run controller stored nothing of it
            return reason, controller.handle(Declined(device, *turn, reason, replied=True), self.clock())
        for outcome in outcomes:
            if isinstance(outcome, ReplyRefused):
                problem = outcome.problem
                line = f"refused: {session.identity}: reply to round {turn.number}: {problem}"
                self.rejected.say(logging.WARNING, device, line)
                return readable(f"{type(problem).__name__}: {problem}"), outcomes
        return None, outcomes

    def _note_sent(self, session: DeviceSession, sent: Sent) -> None:
        key = sent.transfer_key
        if sent.refused is not None:
            log.warning("%s rejects the %s that the coordinator sent", session.identity, key.kind)
            self.note_declined(session, RoundAttempt.of(key), sent.refused)
            return
        session.enrolled = session.enrolled or key.kind == "enrolment"
        if key.kind == "task":
            session.download_s = sent.seconds
        # An enrolment, bundle or backbone that the device held already cost nothing, so it is not counted.
        if key.kind == "task" or sent.sent_bytes:
            self.run.controller.note_delivered(session.device, key, sent.num_bytes)

    def _note_answered(self, session: DeviceSession, answered: Answered) -> None:
        match answered.receipt:
            case Resume():
                session.offered_at = session.offered_at or self.timer()
            case Refuse(_, reason):
                self._note_refused_offer(session, answered.offer.transfer_key, reason)

    def _note_refused_offer(self, session: DeviceSession, key: TransferKey, reason: str) -> None:
        outcomes = self.run.controller.note_refused_offer(session.device, key, reason, self.clock())
        harmless = any(isinstance(one, ReplyDropped) and one.rejection in _HARMLESS for one in outcomes)
        level = logging.INFO if harmless else logging.WARNING
        self.rejected.say(level, session.device, f"{session.identity}: offer refused: {reason}")
        self.carry_out(outcomes)
