"""The coordinator of a simulated run: carries out the run controller's decisions on the virtual clock."""

from dataclasses import dataclass, field

from fleetune.coordinator.rounds.events import Event, Paused, Tick
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.run_events import Happening, RoundClosed, RunFinished
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.protocols.errors import PacketNotFinite
from fleetune.tools.simulator.availability import Availability
from fleetune.tools.simulator.event_queue import EngineWakes, EventQueue
from fleetune.tools.simulator.fleet_streams import FleetStreams
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.transfers import Transfers


@dataclass
class CoordinatorSide:
    """Drives a `RunController`: sends its tasks, wakes it, and collects its events.

    Attributes:
        controller: controller of the run.
        transfers: sends tasks.
        queue: event queue of the simulation.
        guard: counts attempts at a round.
        availability: draws which devices are connected; every closed round resets its idle periods.
        streams: streams of samples; None if the devices' data do not grow.
        overlapping: True if rounds overlap, so that no round is delayed.
        events: events of the run since the latest checkpoint.
        closed: True if a round has closed since the latest checkpoint.
        finished: True if the run is over.
        next_wake: time of the engine's next call; None if it requested none.
    """

    controller: RunController
    transfers: Transfers
    queue: EventQueue
    guard: ProgressGuard
    availability: Availability
    streams: FleetStreams | None
    overlapping: bool
    events: list[Happening] = field(default_factory=list)
    closed: bool = False
    finished: bool = False
    next_wake: float | None = None

    @property
    def can_be_stored(self) -> bool:
        """True if a checkpoint can be taken: a round has closed, and every task in flight is stored.

        With overlapping rounds the final evaluation opens when the last round closes, and its tasks are not
        stored.
        """
        state = self.controller.engine_state
        return self.closed and not (self.overlapping and state.stage == "evaluating")

    def handle(self, event: Event) -> None:
        """Pass an event to the engine; ignore it if the run is over."""
        if not self.finished:  # samples still arrive at devices after the last round
            self.carry_out(self.controller.handle(event, self.queue.now))

    def carry_out(self, outcomes: list[Outcome]) -> None:
        """Send the tasks among `outcomes`, and collect the other outcomes."""
        unsent = []
        for outcome in outcomes:
            match outcome:
                case OutgoingTask():
                    try:
                        self.transfers.send_task(outcome)
                    except PacketNotFinite as problem:
                        unsent.append(outcome.declined(problem))
                case _:
                    self._note(outcome)
        for declined in unsent:
            self.handle(declined)
        self._hold_next_round()
        self.guard.check_attempts(self.controller.round_attempt)
        wake_at = self.controller.wake_at
        if wake_at is not None and wake_at != self.next_wake:
            self.next_wake = wake_at
            self.queue.add(max(wake_at, self.queue.now), EngineWakes(wake_at))

    def wake(self, due: float) -> None:
        """Call the engine, unless it has requested another time meanwhile."""
        if due == self.controller.wake_at:
            self.next_wake = None
            self.handle(Tick())

    def release_next_round(self) -> None:
        """Let the next round open, because the closed round is stored and the caller has seen it."""
        if self.controller.engine_state.paused:
            self.handle(Paused(False))

    def take_events(self) -> list[Happening]:
        """Return the events since the last call."""
        self.closed = False
        events, self.events = self.events, []
        return events

    def restore(self, next_wake: float | None, tasks_made: list[tuple[str, int, int, float]]) -> None:
        """Continue with a controller that was restored from a checkpoint.

        Args:
            next_wake: time of the engine's next call.
            tasks_made: see `RunController.tasks_made`.
        """
        self.next_wake = next_wake
        self.controller.tasks_made = tasks_made
        self.finished = self.controller.finished is not None
        if self.controller.engine_state.stage == "training":
            self.controller.replan()

    def _hold_next_round(self) -> None:
        """Pause the engine while a round is open, so that the next round waits for `release_next_round`.

        Another attempt at the open round may follow immediately.
        """
        if self.finished or self.overlapping or self.closed:
            return
        state = self.controller.engine_state
        if (trains := state.stage == "training") != state.paused:
            self.handle(Paused(trains))

    def _note(self, event: Happening) -> None:
        self.events.append(event)
        self.guard.note_outcome(event)
        if isinstance(event, RoundClosed):
            self._note_closed(event.record)
        elif isinstance(event, RunFinished):
            self.finished = True

    def _note_closed(self, record: RoundRecord) -> None:
        self.closed = True
        self.availability.note_closed_round()
        self.transfers.forget_round()
        if self.streams is not None:
            self.streams.note_round(record)
