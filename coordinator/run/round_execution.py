"""What the round engine wants, done: planning, sending, keeping, aggregating, writing down.

Each engine action (`coordinator.rounds.actions`) has its method here, and `do` finds it. What is left to do
outside are the tasks to send; what became of the rest are run events.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Action,
    Admit,
    CloseFinalEvaluation,
    CloseRound,
    DropReply,
    FinishRun,
    KeepReply,
    SendTask,
    StartRound,
    TakeBack,
)
from fleetune.coordinator.rounds.engine import START_S, RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState, Turn
from fleetune.coordinator.rounds.policies.selection import usual_start
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.rounds.rollout import Rollout
from fleetune.coordinator.run.aggregation import Aggregating
from fleetune.coordinator.run.downsampling import Downsampling
from fleetune.coordinator.run.method_diagnostics import MethodDiagnostics
from fleetune.coordinator.run.partial_updates import Normalising
from fleetune.coordinator.run.replies import ArrivingReply, Recorder
from fleetune.coordinator.run.reply_checks import Scrutiny, check_claims, check_scores
from fleetune.coordinator.run.run_events import (
    Happening,
    Notice,
    ReplyDropped,
    RoundAbandoned,
    RoundClosed,
    RunFinished,
)
from fleetune.coordinator.run.traffic_accounts import Accounts
from fleetune.coordinator.store.device_rows import DeviceRows, read_ledger
from fleetune.coordinator.store.method_state import forget_last, read_state, write_state
from fleetune.coordinator.store.open_replies import OpenReplies
from fleetune.coordinator.store.release_store import ReleaseStore
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.assignment import OutgoingTask, Tasks
from fleetune.coordinator.tasks.downlink import Delivered, Downlink, add_unsent
from fleetune.coordinator.tasks.held_models import HeldModels
from fleetune.protocols.method import steps
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings import RAW, in_words
from fleetune.protocols.update.paper_bytes import paper_bytes
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment, Reply, run_key

log = logging.getLogger(__name__)

Outcome = OutgoingTask | Happening


class RoundExecution:
    """The method, the open round's replies and the store of a run at work.

    Args:
        settings: of the run.
        enrolment: what its devices start from.
        method: made for the enrolment's model.
        store: of the run; all but `recall` writes to it, inside `store.step()`.

    Attributes:
        method_state: the method's, as it was before the plan of the open round: planning again on it after a
            restart gives the same tasks.
        accounts: what crossed the wire.
        tasks: of the open round.
        replies: to them.
        opened_at: when the open round opened, on the run's clock.
    """

    def __init__(
        self,
        settings: RunSettings,
        enrolment: Enrolment,
        method: Method[Any, Any, Any, Any],
        store: RunStore,
    ) -> None:
        self._settings = settings
        self._encodes = any(one.name != RAW for one in enrolment.uplinks)
        self._run_id = enrolment.run
        self._method = method
        self._store = store
        self.accounts = Accounts(Ledger())
        self.opened_at = 0.0
        self.method_state: Any = steps.init_coordinator(method, enrolment.weights)
        self._state = EngineState()
        self.tasks = Tasks(store, method.spec, method.task_type, settings.round.mode != "synchronous")
        self.tasks.proposed = lambda device: self._state.members[device].dealt
        self.tasks.span_s = lambda: self._state.span_s
        if enrolment.downlink.name != RAW:
            held, key = HeldModels(store, method.spec, enrolment.weights), run_key(settings.run.seed)
            downlink = Downlink(enrolment.downlink, method.spec, method.task_type, key, held)
            downlink.mask_time = lambda device: enrolment.mask_time(
                self._state.members[device].report, "down"
            )
            self.tasks.downlink = downlink
        self._arrived: dict[DeviceId, DeviceRound] = {}
        self._written: Any = None
        self._rows = DeviceRows(store)
        self._told: set[DeviceId] = set()  # whose reply is not written down yet
        self._before: Any = None  # the state before the round that closed last; None: it is in the store only
        self._closes = False
        self._learns = enrolment.learns
        self._diagnostics = MethodDiagnostics(method)
        uplinks = settings.uplinks if len(settings.uplinks) > 1 else ()
        self._recorder = Recorder(self._diagnostics, tuple(map(in_words, uplinks)))
        key = run_key(settings.run.seed).child("canary")
        self._releases = ReleaseStore(store, settings.adoption, key) if settings.adoption.canary else None
        if self._releases is not None:
            self.tasks.release = self._releases.release
        self._downsampling = Downsampling(store, store.path.parent) if settings.run.is_open else None
        self._scrutiny = Scrutiny(settings.round.max_strain, lambda: method.shared_model(self.method_state))
        self.replies = replies = OpenReplies(store, method)
        power = settings.round.staleness_power
        self._aggregating = Aggregating(method, self._scrutiny, power, replies.read, self.method_state)
        if settings.round.max_share is not None:
            self._aggregating.max_share = settings.round.max_share
        self._seen_cut: set[DeviceId] = set()  # devices whose cut weight the log has named
        if settings.objective.normalise and method.starts_from_task:
            self._aggregating.normalising = Normalising(lambda: self._state, self.tasks, method.spec)

    def follow(self, engine: RoundEngine) -> None:
        """Do what this engine wants from now on, and judge its rounds."""
        self._state = engine.state
        engine.judge = self._aggregating.judge

    @property
    def rollout(self) -> Rollout | None:
        """How the versions of the shared model stand; None: the run has no roll-out groups."""
        return None if self._releases is None else self._releases.rollout

    def recall(self, state: EngineState | None) -> None:
        """Take over what the store holds; `state`: of the engine, None: of a new run. Raises StoreError."""
        self.accounts = Accounts(read_ledger(self._store))
        if state is None:
            return
        self.method_state = self._read_state()
        self._aggregating.planned = self._written = self.method_state
        if self._releases is not None:
            self._releases.recall()
        if self.tasks.downlink is not None:
            self.tasks.downlink.held.recall()
        self._arrived = {} if state.stage == "finished" else self._store.device_rounds(state.turn.number)
        opened = self._store.get("opened")
        assert opened is not None, "it is written in the same transaction as the engine's state"
        self.opened_at = msgspec.json.decode(opened, type=float)

    def check(self, reply: Reply[Any], *, counts: bool) -> None:
        """Whether a reply is what its round asked for, and plausible.

        Args:
            reply: that arrives.
            counts: nothing speaks against counting it; else it is only looked at for what it claims.

        Raises:
            PacketError: it is not.
        """
        check_claims(reply, self._state.member(reply.device).report)
        check_scores(reply.measures, self._learns)
        if counts and reply.update is not None:
            self._scrutiny.check(reply.update, lambda: self._others(reply.device))

    def note_held(self, device: DeviceId, digest: str | None) -> None:
        """What a device says that it holds, see `DeviceReady`. Inside `store.step()`."""
        self.tasks.note_held(device, digest, self._state.awaited_turn(device), self._state.turn)

    def delivered(self, device: DeviceId, turn: Turn) -> Delivered | None:
        """What a device had of its task; None: it is not known any more, or nobody asks for it."""
        compared = self._settings.round.prefer == "pyramid"
        if not self._encodes and self.tasks.downlink is None and not compared:
            return None
        return self.tasks.delivered(device, turn, self._state.turn)

    def base(self, delivered: Delivered | None) -> Base | None:
        """What an update was written with, nothing where that is not known any more; None: values are written
        as they are.
        """
        if not self._encodes:
            return None
        return Base.nothing(self._method.spec) if delivered is None else delivered.base

    def keep(self, arriving: ArrivingReply) -> None:
        """Store a reply that counts, so that the engine may close the round with it; so that it can be read
        without its base.
        """
        reply, delivered, spec = arriving.reply, arriving.delivered, self._method.spec
        if reply.update is None:
            return
        self._aggregating.note(reply)
        if delivered is None:
            self.replies.add(reply, arriving.data)
            return
        if delivered.unsent is not None and self._method.starts_from_task:
            add_unsent(reply.update, delivered.unsent, spec)
        self.replies.add(reply)
        self._count_task_of(reply)  # as it was sent: over what the device holds from now on it is less
        self.tasks.taken(reply.device, delivered)

    def _note_unanswered(self, turn: Turn) -> None:
        """Note devices that had their task of this turn and gave no answer; buffered, it may still come."""
        if self.tasks.outlive:
            return
        for device in self.accounts.sent_bytes.keys() & self.tasks.planned.keys():
            member = self._state.members[device]
            if member.answer != "declined" or member.declined_round != turn.number:
                self.tasks.perhaps_taken(device, turn, turn)

    def note_refused(self, device: DeviceId, turn: Turn) -> None:
        """A reply that was awaited is refused: its device has done the task. Inside `store.step()`."""
        if self._state.awaited_turn(device) == turn:
            self.tasks.perhaps_taken(device, turn, self._state.turn)

    def do(self, action: Action, now: float, arriving: ArrivingReply | None) -> Iterator[Outcome]:
        """Do one action at `now`; what is left to do outside, and what became of it.

        Args:
            action: of the engine.
            now: on the run's clock.
            arriving: the reply that the action may be about.
        """
        match action:
            case Admit(report):
                self.method_state = steps.admit(self._method, self.method_state, report)
            case StartRound():
                self.start(action, now)
                yield from self._opens_short(action)
            case SendTask():
                yield from self._send(action)
            case KeepReply(device):
                assert arriving is not None, "only a reply that arrives is kept"
                self._keep(device, arriving)
            case DropReply(device, number, attempt, objection):
                self.accounts.ledger.refuse(objection)
                yield ReplyDropped(device, number, attempt, objection)
            case CloseRound() | CloseFinalEvaluation():
                closed = self._close(action, now)
                yield closed
                yield from self._release_after(closed.record, now)
            case TakeBack(number, attempt):
                self._take_back(Turn(number, attempt))
            case AbandonRound():
                yield self._abandon(action)
            case FinishRun(reason):
                self.accounts.ledger.ended_at = now
                self._closes = False
                self._store.drop_tasks()
                forget_last(self._store)
                yield RunFinished(reason)

    def start(self, action: StartRound, now: float) -> None:
        """Plan a round, or plan it again."""
        number = action.round.number
        key = run_key(self._settings.run.seed).child("plan", number, action.attempt)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found before it is sent
            planned = steps.plan(self._method, self.method_state, action.round, key)
        self._aggregating.planned, self.tasks.planned = planned
        self._scrutiny.open()
        if not action.resumed:
            self.opened_at = now
        if action.round.final_evaluation:
            self._store.drop_tasks()

    def _opens_short(self, action: StartRound) -> Iterator[Notice]:
        """A line when round 1 opens with fewer devices than it waited for."""
        there, round_ = len(action.round.participants), self._settings.round
        first = (action.round.number, action.attempt) == (1, 1) and not action.resumed
        if first and self._state.start_is_overdue and there < usual_start(round_):
            yield Notice(
                f"round 1 opens with {there} of {usual_start(round_)} devices: {START_S:g} s have passed"
                " since the first one came; round.start_with in run.toml says how many to wait for"
            )

    def note_delivered(self, device: DeviceId, transfer_key: TransferKey, num_bytes: int) -> None:
        """Count a payload that reached its device."""
        as_in_papers = partial(self.tasks.paper_bytes, device, Turn.of(transfer_key))
        self.accounts.delivered(device, transfer_key, num_bytes, as_in_papers)

    def note_measured(self, device: DeviceId, turn: Turn, actual: RoundCost) -> None:
        """What a device can tell only when its reply has arrived."""
        if device in self._arrived and turn == self._state.turn:
            self._arrived[device] = self._arrived[device].told_late(actual)
            self._told.add(device)
            return
        reply = self._store.device_round(device, *turn)
        if reply is not None:
            with self._store.step():
                self._store.put_device_rounds(*turn, {device: reply.told_late(actual)})

    def forget_round(self, number: int) -> None:
        """The open round, or what was written of it, is not to be."""
        self._store.drop_record(number)
        self._store.drop_tasks()
        self._forget_replies()

    def write_down(self) -> None:
        """Write what changed: engine, ledger, replies, the method's state."""
        self._rows.write(self._state, self.accounts.ledger, self.accounts.take_touched())
        self._write_told(*self._state.turn)
        self._store.put("opened", msgspec.json.encode(self.opened_at))
        if self.method_state is not self._written:
            write_state(self._store, self.method_state, self._method.spec, keep_last=self._closes)
            self._written, self._closes = self.method_state, False

    def write_traffic(self) -> None:
        """Write what changed in what crossed the wire."""
        self._rows.write_traffic(self.accounts.ledger, self.accounts.take_touched())

    def _send(self, task: SendTask) -> Iterator[OutgoingTask]:
        turn = Turn(task.round, task.attempt)
        evaluating = self._state.stage == "rehearsing"
        transfer_key = TransferKey("task", self._run_id, *turn, evaluating)
        # else a newer one follows
        if not self.tasks.keeps(transfer_key) or self._state.members[task.device].asked == turn:
            yield OutgoingTask(task.device, transfer_key, self.tasks.ready(task.device, transfer_key))

    def _keep(self, device: DeviceId, arriving: ArrivingReply) -> None:
        reply, data = arriving.reply, arriving.data
        self._count_task_of(reply)
        self.accounts.replied(device, len(data), None if reply.update is None else paper_bytes(reply.update))
        member = self._state.member(device)
        self._arrived[device] = self._recorder.record(arriving, member, self.accounts.sent_bytes.pop(device))
        self._told.add(device)
        self.tasks.answered(device)

    def _count_task_of(self, reply: Reply[Any]) -> None:
        """Whoever replies has had its task, even if a restart lost the word of that."""
        if reply.device not in self.accounts.sent_bytes:
            transfer_key = TransferKey("task", self._run_id, reply.round, reply.attempt, reply.update is None)
            num_bytes = len(self.tasks.payload(reply.device, transfer_key))
            self.note_delivered(reply.device, transfer_key, num_bytes)

    def _others(self, device: DeviceId) -> Iterator[Any]:
        """The updates that the open round has from other devices."""
        others = tuple(one for one in self._state.replied if one != device)
        return (update for _, update in self._aggregating.updates(self._state.turn.number, others))

    def _close(self, action: CloseRound | CloseFinalEvaluation, now: float) -> RoundClosed:
        final_evaluation = isinstance(action, CloseFinalEvaluation)
        if not final_evaluation:
            self._note_unanswered(Turn(action.number, action.attempt))
            self._before, self._closes = self.method_state, True
            self.method_state = self._aggregating.merged
            self._count_cuts(action.number)
        began = self.accounts.ledger.began_at or 0.0
        record = RoundRecord(
            number=action.number,
            attempt=action.attempt,
            final_evaluation=final_evaluation,
            opened_s=self.opened_at - began,
            closed_s=now - began,
            participants=tuple(self.tasks.planned),
            devices={device: self._arrived[device] for device in action.devices},
            diagnostics={} if final_evaluation else self._diagnostics.of_round(self.method_state),
        )
        if self._arrived.keys() != record.devices.keys():  # some did not aggregate, and were left out
            self._store.drop_device_rounds(action.number)
            self._arrived, self._told = record.devices, set(action.devices)
        self._write_told(action.number, action.attempt)
        self._store.add_record(record)
        if self._downsampling is not None:
            self._downsampling.closed(record, self.accounts.ledger)
        self._forget_replies()
        return RoundClosed(record)

    def _count_cuts(self, number: int) -> None:
        """Count updates of round `number` that `round.max_share` cut, and log each device's first."""
        samples = self._aggregating.samples
        for device, counted in self._aggregating.cut.items():
            self._arrived[device] = structs.replace(self._arrived[device], counted_samples=counted)
            self._told.add(device)
            self.accounts.ledger.refuse("share-cut", device=device)
            if device not in self._seen_cut:
                self._seen_cut.add(device)
                log.warning(
                    "round %d: %s claims %d samples, which is more than round.max_share allows;"
                    " its update counts as %d",
                    *(number, device, samples[device], counted),
                )

    def _release_after(self, record: RoundRecord, now: float) -> list[Notice]:
        """What became of the roll-out, for people."""
        if self._releases is None or record.final_evaluation:
            return []
        members = self._state.members.items()
        there = [device for device, member in members if member.refusal is None and member.report is not None]
        shared = self._method.shared_model(self.method_state)[: self._method.spec.num_parameters]
        line = self._releases.closed(record.number, now, record.devices, there, shared)
        return [Notice(line)] if line else []

    def _abandon(self, action: AbandonRound) -> RoundAbandoned:
        absent = sorted(self.tasks.planned.keys() - self._arrived.keys())
        self.accounts.ledger.refuse(f"abandoned-{action.reason}")
        self._store.drop_device_rounds(action.number)
        self._note_unanswered(Turn(action.number, action.attempt))
        self._forget_replies()
        return RoundAbandoned(action.number, action.attempt, action.reason, tuple(absent))

    def _take_back(self, closed: Turn) -> None:
        """The last closed round never was: its tasks may be answered again under later attempts."""
        log.warning("round %d is taken back: the training of all devices diverged after it", closed.number)
        self.method_state, self._before = self._before or self._read_state(before_last=True), None
        self.accounts.take_back(closed)
        if self._releases is not None:
            self._releases.take_back(closed.number)
        self._store.drop_tasks()
        self._store.drop_record(closed.number)

    def _read_state(self, *, before_last: bool = False) -> Any:
        """See `read_state`."""
        kind, spec = self._method.state_type, self._method.spec
        return steps.frozen(read_state(self._store, kind, spec, before_last=before_last))

    def _forget_replies(self) -> None:
        self._arrived = {}
        self._told = set()
        self.accounts.sent_bytes.clear()
        self._aggregating.samples.clear()
        self.replies.drop()

    def _write_told(self, number: int, attempt: int) -> None:
        """Replies of this round that are new, or of which more is known."""
        told = {device: self._arrived[device] for device in sorted(self._told)}
        self._store.put_device_rounds(number, attempt, told)
        self._told = set()
