"""Delivers arriving samples to simulated devices, and collects the scores of each day."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from fleetune.coordinator.rounds.policies.schedule import DRIFT_THRESHOLD
from fleetune.coordinator.rounds.records import RoundRecord, Traffic
from fleetune.edge_agent.run.round_planner import RoundWork
from fleetune.protocols.settings.schedule import DAY_S
from fleetune.tools.simulator.jobs import ArrivalJob
from fleetune.tools.simulator.simulated_device import Fleet, SimulatedDevice
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule
from fleetune.tools.simulator.streams.daily_scores import DailyScores, DailyScoresState
from fleetune.tools.simulator.workers import worker


@dataclass(frozen=True)
class FleetStreamsState:
    """The state of `FleetStreams`, as a checkpoint stores it."""

    deliveries_left: int
    scores: DailyScoresState


class FleetStreams:
    """Delivers samples to a fleet whose data grow.

    Args:
        schedule: samples and times of the deliveries.
        scores: scores of the days.
        executor: runs `tools.simulator.workers.worker`.
        fleet: the devices.

    Attributes:
        deliveries_left: number of deliveries to come.
    """

    def __init__(
        self, schedule: ArrivalSchedule, scores: DailyScores, executor: Executor, fleet: Fleet
    ) -> None:
        self._schedule = schedule
        self._scores = scores
        self._executor = executor
        self._fleet = fleet
        self.deliveries_left = schedule.num_deliveries

    def begin(self, now: float, wall_s: float) -> list[float]:
        """Give all devices their first samples; return the times of the other deliveries."""
        begun = [
            (
                device,
                self._executor.submit(worker.receive_first_samples, device.name, device.spec.index, wall_s),
            )
            for device in self._fleet
        ]
        for device, job in begun:
            device.figures = job.result()
            device.note_samples(now)
        every_s = DAY_S / self._schedule.arrivals.times_a_day
        return [(delivery + 1) * every_s for delivery in range(self._schedule.num_deliveries)]

    @property
    def state(self) -> FleetStreamsState:
        """The present state, without the devices' own states."""
        return FleetStreamsState(self.deliveries_left, self._scores.state)

    def restore(self, state: FleetStreamsState) -> None:
        """Restore a stored state."""
        self.deliveries_left = state.deliveries_left
        self._scores.restore(state.scores)

    def deliver(self, delivery: int, now: float, wall_s: float, num_closed: int) -> Iterator[SimulatedDevice]:
        """Deliver samples to all devices; yield the devices that have to report changed data.

        Args:
            delivery: number of the delivery, from 0.
            now: time on the virtual clock.
            wall_s: time of day, seconds since 1970.
            num_closed: rounds that have ended, see `TrainingJob`.
        """
        jobs = []
        for device in self._fleet:
            if device.job is not None:
                device.job.exception()  # a device's samples have one writer at a time
            arrival = ArrivalJob(device.name, device.spec.index, delivery, wall_s, num_closed)
            jobs.append((device, self._executor.submit(worker.receive_samples, arrival)))
        for device, job in jobs:
            result = job.result()
            device.figures, device.deliveries = result.figures, delivery + 1
            self._scores.note(device.name, result)
            if device.connected and device.is_idle(now) and device.note_samples(now):
                yield device
        self.deliveries_left -= 1

    def end(self, delivery: int, traffic: Iterable[Traffic]) -> None:
        """End the virtual day if this delivery of samples was its last, and write the day's scores."""
        if (delivery + 1) % self._schedule.arrivals.times_a_day == 0:
            drifting = sum((device.drift or 0.0) >= DRIFT_THRESHOLD for device in self._fleet)
            self._scores.end(traffic, drifting)

    def note_work(self, work: RoundWork) -> None:
        """Count the joules of a reply that has arrived."""
        if not work.key.final_evaluation:
            self._scores.add_joules(work.taken.joules or 0.0)

    def note_round(self, record: RoundRecord) -> None:
        """Count a closed round."""
        if not record.final_evaluation:
            self._scores.note_round(record.number)
