"""The run controller: passes events to the round engine, does its actions, and writes each step to the
store.

Simulation and fleet share it. They carry payloads, report events and keep the clock. Each `handle` is one
step of the store. A coordinator that is killed continues from the last committed step, and devices offer
again what was not acknowledged. A step writes only what changed.

Serving calls the controller; reports read the engine's state (`engine_state`).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from fleetune.coordinator.rounds.actions import Action, Aggregate
from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.coordinator.rounds.events import Declined, DeviceReady, Event
from fleetune.coordinator.run.engine_rules import engine_of
from fleetune.coordinator.run.forgotten_device import forget_device
from fleetune.coordinator.run.replies import ArrivingReply, ReadAhead
from fleetune.coordinator.run.reply_intake import Received, ReplyIntake
from fleetune.coordinator.run.round_execution import Outcome, RoundExecution
from fleetune.coordinator.run.run_events import RoundClosed, RunFinished
from fleetune.coordinator.run.run_parts import parts_of
from fleetune.coordinator.run.run_view import RunView
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment


class RunController(RunView):
    """Runs one run: connects its engine, method and store.

    Args:
        settings: settings of the run.
        enrolment: initial data of its devices.
        method: the method, made for the enrolment's model.
        store: store of the run; a run that it already holds continues where it stopped.
        in_process: True if the devices run in this process (a simulation). The store is then written only
            when a round closes, and a stopped run continues from there; otherwise each step is written.
    """

    def __init__(
        self,
        settings: RunSettings,
        enrolment: Enrolment,
        method: Method[Any, Any, Any, Any],
        store: RunStore,
        *,
        in_process: bool = False,
    ) -> None:
        self._settings = settings
        self._enrolment = enrolment
        self._method = method
        self._store = store
        self._in_process = in_process
        self._begin()

    def _begin(self, state: EngineState | None = None) -> None:
        """Start with an engine in this state and new, empty parts."""
        run = self._settings, self._enrolment, self._method
        self._engine = engine_of(*run, state)
        self._run = parts_of(*run, self._store, self._engine.state, in_process=self._in_process)
        self._intake = ReplyIntake(self._run)
        self._execution = RoundExecution(self._run, self._intake)

    def recall(self) -> bool:
        """Load the stored state without continuing the run; return False for a new run. Raises StoreError."""
        state = read_engine(self._store)
        self._begin(state)
        self._run.recall(state)
        return state is not None

    def replan(self) -> None:
        """Plan the open round again after `recall`, because tasks of it may be in flight."""
        self._execution.start(self._engine.reopening(), self._run.open_round.opened_at)

    def reopen(self) -> None:
        """Reopen a run that had reached its final evaluation or its end; call `resume` next."""
        with self._store.step():
            self._execution.forget_round(self.round_attempt.number)
            self._engine.reopen()
            self.ledger.ended_at = None
            self._run.write()

    def resume(self, now: float) -> list[Outcome]:
        """Continue from the stored state, and return the outcomes; do nothing for a new run."""
        stored = read_engine(self._store)
        if stored is None:
            self.recall()
            return []
        self._begin(stored)
        actions = self._engine.resume(now)
        self._run.recall(self._engine.state)
        return self._carry_out(lambda: actions, now)

    def forget(self, device: DeviceId) -> dict[str, int]:
        """Remove a device from the stored run, and return the number of removed things by kind.

        Call `recall` before; the run then continues with `resume` of a new controller.

        Raises:
            StoreError: the store is damaged or cannot be written.
        """
        return forget_device(self._run, device)

    def admit(self, report: DeviceReport) -> None:
        """Check a device's report when it joins.

        Raises:
            PacketError: the device may not take part with this report.
        """
        self._run.extensions.admit(report)

    def handle(self, event: Event, now: float) -> list[Outcome]:
        """Process any event except a reply; return the tasks to send, and the run events."""
        return self._handle(event, now, None)

    def receive(
        self,
        device: DeviceId,
        round_attempt: RoundAttempt,
        data: bytes,
        actual: RoundCost,
        now: float,
        *,
        predicted: RoundCost = RoundCost(),  # noqa: B008 - frozen
        ahead: ReadAhead | None = None,
    ) -> list[Outcome]:
        """Process a device's reply: read it, check it, store it, and report it to the engine.

        Args:
            device: the device that sent it.
            round_attempt: the round and attempt it was offered for.
            data: the encoded `Reply`, verified by the transfer.
            actual: measured cost of the round on the device.
            now: present time on the run's clock.
            predicted: cost of the round as the device predicted it.
            ahead: result of `reading` for this data; None to read it now.

        Returns:
            The tasks to send, and the run events: `ReplyRefused` if the reply is damaged, implausible or not
            the one that was offered; `ReplyDropped` if it does not count.
        """
        received = self._intake.receive(device, round_attempt, data, actual, predicted, ahead)
        del data, ahead  # up to a whole model, which is not needed while the round is aggregated
        return self._take(received, now)

    def reading(
        self, device: DeviceId, round_attempt: RoundAttempt
    ) -> Callable[[bytes, PayloadContent | None], ReadAhead]:
        """Return a thread-safe function that reads a device's reply to the task it has just been sent.

        The function reads as `receive` does, and raises PacketError.
        """
        return self._intake.reading(device, round_attempt)

    def note_refused_offer(
        self, device: DeviceId, transfer_key: TransferKey, reason: str, now: float
    ) -> list[Outcome]:
        """Record that an offered reply was refused before any of it was sent. It will not be offered again.

        Args:
            device: the device that offered it.
            transfer_key: key of the offered transfer.
            reason: why it was refused.
            now: present time on the run's clock.
        """
        received = self._intake.refuse_offer(device, transfer_key, reason)
        return [] if received is None else self._take(received, now)

    def _take(self, received: Received, now: float) -> list[Outcome]:
        outcomes = self._handle(received.event, now, received.arriving)
        return outcomes if received.refused is None else [received.refused, *outcomes]

    def count_refused(self, kind: str, times: int = 1, *, device: DeviceId | None = None) -> None:
        """Count refused messages of a peer by kind and, if it is known, by device."""
        self.ledger.refuse(kind, times, device=device)

    def note_delivered(self, device: DeviceId, transfer_key: TransferKey, num_bytes: int) -> None:
        """Count a delivered payload once, durably.

        Raises:
            StoreError: the store cannot be written.
        """
        self._run.count_delivered(device, transfer_key, num_bytes)
        if not self._in_process:
            with self._store.step():
                self._run.write_traffic()

    def note_measured(self, device: DeviceId, round_attempt: RoundAttempt, actual: RoundCost) -> None:
        """Record figures that a device reports after its reply has arrived: upload time and energy."""
        self._run.open_round.note_late(device, round_attempt, self.round_attempt, actual)

    def write_down(self) -> None:
        """Write all unwritten changes, inside a step of the store.

        Raises:
            StoreError: the store cannot be written.
        """
        self._run.write()

    def _handle(self, event: Event, now: float, arriving: ArrivingReply | None) -> list[Outcome]:
        if self.ledger.began_at is None:
            self.ledger.began_at = now

        def decide() -> list[Action]:
            if isinstance(event, DeviceReady):
                device, state = event.report.device, self._engine.state
                awaited = state.awaited_attempt(device)
                self._run.tasks.note_held(device, event.base, awaited, state.round_attempt)
            elif isinstance(event, Declined) and event.replied:
                self._execution.note_refused(event.device, RoundAttempt(event.round, event.attempt))
            return self._engine.handle(event, now)

        return self._carry_out(decide, now, arriving)

    def _carry_out(
        self, decide: Callable[[], list[Action]], now: float, arriving: ArrivingReply | None = None
    ) -> list[Outcome]:
        """Decide and execute the actions in one step of the store.

        `arriving` is the counted reply, if any.
        """
        try:
            with self._store.step():
                if arriving is not None:
                    # before the engine decides, because the round may close with it
                    self._intake.keep(arriving)
                outcomes = self._do(decide(), now, arriving)
                ends = any(isinstance(one, RoundClosed | RunFinished) for one in outcomes)
                if ends or not self._in_process:
                    self._run.write()
        except StoreError:
            raise  # the run ends here, and later continues from the last step
        except Exception:
            if not self._in_process:
                self._go_back()
            raise
        return outcomes

    def _do(self, actions: list[Action], now: float, arriving: ArrivingReply | None) -> list[Outcome]:
        """Execute these actions, and those with which the engine answers an aggregation.

        Return the outcomes.
        """
        todo, outcomes = deque(actions), list[Outcome]()
        while todo:
            action = todo.popleft()
            if isinstance(action, Aggregate):
                todo.extend(self._engine.handle(self._execution.aggregate(action), now))
            else:
                outcomes += self._execution.do(action, now, arriving)
        return outcomes

    def _go_back(self) -> None:
        """Restore the stored state, as after a restart, so that a failed step changes nothing."""
        refusals = self.ledger.refusals
        self.recall()
        self.ledger.refusals = refusals
        if self._engine.state.running:
            self.replan()
