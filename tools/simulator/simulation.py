"""The simulator: the fleet's own round engine, methods, codec and sessions on a virtual clock.

Only time is simulated. The real codec encodes every payload, and the payload's length determines how long the
device's link is busy. Every device really trains, and chooses its ratio by the agent's own rule. The
simulator computes the time of that work on the device's board, its energy, the time of each transfer, and the
device's availability.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleetune.coordinator.rounds.events import ClockSet, RoundsEnded
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.run_events import Happening, RoundClosed
from fleetune.protocols.errors import SettingError
from fleetune.tools.simulator.availability import Availability
from fleetune.tools.simulator.checkpoint.checkpoints import Checkpoints
from fleetune.tools.simulator.checkpoint.snapshot import FORMAT, STOPPED, Snapshot
from fleetune.tools.simulator.coordinator_side import CoordinatorSide
from fleetune.tools.simulator.device_side import DeviceSide
from fleetune.tools.simulator.event_queue import (
    AvailabilityDrawn,
    DaysEnd,
    EngineWakes,
    EventQueue,
    SamplesArrive,
    SimulationEvent,
)
from fleetune.tools.simulator.fleet_streams import FleetStreams
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import Fleet

OnRound = Callable[[RoundRecord], bool]  # called with a closed training round; True ends the run


@dataclass(frozen=True)
class SimulationState:
    """The mutable state of a simulation, except the coordinator's state.

    Attributes:
        queue: the virtual clock and its events.
        fleet: the devices.
        work: their training in workers.
        availability: draws which devices are connected.
        streams: streams of samples; None if the devices' data do not grow.
    """

    queue: EventQueue
    fleet: Fleet
    work: PendingWork
    availability: Availability
    streams: FleetStreams | None

    def snapshot(self, num_closed: int, coordinator: CoordinatorSide) -> Snapshot:
        """Return everything that a checkpoint stores, except the devices."""
        return Snapshot(
            format=FORMAT,
            num_closed=num_closed,
            now=self.queue.now,
            events=self.queue.entries,
            results=self.work.results,
            next_wake=coordinator.next_wake,
            idle_periods=self.availability.idle_periods,
            tasks_made=coordinator.controller.tasks_made,
            streams=None if self.streams is None else self.streams.state,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a stored snapshot."""
        self.queue.restore(snapshot.now, snapshot.events)
        self.work.restore(snapshot.results)
        self.availability.restore(snapshot.idle_periods)
        if self.streams is not None and snapshot.streams is not None:
            self.streams.restore(snapshot.streams)


@dataclass(frozen=True)
class Simulation:
    """A fleet at work on a virtual clock.

    Attributes:
        state: state of the simulated fleet.
        coordinator: coordinator of the run.
        devices: carries out the devices' events.
        checkpoints: stores each closed round.
        guard: ends a simulation without progress.
        observers: receive events once they are stored.
        on_round: called with every closed training round before the next one opens; True ends the run. An
            exception in it ends the simulation.
        ends_s: seconds after which no round opens; None if the run ends with its last round.
        num_enrolment_bytes: bytes that each device downloads before its first round.
    """

    state: SimulationState
    coordinator: CoordinatorSide
    devices: DeviceSide
    checkpoints: Checkpoints
    guard: ProgressGuard
    observers: Observers
    on_round: OnRound | None
    ends_s: float | None
    num_enrolment_bytes: int

    def run(self) -> None:
        """Run until the last round is closed.

        Raises:
            SettingError: the run cannot end: needed devices decline or stay away, or no round gets enough
                updates. A virtual clock would run forever.
            FleetuneError: the simulation makes no progress, see `ProgressGuard`.
        """
        if not self._resume():
            self._begin()
        while self._has_more:
            with self.checkpoints.one_round():
                self._run_round()
            events = self.coordinator.take_events()
            for event in events:
                self.observers.tell(event)
            self._open_next_round(events)
        self.checkpoints.settle()
        if not self.coordinator.finished:
            raise SettingError("too few devices take part to reach round.quorum; lower it, or add devices")

    @property
    def _has_more(self) -> bool:
        streams = self.state.streams
        is_over = self.coordinator.finished and not (streams and streams.deliveries_left)
        return bool(self.state.queue) and not is_over

    def _run_round(self) -> None:
        """Handle events until a checkpoint can be taken, and take it."""
        while self._has_more and not self.coordinator.can_be_stored:
            now, number, event = self.state.queue.pop()
            self.guard.note_event(now, self.coordinator.controller.round_attempt, event)
            self._handle(event, number)
        if self.coordinator.closed:
            fleet = self.state.fleet
            self.checkpoints.write(
                lambda num_closed: self.state.snapshot(num_closed, self.coordinator), fleet
            )

    def _handle(self, event: SimulationEvent, number: int) -> None:
        match event:
            case AvailabilityDrawn(period):
                self.devices.draw_availability(period)
            case SamplesArrive(delivery):
                self.devices.samples_arrive(delivery)
            case DaysEnd():
                self.coordinator.handle(RoundsEnded("the simulated days are over"))
            case EngineWakes(due):
                self.coordinator.wake(due)
            case _:
                self.devices.handle(event, number)

    def _open_next_round(self, events: Iterable[Happening]) -> None:
        """Pass closed training rounds to the caller, then let the next round open."""
        closed = [event.record for event in events if isinstance(event, RoundClosed)]
        trained = [record for record in closed if not record.final_evaluation]
        if self.on_round is not None and any(self.on_round(record) for record in trained):
            self.coordinator.handle(RoundsEnded(STOPPED))
        self.coordinator.release_next_round()

    def _resume(self) -> bool:
        """Continue from the latest checkpoint; False if there is none."""
        snapshot = self.checkpoints.restore(self.state.fleet)
        if snapshot is None:
            return False
        self.state.restore(snapshot)
        self.coordinator.restore(snapshot.next_wake, snapshot.tasks_made)
        self._open_next_round([])
        return True

    def _begin(self) -> None:
        self.devices.begin_streams()
        self.coordinator.handle(ClockSet(self.state.queue.starts_s))
        if self.ends_s is not None:
            self.state.queue.add(self.ends_s, DaysEnd())
        self.devices.enrol(self.num_enrolment_bytes)
