"""Builds a simulation: passes each part the objects that its constructor needs."""

from collections.abc import Iterable
from concurrent.futures import Executor
from datetime import date, time

from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.stored_run import Run
from fleetune.protocols.settings.schedule import DAY_S
from fleetune.tools.simulator.availability import Availability
from fleetune.tools.simulator.checkpoint.checkpoints import Checkpoints
from fleetune.tools.simulator.coordinator_side import CoordinatorSide
from fleetune.tools.simulator.device_side import DeviceSide
from fleetune.tools.simulator.event_queue import EventQueue
from fleetune.tools.simulator.fleet_streams import FleetStreams
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import Fleet, SimulatedDevice
from fleetune.tools.simulator.simulation import OnRound, Simulation, SimulationState
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule
from fleetune.tools.simulator.streams.daily_scores import DailyScores
from fleetune.tools.simulator.transfers import Transfers

FIRST_DAY = date(2026, 1, 1)  # of the simulated calendar


def build_simulation(
    run: Run,
    devices: Iterable[SimulatedDevice],
    work: PendingWork,
    executor: Executor,
    arrivals: tuple[ArrivalSchedule, DailyScores] | None,
    *,
    observers: Observers,
    on_round: OnRound | None,
    num_enrolment_bytes: int,
) -> Simulation:
    """Build a simulation from a run, its devices, and the workers that train.

    Args:
        run: a new or resumed run.
        devices: the devices, each with its first ratio chosen.
        work: hands the devices' training to workers.
        executor: executor with those workers.
        arrivals: samples that arrive at the devices, and the scores of each day; None if the data do not
            grow.
        observers: see `Simulation`.
        on_round: see `Simulation`.
        num_enrolment_bytes: see `Simulation`.
    """
    section, enrolment, controller = run.settings.fleet, run.enrolment, run.controller
    starts_at = time.fromisoformat(section.starts_at)
    queue = EventQueue(schedule_of(run.settings.schedule).instant(FIRST_DAY, starts_at))
    fleet = Fleet(devices)
    availability = Availability(section.availability, run.settings.round.quorum, enrolment.seed)
    streams = None if arrivals is None else FleetStreams(*arrivals, executor, fleet)
    guard = ProgressGuard(len(fleet), always_connected=availability.is_whole)
    checkpoints = Checkpoints(run)
    transfers = Transfers(controller, enrolment, queue, fleet, work, guard, checkpoints)
    overlapping = run.settings.round.mode != "synchronous"
    coordinator = CoordinatorSide(
        controller, transfers, queue, guard, availability, streams, overlapping=overlapping
    )
    device_side = DeviceSide(
        coordinator, transfers, queue, fleet, work, availability, streams, guard, checkpoints, enrolment
    )
    return Simulation(
        SimulationState(queue, fleet, work, availability, streams),
        coordinator,
        device_side,
        checkpoints,
        guard,
        observers=observers,
        on_round=on_round,
        ends_s=None if section.days is None else section.days * DAY_S,
        num_enrolment_bytes=num_enrolment_bytes,
    )
