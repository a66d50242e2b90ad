"""What the round engine wants, done: planning, keeping, aggregating, writing down.

Simulation and real fleet share this; all that is left to them is to carry payloads, tell events and keep
the clock. Each `handle` is one step of the store: a coordinator killed at any point goes on from the last one
that was committed, and devices offer again whatever was not acknowledged. A step writes what it changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from coordinator.accounts import Accounts
from coordinator.device_rows import DeviceRows, read_engine, read_ledger
from coordinator.engine_state import Turn
from coordinator.events import (
    AbandonRound,
    AcceptUpdate,
    Action,
    Admit,
    CloseRehearsal,
    CloseRound,
    Event,
    FinishRun,
    RejectUpdate,
    SendTask,
    StartRound,
    UpdateArrived,
)
from coordinator.method_state import read_state, write_state
from coordinator.orders import Abandoned, Closed, Finished, Order, Reject, Send
from coordinator.records import DeviceRound, Ledger, RoundRecord
from coordinator.store import RunStore
from coordinator.windows import engine_type
from protocols import codec
from protocols.errors import PacketForeign, StoreError
from protocols.footprint import Footprint
from protocols.messages import Errand
from protocols.method import Choice, DeviceId, DeviceReport, Method
from protocols.payloads import Assignment, Enrolment, Reply, run_key
from protocols.settings import RunSettings
from protocols.staleness import staleness_factor


@dataclass(frozen=True)
class _Arriving:
    """A reply between its arrival and the engine's word on it."""

    reply: Reply[Any]
    data: bytes
    actual: Footprint
    predicted: Footprint
    staleness: int


def _told_late(reply: DeviceRound, told: Footprint) -> DeviceRound:
    upload_s = reply.actual.upload_s if told.upload_s is None else told.upload_s
    return replace(reply, actual=replace(reply.actual, upload_s=upload_s, joules=told.joules))


