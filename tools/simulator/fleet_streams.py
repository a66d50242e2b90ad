"""Samples come to simulated devices, turn by turn, and days end."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from fleetune.coordinator.rounds.policies.schedule import TOLD
from fleetune.coordinator.rounds.records import RoundRecord, Traffic
from fleetune.edge_agent.run.round_planner import RoundWork
from fleetune.protocols.settings.schedule import DAY_S
from fleetune.tools.simulator.jobs import ArrivalJob
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.streams.daily_scores import DailyScoresState, Growing
from fleetune.tools.simulator.workers import worker


@dataclass(frozen=True)
class FleetStreamsState:
    """What changes of an `FleetStreams`, to be written down; attributes as there."""

    turns_left: int
    days: DailyScoresState


class FleetStreams:
    """What comes to a simulated fleet whose data grow.

    Args:
        growing: what comes, and how the devices do.
        executor: runs `tools.simulator.workers.worker`.
        players: the devices.

    Attributes:
        turns_left: of samples.
    """

    def __init__(self, growing: Growing, executor: Executor, players: list[SimulatedDevice]) -> None:
        self._deliveries = growing.deliveries
        self._days = growing.days
        self._executor = executor
        self._players = players
        self.turns_left = growing.deliveries.turns

    def begin(self, now: float, wall_s: float) -> list[float]:
        """Devices have their first samples; when the others come, by turn."""
        begun = [
            (
                player,
                self._executor.submit(worker.receive_first_samples, player.name, player.device.index, wall_s),
            )
            for player in self._players
        ]
        for player, job in begun:
            player.figures = job.result()
            player.note_samples(now)
        every_s = DAY_S / self._deliveries.arrivals.times_a_day
        return [(turn + 1) * every_s for turn in range(self._deliveries.turns)]

    @property
    def state(self) -> FleetStreamsState:
        """As it stands; the devices' is theirs."""
        return FleetStreamsState(self.turns_left, self._days.state)

    def restore(self, state: FleetStreamsState) -> None:
        """Take over what it was."""
        self.turns_left = state.turns_left
        self._days.restore(state.days)

    def come(self, turn: int, now: float, wall_s: float, closed: int) -> Iterator[SimulatedDevice]:
        """Samples are there; the devices that should tell of it, one by one.

        Args:
            turn: from 0.
            now: on the virtual clock.
            wall_s: the time of day, seconds since 1970.
            closed: how many rounds have ended, see `Job`.
        """
        jobs = []
        for player in self._players:
            if player.job is not None:
                player.job.exception()  # one writer at a time for its samples
            coming = ArrivalJob(player.name, player.device.index, turn, wall_s, closed)
            jobs.append((player, self._executor.submit(worker.receive_samples, coming)))
        for player, job in jobs:
            came = job.result()
            player.figures, player.turns = came.figures, turn + 1
            self._days.note(player.name, came)
            if player.there and player.is_idle(now) and player.note_samples(now):
                yield player
        self.turns_left -= 1

    def end(self, turn: int, traffic: Iterable[Traffic]) -> None:
        """All have told of it; with the last turn of a day that is over, see `Days.end`."""
        if (turn + 1) % self._deliveries.arrivals.times_a_day == 0:
            drifting = sum((player.drift or 0.0) >= TOLD for player in self._players)
            self._days.end(traffic, drifting)

    def note_work(self, work: RoundWork) -> None:
        """A device's reply has arrived."""
        if not work.key.final_evaluation:
            self._days.joules += work.taken.joules or 0.0

    def note_round(self, record: RoundRecord) -> None:
        """It has closed."""
        if not record.final_evaluation:
            self._days.rounds = record.number
