"""A run at work: what devices say goes to the round engine, what it wants done is done and written down.

Simulation and real fleet share this; all that is left to them is to carry payloads, tell events and keep
the clock. Each `handle` is one step of the store: a coordinator killed at any point goes on from the last one
that was committed, and devices offer again whatever was not acknowledged. A step writes what it changed.

Nobody outside the run asks the engine itself: what serving needs to know of it are the verbs here, and
reports read its state (`engine_state`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.rounds.actions import Action
from fleetune.coordinator.rounds.engine_state import EngineState, Member, Turn
from fleetune.coordinator.rounds.events import Declined, DeviceReady, Event, ReplyArrived
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.rounds.records import Ledger, RoundRecord
from fleetune.coordinator.rounds.rejections import Objection, objection_to
from fleetune.coordinator.rounds.rollout import Rollout
from fleetune.coordinator.rounds.window_engine import engine_type
from fleetune.coordinator.run.replies import ArrivingReply, ReadAhead, read_reply
from fleetune.coordinator.run.round_execution import Outcome, RoundExecution
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_events import ReplyRefused, RoundClosed, RunFinished
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import PacketError, PacketForeign, StoreError
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.once import Told
from fleetune.protocols.wire.messages import TransferKey, readable
from fleetune.protocols.wire.payloads import Enrolment


class RunController:
    """A run at work: engine, method and store together.

    Args:
        settings: of the run.
        enrolment: what its devices start from.
        method: made for the enrolment's model.
        store: of the run; a run that it holds already goes on where it stopped.

    """

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
        self._schedule = schedule_of(settings.schedule)
        uplinks = tuple(one.cost for one in enrolment.uplinks)
        self._planner = Planner(settings.objective, uplinks, method.utility)
        self._keeps_steps = True
        self._begin()

    def _begin(self, state: EngineState | None = None) -> None:
        """As before anything happened, but for the engine's `state`."""
        self._execution = RoundExecution(self._settings, self._enrolment, self._method, self._store)
        self._note_program()
        settings = self._settings
        self._engine = self._engine_type(settings.run, settings.round, state, self._schedule, self._planner)
        self._execution.follow(self._engine)

    @property
    def keeps_steps(self) -> bool:
        """What each step changed is written down; else all when a round closes, for a run that is gone on
        with from there (a simulation).
        """
        return self._keeps_steps

    @keeps_steps.setter
    def keeps_steps(self, keeps: bool) -> None:
        self._keeps_steps = keeps
        self._note_program()

    def _note_program(self) -> None:
        """In a simulation the devices are in this program."""
        execution, devices_here = self._execution, not self._keeps_steps
        execution.replies.at_hand = devices_here
        if execution.tasks.downlink is not None:
            execution.tasks.downlink.tells = devices_here

    def recall(self) -> bool:
        """Take over what the store holds, without going on; False for a new run. Raises StoreError."""
        state = read_engine(self._store)
        self._begin(state)
        self._execution.recall(state)
        return state is not None

    def replan(self) -> None:
        """Make the plan of the round that is open once more, after `recall`: tasks of it may be under way."""
        self._execution.start(self._engine.reopening(), self._execution.opened_at)

    def reopen(self) -> None:
        """Take a run up again that had come to its final evaluation or its end; to be resumed then."""
        with self._store.step():
            self._execution.forget_round(self.turn.number)
            self._engine.reopen()
            self.ledger.ended_at = None
            self._execution.write_down()

    def resume(self, now: float) -> list[Outcome]:
        """Go on with what the store holds; nothing to do for a new run."""
        if not self.recall():
            return []
        settings, stored = self._settings, self._engine.state
        self._engine, actions = self._engine_type.resume(
            settings.run, settings.round, stored, now, self._schedule, self._planner
        )
        self._execution.follow(self._engine)
        return self._carry_out(lambda: actions, now)

    def handle(self, event: Event, now: float) -> list[Outcome]:
        """Tell the engine what happened, but for replies; the tasks to send, and what became of it."""
        return self._handle(event, now, None)

    def receive(
        self,
        device: DeviceId,
        turn: Turn,
        data: bytes,
        actual: RoundCost,
        now: float,
        *,
        predicted: RoundCost = RoundCost(),  # noqa: B008 - frozen
        ahead: ReadAhead | None = None,
    ) -> list[Outcome]:
        """Take a device's reply in: judge it, check it, keep it, tell the engine.

        Args:
            device: that it came from.
            turn: what it was offered as.
            data: the encoded `Reply`, as a transfer has verified it.
            actual: what the round took of the device.
            now: on the run's clock.
            predicted: what the device expected the round to take.
            ahead: what `reading` made of this data; None: it is read now.

        Returns:
            the tasks to send, and what became of it: `ReplyRefused` where nothing of it was kept because it
            is damaged, implausible or not what it was offered as; `ReplyDropped` where it does not count.
        """
        objection = self.objection(device, turn)
        ahead = ahead if objection is None else None  # what is known of its task may be less by now
        delivered = self._execution.delivered(device, turn) if ahead is None else ahead.delivered
        base = self._execution.base(delivered)
        try:
            reply = read_reply(data, device, turn, self._method, base) if ahead is None else ahead.reply
            if objection is None and reply.base not in (UNSET, None if base is None else base.digest):
                raise PacketForeign(f"update of {device} was written with another base than its task")
            if objection is None and (reply.update is None) != self.evaluating:
                kind = "without" if reply.update is None else "with"
                raise PacketForeign(f"reply {kind} an update to round {turn.number}")
            self._execution.check(reply, counts=objection is None)
        except PacketError as problem:
            if objection and base is not None and delivered is None:  # nobody knows what it was written with
                return self._handle(ReplyArrived(device, *turn, objection), now, None)
            return self._refuse_reply(device, turn, problem, now)
        staleness = self.turn.number - reply.round
        arriving = ArrivingReply(reply, data, delivered, actual, predicted, staleness)
        event = self._arrival(arriving, turn, objection)
        return self._handle(event, now, arriving if objection is None else None)

    def reading(self, device: DeviceId, turn: Turn) -> Callable[[bytes, Told | None], ReadAhead]:
        """Reads a device's reply to the task that it has just been sent, in whatever thread, as `receive`
        would; what it says may be told. It raises PacketError.
        """
        delivered = self._execution.delivered(device, turn)
        base, method = self._execution.base(delivered), self._method
        return lambda data, told: ReadAhead(delivered, read_reply(data, device, turn, method, base, told))

    def _arrival(self, arriving: ArrivingReply, turn: Turn, objection: Objection | None) -> ReplyArrived:
        reply = arriving.reply
        member, looks = self.engine_state.member(reply.device), self._settings.round.prefer == "pyramid"
        change = arriving.change(member, self._method.spec) if looks else None
        joules = arriving.predicted.joules if arriving.actual.joules is None else arriving.actual.joules
        return ReplyArrived(
            reply.device,
            *turn,
            objection,
            leaving=reply.leaving,
            loss=reply.measures.train_loss,
            num_bytes=len(arriving.data),
            joules=joules,
            change=change,
            compression_error=arriving.actual.left_out,
        )

    def note_refused_offer(
        self, device: DeviceId, transfer_key: TransferKey, reason: str, now: float
    ) -> list[Outcome]:
        """An offer of a reply was refused before any of it travelled; it will not be offered again.

        Args:
            device: that offered it.
            transfer_key: what it was offered as.
            reason: why it was refused.
            now: on the run's clock.
        """
        turn = Turn.of(transfer_key)
        if transfer_key.run == self._enrolment.run:
            objection = self.objection(device, turn)
            if objection is not None:
                return self._handle(ReplyArrived(device, *turn, objection), now, None)
            if self.awaited_turn(device) == turn:
                return self._refuse_reply(device, turn, PacketForeign(reason), now)
        self.count_refused(PacketForeign.__name__)
        return []

    def _refuse_reply(self, device: DeviceId, turn: Turn, problem: PacketError, now: float) -> list[Outcome]:
        """It is as if its device had declined; counted by kind and device."""
        kind = type(problem).__name__
        self.count_refused(kind, device=device)
        declined = Declined(device, *turn, readable(f"{kind}: {problem}"), replied=True)
        return [ReplyRefused(device, *turn, problem), *self.handle(declined, now)]

    def count_refused(self, kind: str, times: int = 1, *, device: DeviceId | None = None) -> None:
        """Count what a peer sent and was refused, by kind and, where that is known, by device."""
        self.ledger.refuse(kind, times, device=device)

    def note_delivered(self, device: DeviceId, transfer_key: TransferKey, num_bytes: int) -> None:
        """Count a payload that reached its device, once and for good. Raises StoreError."""
        self._execution.note_delivered(device, transfer_key, num_bytes)
        if self.keeps_steps:
            with self._store.step():
                self._execution.write_traffic()

    def note_measured(self, device: DeviceId, turn: Turn, actual: RoundCost) -> None:
        """What a device can tell only when its reply has arrived: how long that took, and its joules."""
        self._execution.note_measured(device, turn, actual)

    def objection(self, device: DeviceId, turn: Turn) -> Objection | None:
        """What speaks against counting a reply of `device` to `turn`; None: it counts."""
        return objection_to(self._engine.state, device, turn)

    def write_down(self) -> None:
        """Write what changed and is not written yet, inside a step of the store. Raises StoreError."""
        self._execution.write_down()

    @property
    def tasks_made(self) -> list[tuple[DeviceId, int, int, float]]:
        """See `Tasks.made`: a coordinator that is killed forgets it, a simulation does not."""
        return self._execution.tasks.made

    @tasks_made.setter
    def tasks_made(self, made: list[tuple[DeviceId, int, int, float]]) -> None:
        self._execution.tasks.made = made

    @property
    def told(self) -> Told | None:
        """See `Downlink`, of the task that was made last."""
        return self._execution.tasks.told

    def awaited_turn(self, device: DeviceId) -> Turn | None:
        """The task that the device is expected to answer; None: none."""
        return self._engine.state.awaited_turn(device)

    @property
    def turn(self) -> Turn:
        """The asking that runs or comes next."""
        return self._engine.state.turn

    @property
    def evaluating(self) -> bool:
        """Whether the final evaluation is open."""
        return self._engine.state.stage == "rehearsing"

    @property
    def finished(self) -> str | None:
        """Why the run is over; None: it is not."""
        return self._engine.state.reason if self._engine.finished else None

    @property
    def wake_at(self) -> float | None:
        """When `handle(Tick(), now)` is due at the latest; None: not before another event."""
        return self._engine.wake_at

    @property
    def is_due(self) -> bool:
        """Whether nothing but devices is missing for a round."""
        state = self._engine.state
        return state.running or state.plan.due or self._schedule.settings.is_free

    @property
    def members(self) -> Mapping[DeviceId, Member]:
        """Every device that the run has heard of, and what is known of it."""
        return self._engine.state.members

    @property
    def engine_state(self) -> EngineState:
        """The engine's, as it stands; for reports, which only read it."""
        return self._engine.state

    @property
    def method_state(self) -> Any:
        """The method's, as it was before the plan of the open round."""
        return self._execution.method_state

    @property
    def shared_model(self) -> FlatArray:
        """The coordinator's model as it stands, shape (spec.size,)."""
        return self._method.shared_model(self.method_state)

    @property
    def rollout(self) -> Rollout | None:
        """How the versions of the shared model stand; None: the run has no roll-out groups."""
        return self._execution.rollout

    @property
    def ledger(self) -> Ledger:
        """Counts over the whole run."""
        return self._execution.accounts.ledger

    def records(self) -> list[RoundRecord]:
        """Of all closed rounds, ascending."""
        return self._store.records()

    def _handle(self, event: Event, now: float, arriving: ArrivingReply | None) -> list[Outcome]:
        if self.ledger.began_at is None:
            self.ledger.began_at = now

        def decide() -> list[Action]:
            if isinstance(event, DeviceReady):
                self._execution.note_held(event.report.device, event.base)
            elif isinstance(event, Declined) and event.replied:
                self._execution.note_refused(event.device, Turn(event.round, event.attempt))
            return self._engine.handle(event, now)

        return self._carry_out(decide, now, arriving)

    def _carry_out(
        self, decide: Callable[[], list[Action]], now: float, arriving: ArrivingReply | None = None
    ) -> list[Outcome]:
        """Do what is decided in one step of the store; `arriving`: the reply that counts, if there is one."""
        execution = self._execution
        try:
            with self._store.step():
                if arriving is not None:
                    execution.keep(arriving)  # before it is decided: the round may close with it
                outcomes = [one for action in decide() for one in execution.do(action, now, arriving)]
                if self.keeps_steps or any(isinstance(one, RoundClosed | RunFinished) for one in outcomes):
                    execution.write_down()
        except StoreError:
            raise  # the run ends here, and goes on from the last step
        except Exception:
            if self.keeps_steps:
                self._go_back()
            raise
        return outcomes

    def _go_back(self) -> None:
        """To what the store holds, as after a restart: a step that failed has changed nothing."""
        refusals = self.ledger.refusals
        self.recall()
        self.ledger.refusals = refusals
        if self._engine.state.running:
            self.replan()