class Conductor:
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
        self._tasks: Mapping[DeviceId, Any] = {}
        self._arriving: _Arriving | None = None
        self._arrived: dict[DeviceId, DeviceRound] = {}
        self._opened_at = 0.0
        # before the plan of the open round: planning again on it after a restart gives the same tasks
        self.state: Any = self._method.init_coordinator(self._enrolment.weights)
        self._planned = self.state
        self._written: Any = None
        self._rows = DeviceRows(self._store)
        self._told: set[DeviceId] = set()  # whose reply is not written down yet
        self.engine = self._engine_type(self._settings.run, self._settings.round)

    @property
    def ledger(self) -> Ledger:
        """Counts over the whole run."""
        return self._accounts.ledger

    def recall(self) -> bool:
        """Take over what the store holds, without going on; False for a new run. Raises StoreError."""
        try:
            return self._recall()
        except msgspec.MsgspecError as problem:
            raise StoreError(f"{self._store.path} is damaged: {problem}") from None

    def _recall(self) -> bool:
        self._accounts = Accounts(read_ledger(self._store))
        state = read_engine(self._store)
        if state is None:
            return False
        self.state = read_state(self._store, self._method.state_type, self._method.spec)
        self._planned = self._written = self.state
        self._arrived = {} if state.stage == "finished" else self._store.device_rounds(state.turn.number)
        self._opened_at = msgspec.json.decode(self._need("opened"), type=float)
        self.engine = self._engine_type(self._settings.run, self._settings.round, state)
        return True

    def resume(self, now: float) -> list[Order]:
        """Go on with what the store holds; nothing to do for a new run."""
        if not self.recall():
            return []
        run, round_ = self._settings.run, self._settings.round
        self.engine, actions = self._engine_type.resume(run, round_, self.engine.state, now)
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
        actual: Footprint,
        now: float,
        *,
        turn: Turn | None = None,
        predicted: Footprint = Footprint(),  # noqa: B008 - frozen
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
        if not self.engine.state.objection(device, said) and (reply.update is None) != self._rehearsing:
            raise PacketForeign(
                f"reply {'without' if reply.update is None else 'with'} an update to round {said.number}"
            )
        staleness = self.engine.state.turn.number - reply.round
        self._arriving = _Arriving(reply, data, actual, predicted, staleness)
        return self.handle(UpdateArrived(device, reply.round, reply.attempt, reply.leaving), now)

    def note_measured(self, device: DeviceId, turn: Turn, actual: Footprint) -> None:
        """What a device can tell only when its reply has arrived: how long that took, and its joules."""
        if device in self._arrived and turn == self.engine.state.turn:
            self._arrived[device] = _told_late(self._arrived[device], actual)
            self._told.add(device)
            return
        reply = self._store.device_round(device, *turn)
        if reply is not None:
            with self._store.step():
                self._store.put_device_rounds(*turn, {device: _told_late(reply, actual)})

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """What a device could run at."""
        return self._method.choices(report)

    def records(self) -> list[RoundRecord]:
        """Of all closed rounds, ascending."""
        return self._store.records()

    @property
    def _rehearsing(self) -> bool:
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
            case CloseRound(number, attempt, devices):
                self.state = self._method.aggregate(self._planned, self._updates(number, devices))
                yield self._close(number, attempt, devices, now, rehearsal=False)
            case CloseRehearsal(number, attempt, devices):
                yield self._close(number, attempt, devices, now, rehearsal=True)
            case AbandonRound(number, attempt, reason):
                absent = sorted(self._tasks.keys() - self._arrived.keys())
                yield Abandoned(number, attempt, reason, tuple(absent))
                self.ledger.refuse(f"abandoned-{reason}")
                self._store.drop_device_rounds(number)
                self._forget_round()
            case FinishRun(reason):
                self.ledger.ended_at = now
                self._store.drop_tasks()
                yield Finished(reason)

    def _start(self, action: StartRound, now: float) -> None:
        number = action.round.number
        key = run_key(self._settings.run.seed).child("plan", number, action.attempt)
        self._planned, self._tasks = self._method.plan(self.state, action.round, key)
        if not action.resumed:
            self._opened_at = now
        if action.round.rehearsal:
            self._store.drop_tasks()

    def _send(self, device: DeviceId, number: int, attempt: int) -> Iterator[Send]:
        errand = Errand("task", self._enrolment.run, number, attempt, self._rehearsing)
        if self._keeps_tasks and not errand.rehearsal:
            if self.engine.state.members[device].asked == (number, attempt):  # else a newer one follows
                self._keep_task(device, errand)
                yield Send(device, errand, lambda: self._kept_task(device, errand))
            return
        tasks = self._tasks
        yield Send(device, errand, lambda: self._payload(tasks, device, errand))

    def _payload(self, tasks: Mapping[DeviceId, Any], device: DeviceId, errand: Errand) -> bytes:
        assignment = Assignment(device, errand.round, errand.attempt, errand.rehearsal, tasks[device])
        return codec.encode(assignment, self._method.spec)

    @property
    def _keeps_tasks(self) -> bool:
        """Semi-asynchronously tasks outlive the state they were planned on, so they are kept as sent."""
        return self._settings.round.mode != "synchronous"

    def _keep_task(self, device: DeviceId, errand: Errand) -> None:
        """Unless it is there: a device that came back is at the task it had."""
        if self._store.task(device, errand.round, errand.attempt) is None:
            data = self._payload(self._tasks, device, errand)
            self._store.add_task(device, errand.round, errand.attempt, data)

    def _kept_task(self, device: DeviceId, errand: Errand) -> bytes:
        data = self._store.task(device, errand.round, errand.attempt)
        assert data is not None, "a task is kept until it is answered, or replaced by the next one"
        return data

    def note_delivered(self, device: DeviceId, errand: Errand, num_bytes: int) -> None:
        """Count a payload that reached its device, once and for good. Raises StoreError."""
        self._accounts.delivered(device, errand, num_bytes)
        if self.keeps_steps:
            with self._store.step():
                self._rows.write_traffic(self.ledger, self._accounts.take_touched())

    def _accept(self, device: DeviceId) -> None:
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        reply, data = arriving.reply, arriving.data
        if device not in self._accounts.sent_bytes:
            self._count_task_of(device, reply)
        rehearsal = reply.update is None
        self._accounts.replied(device, len(data), rehearsal=rehearsal)
        if not rehearsal:
            self._store.add_reply(device, data)
        report = self.engine.state.members[device].report
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
        if self._keeps_tasks:
            self._store.drop_task(device)

    def _count_task_of(self, device: DeviceId, reply: Reply[Any]) -> None:
        """Whoever replies has had its task, even if a restart lost the word of that."""
        errand = Errand("task", self._enrolment.run, reply.round, reply.attempt, reply.update is None)
        if self._keeps_tasks and not errand.rehearsal:
            num_bytes = len(self._kept_task(device, errand))
        else:
            num_bytes = len(self._payload(self._tasks, device, errand))
        self._accounts.delivered(device, errand, num_bytes)

    def _updates(self, number: int, devices: tuple[DeviceId, ...]) -> Iterator[tuple[DeviceId, Any]]:
        kind = Reply[self._method.update_type]  # type: ignore[name-defined]
        for device in devices:
            reply: Reply[Any] = codec.decode(self._store.reply(device), kind, self._method.spec)
            update, staleness = reply.update, number - reply.round
            if staleness:
                factor = staleness_factor(staleness, self._settings.round.staleness_power)
                update = self._method.discount(self._planned, update, factor)
            yield device, update

    def _close(
        self, number: int, attempt: int, devices: tuple[DeviceId, ...], now: float, *, rehearsal: bool
    ) -> Closed:
        began = self.ledger.began_at or 0.0
        record = RoundRecord(
            number=number,
            attempt=attempt,
            rehearsal=rehearsal,
            opened_s=self._opened_at - began,
            closed_s=now - began,
            participants=tuple(self._tasks),
            devices={device: self._arrived[device] for device in devices},
        )
        self._write_told(number, attempt)
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
            write_state(self._store, self.state, self._method.spec)
            self._written = self.state

    def _write_told(self, number: int, attempt: int) -> None:
        """Replies of this round that are new, or of which more is known."""
        told = {device: self._arrived[device] for device in sorted(self._told)}
        self._store.put_device_rounds(number, attempt, told)
        self._told = set()

    def _need(self, name: str) -> bytes:
        data = self._store.get(name)
        assert data is not None, f"{name} is written in the same transaction as the engine's state"
        return data
