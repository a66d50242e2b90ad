"""Executes the actions of the round engine (`coordinator.rounds.actions`), one method for each.

The caller sends the tasks. The results of the other actions are run events.
"""

import logging
from collections.abc import Iterator

from fleetune.coordinator.extensions.extension import ClosedRound
from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Action,
    Admit,
    Aggregate,
    CloseFinalEvaluation,
    CloseRound,
    DropReply,
    FinishRun,
    KeepReply,
    RollBack,
    SendTask,
    StartRound,
)
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Aggregated, NotAggregated
from fleetune.coordinator.rounds.policies.selection import short_start
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.replies import ArrivingReply, row_of
from fleetune.coordinator.run.reply_intake import ReplyIntake
from fleetune.coordinator.run.run_events import (
    Happening,
    Notice,
    ReplyDropped,
    RoundAbandoned,
    RoundClosed,
    RunFinished,
)
from fleetune.coordinator.run.run_parts import RunParts
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.pages_on_disk import release
from fleetune.protocols.update.encodings import in_words
from fleetune.protocols.update.paper_bytes import paper_bytes
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import run_key

log = logging.getLogger(__name__)

Outcome = OutgoingTask | Happening


class RoundExecution:
    """Executes the engine's actions with the parts of a run. Call it inside `store.step()`.

    Args:
        run: parts of the run.
        intake: intake of its replies.
    """

    def __init__(self, run: RunParts, intake: ReplyIntake) -> None:
        self._run, self._intake = run, intake
        uplinks = run.settings.uplinks if len(run.settings.uplinks) > 1 else ()
        self._encodings = tuple(map(in_words, uplinks))

    def aggregate(self, action: Aggregate) -> Aggregated | NotAggregated:
        """Aggregate the round's updates; return the event for the engine."""
        run = self._run
        if run.tasks.downlink is not None:  # aggregation takes most memory, and all tasks were made
            run.tasks.downlink.forget_written()
        release(run.enrolment.weights)
        return run.aggregation.aggregate(action.number, action.devices)

    def do(self, action: Action, now: float, arriving: ArrivingReply | None) -> Iterator[Outcome]:
        """Execute one action other than `Aggregate`. Yields the tasks to send and the resulting run events.

        Args:
            action: action of the engine.
            now: present time on the run's clock.
            arriving: the reply that the action may concern.
        """
        run = self._run
        match action:
            case Admit(report):
                run.method.admit(report)
            case StartRound():
                self.start(action, now)
                yield from self._short_start(action)
            case SendTask():
                yield from self._send(action)
            case KeepReply(device):
                assert arriving is not None, "only a reply that arrives is kept"
                self._keep(device, arriving)
            case DropReply():
                yield self._drop(action)
            case CloseRound() | CloseFinalEvaluation():
                yield from self._close(action, now)
            case RollBack(number, attempt):
                self._roll_back(RoundAttempt(number, attempt))
            case AbandonRound():
                yield self._abandon(action)
            case FinishRun():
                yield self._finish(action, now)

    def start(self, action: StartRound, now: float) -> None:
        """Plan a round, or plan it again."""
        run = self._run
        key = run_key(run.settings.run.seed).child("plan", action.round.number, action.attempt)
        run.tasks.planned = run.method.plan(action.round, key)
        if not action.resumed:
            run.open_round.opened_at = now
        if action.round.final_evaluation:
            run.store.drop_tasks()

    def _short_start(self, action: StartRound) -> Iterator[Notice]:
        line = None if action.resumed else short_start(self._run.state, self._run.settings.round)
        if line is not None:
            yield Notice(line)

    def forget_round(self, number: int) -> None:
        """Drop the open round and its stored data."""
        self._run.store.drop_record(number)
        self._run.store.drop_tasks()
        self._drop_replies()

    def note_refused(self, device: DeviceId, round_attempt: RoundAttempt) -> None:
        """Record that an awaited reply was refused, although its device has done the task."""
        state = self._run.state
        if state.awaited_attempt(device) == round_attempt:
            self._run.tasks.perhaps_taken(device, round_attempt, state.round_attempt)

    def _send(self, task: SendTask) -> Iterator[OutgoingTask]:
        run, round_attempt = self._run, RoundAttempt(task.round, task.attempt)
        key = TransferKey("task", run.enrolment.run, *round_attempt, run.state.stage == "evaluating")
        # A task that is kept is sent only if no newer one follows.
        if not run.tasks.keeps(key) or run.state.members[task.device].asked == round_attempt:
            yield OutgoingTask(task.device, key, run.tasks.ready(task.device, key))

    def _keep(self, device: DeviceId, arriving: ArrivingReply) -> None:
        run, reply = self._run, arriving.reply
        self._intake.count_task_of(reply)
        update_bytes = None if reply.update is None else paper_bytes(reply.update)
        run.accounts.replied(device, len(arriving.data), update_bytes)
        bytes_down = run.accounts.sent_bytes.pop(device)
        row = row_of(arriving, run.state.member(device), bytes_down, self._encodings)
        run.open_round.put(device, run.extensions.record(reply, row))
        run.tasks.answered(device)
        arriving.forget_values()

    def _drop(self, dropped: DropReply) -> ReplyDropped:
        self._run.accounts.ledger.refuse(dropped.rejection)
        return ReplyDropped(dropped.device, dropped.round, dropped.attempt, dropped.rejection)

    def _close(self, action: CloseRound | CloseFinalEvaluation, now: float) -> Iterator[Happening]:
        run, round_attempt = self._run, RoundAttempt(action.number, action.attempt)
        if isinstance(action, CloseRound):
            self._note_unanswered(round_attempt)
            run.method.take_over(run.aggregation.merged)
        closed = ClosedRound(self._record(action, now), now, run.accounts.ledger, run.method.state)
        lines = run.extensions.after_round(closed)
        for device in sorted(closed.amended):
            run.open_round.put(device, closed.record.devices[device])
        run.open_round.write(round_attempt)
        run.store.add_record(closed.record)
        self._drop_replies()
        yield RoundClosed(closed.record)
        yield from map(Notice, lines)

    def _record(self, action: CloseRound | CloseFinalEvaluation, now: float) -> RoundRecord:
        began = self._run.accounts.ledger.began_at or 0.0
        return RoundRecord(
            number=action.number,
            attempt=action.attempt,
            final_evaluation=isinstance(action, CloseFinalEvaluation),
            opened_s=self._run.open_round.opened_at - began,
            closed_s=now - began,
            participants=tuple(self._run.tasks.planned),
            devices=self._run.open_round.keep_only(action.devices, action.number),
        )

    def _abandon(self, action: AbandonRound) -> RoundAbandoned:
        run = self._run
        absent = sorted(run.tasks.planned.keys() - run.open_round.rows.keys())
        run.accounts.ledger.refuse(f"abandoned-{action.reason}")
        run.store.drop_device_rounds(action.number)
        self._note_unanswered(RoundAttempt(action.number, action.attempt))
        self._drop_replies()
        return RoundAbandoned(action.number, action.attempt, action.reason, tuple(absent))

    def _roll_back(self, closed: RoundAttempt) -> None:
        """Undo the last closed round: its tasks may be answered again under later attempts."""
        log.warning("round %d is rolled back: the training of all devices diverged after it", closed.number)
        run = self._run
        run.method.roll_back()
        run.accounts.roll_back(closed)
        run.extensions.after_rollback(closed.number)
        run.store.drop_tasks()
        run.store.drop_record(closed.number)

    def _finish(self, action: FinishRun, now: float) -> RunFinished:
        self._run.accounts.ledger.ended_at = now
        self._run.store.drop_tasks()
        self._run.method.forget_last()
        return RunFinished(action.reason)

    def _note_unanswered(self, round_attempt: RoundAttempt) -> None:
        """Record devices that received this attempt's task and did not answer; in buffered runs they still
        may.
        """
        run = self._run
        if run.tasks.outlive:
            return
        for device in run.accounts.sent_bytes.keys() & run.tasks.planned.keys():
            member = run.state.members[device]
            if member.answer != "declined" or member.declined_round != round_attempt.number:
                run.tasks.perhaps_taken(device, round_attempt, round_attempt)

    def _drop_replies(self) -> None:
        self._run.accounts.sent_bytes.clear()
        self._run.open_round.drop()
