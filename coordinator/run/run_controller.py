"""What the round engine wants, done: planning, keeping, aggregating, writing down.

Simulation and real fleet share this; all that is left to them is to carry payloads, tell events and keep
the clock. Each `handle` is one step of the store: a coordinator killed at any point goes on from the last one
that was committed, and devices offer again whatever was not acknowledged. A step writes what it changed.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.events import (
    AbandonRound,
    AcceptUpdate,
    Action,
    Admit,
    CloseFinalEvaluation,
    CloseRound,
    Declined,
    Event,
    FinishRun,
    RejectUpdate,
    SendTask,
    StartRound,
    TakeBack,
    UpdateArrived,
)
from fleetune.coordinator.rounds.orders import Abandoned, Closed, Finished, Order, Reject, Send
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.rounds.semi_asynchronous import engine_type
from fleetune.coordinator.run.aggregation import Aggregating, Arriving
from fleetune.coordinator.run.assignment import Tasks
from fleetune.coordinator.run.reply_checks import Scrutiny, check_claims
from fleetune.coordinator.run.traffic_accounts import Accounts
from fleetune.coordinator.store.device_rows import DeviceRows, read_engine, read_ledger
from fleetune.coordinator.store.method_state import forget_last, read_state, write_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import PacketError, PacketForeign, StoreError
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.skeletons.method import DeviceId, Method
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import TransferKey, readable
from fleetune.protocols.wire.payloads import Enrolment, Reply, run_key

log = logging.getLogger(__name__)


class RunController:
    """A run at work: engine, method and store together.

    Args:
        settings: of the run.
        enrolment: what its devices start from.
        method: made for the enrolment's model.
        store: of the run; a run that it holds already goes on where it stopped.

    Attributes:
        keeps_steps: what each step changed is written down; else all when a round closes, for a run that
            nobody goes on with (a simulation).
    """

    keeps_steps = True

    def __init__(
        self,
        settings: RunSettings,
        enrolment: Enrolment,
        method: Method[Any, Any, Any, Any],
        store: RunStore,
    ) -> None:
        self._settings = settings
        self._enrolment = enrolment
        self._method = method
        self._store = store
        self._engine_type = engine_type(settings.round)
        self._begin()

    def _begin(self) -> None:
        """As before anything happened."""
        self._accounts = Accounts(Ledger())
        self._tasks = Tasks(self._store, self._method.spec, self._settings.round.mode != "synchronous")
        self._arriving: Arriving | None = None
        self._arrived: dict[DeviceId, DeviceRound] = {}
        self._opened_at = 0.0
        # before the plan of the open round: planning again on it after a restart gives the same tasks
        method, round_ = self._method, self._settings.round
        self.state: Any = method.init_coordinator(self._enrolment.weights)
        self._written: Any = None
        self._rows = DeviceRows(self._store)
        self._told: set[DeviceId] = set()  # whose reply is not written down yet
        self._before: Any = None  # the state before the round that closed last; None: it is in the store only
        self._closes = False
        scrutiny = Scrutiny(round_.max_strain, lambda: method.shared_model(self.state))
        self._aggregating = Aggregating(method, scrutiny, round_.staleness_power, self._reply_of, self.state)
        self.engine = self._engine_type(self._settings.run, round_)
        self.engine.judge = self._aggregating.judge

    @property
    def ledger(self) -> Ledger:
        """Counts over the whole run."""
        return self._accounts.ledger

    def recall(self) -> bool:
        """Take over what the store holds, without going on; False for a new run. Raises StoreError."""
        self._accounts = Accounts(read_ledger(self._store))
        state = read_engine(self._store)
        if state is None:
            return False
        self.state = read_state(self._store, self._method.state_type, self._method.spec)
        self._aggregating.planned = self._written = self.state
        self._arrived = {} if state.stage == "finished" else self._store.device_rounds(state.turn.number)
        self._opened_at = msgspec.json.decode(self._need("opened"), type=float)
        self.engine = self._engine_type(self._settings.run, self._settings.round, state)
        self.engine.judge = self._aggregating.judge
        return True

    def reopen(self) -> None:
        """Take a run up again that had come to its final evaluation or its end; to be resumed then."""
        with self._store.step():
            self._store.drop_record(self.engine.state.turn.number)
            self._store.drop_tasks()
            self._forget_round()
            self.engine.reopen()
            self.ledger.ended_at = None
            self._write_down()

    def resume(self, now: float) -> list[Order]:
        """Go on with what the store holds; nothing to do for a new run."""
        if not self.recall():
            return []
        run, round_ = self._settings.run, self._settings.round
        self.engine, actions = self._engine_type.resume(run, round_, self.engine.state, now)
        self.engine.judge = self._aggregating.judge
        return self._carry_out(lambda: actions, now)

    def handle(self, event: Event, now: float) -> list[Order]:
        """Tell the engine what happened; what is left to do outside."""
        if self.ledger.began_at is None:
            self.ledger.began_at = now
        return self._carry_out(lambda: self.engine.handle(event, now), now)

    def receive(
        self,
        device: DeviceId,
        data: bytes,
        actual: RoundCost,
        now: float,
        *,
        turn: Turn | None = None,
        predicted: RoundCost = RoundCost(),  # noqa: B008 - frozen
    ) -> list[Order]:
        """Take a device's reply in: check it, keep it, tell the engine.

        Args:
            device: that it came from.
            data: the encoded `Reply`.
            actual: what the round took of the device.
            now: on the run's clock.
            turn: what it was offered as; None: whatever it says.
            predicted: what the device expected the round to take.

        Raises:
            PacketError: it is damaged or not what it was offered as; nothing was kept.
        """
        kind = Reply[self._method.update_type]  # type: ignore[name-defined]
        limit = codec.payload_limit(self._method.spec)
        reply: Reply[Any] = codec.decode(data, kind, self._method.spec, limit=limit)
        if reply.device != device:
            raise PacketForeign(f"reply of {reply.device!r} came from {device}")
        said = Turn(reply.round, reply.attempt)
        if turn is not None and said != turn:
            raise PacketForeign(
                f"reply to round {said.number}.{said.attempt} offered as one to {turn[0]}.{turn[1]}"
            )
        if not self.engine.state.objection(device, said) and (reply.update is None) != self._evaluating:
            raise PacketForeign(
                f"reply {'without' if reply.update is None else 'with'} an update to round {said.number}"
            )
        check_claims(reply, self.engine.state.report(device))
        if reply.update is not None and not self.engine.state.objection(device, said):
            self._aggregating.scrutiny.check(reply.update, lambda: self._others(device))
        staleness = self.engine.state.turn.number - reply.round
        self._arriving = Arriving(reply, data, actual, predicted, staleness)
        return self.handle(UpdateArrived(device, reply.round, reply.attempt, reply.leaving), now)

    def refuse(self, kind: str) -> None:
        """Count something that a peer sent and that was refused."""
        self.ledger.refuse(kind)

    def turn_away(self, device: DeviceId, turn: Turn, problem: PacketError, now: float) -> list[Order]:
        """A reply that `receive` refused is as if its device had declined; counted by kind and device."""
        self.ledger.turn_away(device, type(problem).__name__)
        return self.handle(Declined(device, *turn, readable(f"{type(problem).__name__}: {problem}")), now)

    def note_measured(self, device: DeviceId, turn: Turn, actual: RoundCost) -> None:
        """What a device can tell only when its reply has arrived: how long that took, and its joules."""
        if device in self._arrived and turn == self.engine.state.turn:
            self._arrived[device] = self._arrived[device].told_late(actual)
            self._told.add(device)
            return
        reply = self._store.device_round(device, *turn)
        if reply is not None:
            with self._store.step():
                self._store.put_device_rounds(*turn, {device: reply.told_late(actual)})

    def records(self) -> list[RoundRecord]:
        """Of all closed rounds, ascending."""
        return self._store.records()

    @property
    def _evaluating(self) -> bool:
        return self.engine.state.stage == "rehearsing"

    def _carry_out(self, decide: Callable[[], list[Action]], now: float) -> list[Order]:
        try:
            with self._store.step():
                orders = [order for action in decide() for order in self._do(action, now)]
                if self.keeps_steps or any(isinstance(order, Closed | Finished) for order in orders):
                    self._write_down()
        except StoreError:
            raise  # the run ends here, and goes on from the last step
        except Exception:
            if self.keeps_steps:
                self._go_back()
            raise
        return orders

    def _go_back(self) -> None:
        """To what the store holds, as after a restart: a step that failed has changed nothing."""
        refusals = self.ledger.refusals
        self._begin()
        self.recall()
        self.ledger.refusals = refusals
        if self.engine.state.running:
            self._start(self.engine.reopening(), self._opened_at)

    def _do(self, action: Action, now: float) -> Iterator[Order]:
        match action:
            case Admit(report):
                self.state = self._method.admit(self.state, report)
            case StartRound():
                self._start(action, now)
            case SendTask(device, number, attempt):
                yield from self._send(device, number, attempt)
            case AcceptUpdate(device):
                self._accept(device)
            case RejectUpdate(device, _, _, reason):
                self._arriving = None
                self.ledger.refuse(reason)
                yield Reject(device, reason)
            case CloseRound() | CloseFinalEvaluation():
                yield self._close(action, now)
            case TakeBack(number, attempt):
                self._take_back(Turn(number, attempt))
            case AbandonRound(number, attempt, reason):
                absent = sorted(self._tasks.planned.keys() - self._arrived.keys())
                yield Abandoned(number, attempt, reason, tuple(absent))
                self.ledger.refuse(f"abandoned-{reason}")
                self._store.drop_device_rounds(number)
                self._forget_round()
            case FinishRun(reason):
                self.ledger.ended_at = now
                self._closes = False
                self._store.drop_tasks()
                forget_last(self._store)
                yield Finished(reason)

    def _start(self, action: StartRound, now: float) -> None:
        number = action.round.number
        key = run_key(self._settings.run.seed).child("plan", number, action.attempt)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found before it is sent
            self._aggregating.planned, self._tasks.planned = self._method.plan(self.state, action.round, key)
        self._aggregating.scrutiny.open()
        if not action.resumed:
            self._opened_at = now
        if action.round.final_evaluation:
            self._store.drop_tasks()

    def _send(self, device: DeviceId, number: int, attempt: int) -> Iterator[Send]:
        transfer_key = TransferKey("task", self._enrolment.run, number, attempt, self._evaluating)
        # else a newer one follows
        if not self._tasks.keeps(transfer_key) or self.engine.state.members[device].asked == (
            number,
            attempt,
        ):
            yield Send(device, transfer_key, self._tasks.ready(device, transfer_key))

    def note_delivered(self, device: DeviceId, transfer_key: TransferKey, num_bytes: int) -> None:
        """Count a payload that reached its device, once and for good. Raises StoreError."""
        self._accounts.delivered(device, transfer_key, num_bytes)
        if self.keeps_steps:
            with self._store.step():
                self._rows.write_traffic(self.ledger, self._accounts.take_touched())

    def _accept(self, device: DeviceId) -> None:
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        reply, data = arriving.reply, arriving.data
        if device not in self._accounts.sent_bytes:
            self._count_task_of(device, reply)
        final_evaluation = reply.update is None
        self._accounts.replied(device, len(data), final_evaluation=final_evaluation)
        if not final_evaluation:
            self._store.add_reply(device, data)
        report = self.engine.state.report(device)
        self._arrived[device] = DeviceRound(
            ratio=report.ratio if report else 1.0,
            bytes_down=self._accounts.sent_bytes.pop(device),
            bytes_up=len(data),
            measures=reply.measures,
            actual=arriving.actual,
            staleness=arriving.staleness,
            predicted=arriving.predicted,
        )
        self._told.add(device)
        self._tasks.answered(device)

    def _count_task_of(self, device: DeviceId, reply: Reply[Any]) -> None:
        """Whoever replies has had its task, even if a restart lost the word of that."""
        transfer_key = TransferKey(
            "task", self._enrolment.run, reply.round, reply.attempt, reply.update is None
        )
        self._accounts.delivered(device, transfer_key, len(self._tasks.payload(device, transfer_key)))

    def _take_back(self, closed: Turn) -> None:
        """The last closed round never was: its tasks may be answered again under later attempts."""
        log.warning("round %d is taken back: the training of all devices diverged after it", closed.number)
        before = self._before or read_state(
            self._store, self._method.state_type, self._method.spec, before_last=True
        )
        self.state, self._before = before, None
        self._accounts.take_back(closed)
        self._store.drop_tasks()
        self._store.drop_record(closed.number)

    def _others(self, device: DeviceId) -> Iterator[Any]:
        """The updates that the open round has from other devices."""
        state = self.engine.state
        others = tuple(one for one in state.replied if one != device)
        return (update for _, update in self._aggregating.updates(state.turn.number, others))

    def _reply_of(self, device: DeviceId) -> bytes:
        """A reply of the open round, the one that is just arriving too."""
        arriving = self._arriving
        if arriving is not None and arriving.reply.device == device:
            return arriving.data
        return self._store.reply(device)

    def _close(self, action: CloseRound | CloseFinalEvaluation, now: float) -> Closed:
        final_evaluation = isinstance(action, CloseFinalEvaluation)
        if not final_evaluation:
            self._before, self.state, self._closes = self.state, self._aggregating.merged, True
        began = self.ledger.began_at or 0.0
        record = RoundRecord(
            number=action.number,
            attempt=action.attempt,
            final_evaluation=final_evaluation,
            opened_s=self._opened_at - began,
            closed_s=now - began,
            participants=tuple(self._tasks.planned),
            devices={device: self._arrived[device] for device in action.devices},
        )
        if self._arrived.keys() != record.devices.keys():  # some were turned away late
            self._store.drop_device_rounds(action.number)
            self._arrived, self._told = record.devices, set(action.devices)
        self._write_told(action.number, action.attempt)
        self._store.add_record(record)
        self._forget_round()
        return Closed(record)

    def _forget_round(self) -> None:
        self._arrived = {}
        self._told = set()
        self._accounts.sent_bytes.clear()
        self._store.drop_replies()

    def _write_down(self) -> None:
        self._rows.write(self.engine.state, self.ledger, self._accounts.take_touched())
        self._write_told(*self.engine.state.turn)
        self._store.put("opened", msgspec.json.encode(self._opened_at))
        if self.state is not self._written:
            write_state(self._store, self.state, self._method.spec, keep_last=self._closes)
            self._written, self._closes = self.state, False

    def _write_told(self, number: int, attempt: int) -> None:
        """Replies of this round that are new, or of which more is known."""
        told = {device: self._arrived[device] for device in sorted(self._told)}
        self._store.put_device_rounds(number, attempt, told)
        self._told = set()

    def _need(self, name: str) -> bytes:
        data = self._store.get(name)
        assert data is not None, f"{name} is written in the same transaction as the engine's state"
        return data
