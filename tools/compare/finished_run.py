"""A finished run, and the state of its fleet after each round. No I/O.

The score of a run over time is that of the whole fleet: each device that has taken part counts with its
latest reply. After local training this is exact, because a personal model does not change while its device is
away. If all devices take part in every round, the score is the mean of the round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.simulator.energy import joules_by_round

Side = Literal["before", "after"]


@dataclass(frozen=True)
class Point:
    """The state of a run when a round closed.

    Attributes:
        number: number of the round.
        closed_s: simulated seconds since the run began.
        up, down: payload bytes so far, of all counted replies and of their tasks.
        before, after: score before and after local training, mean over the devices that have taken part, each
            with its latest reply; None if not measured yet.
        known: number of devices that have taken part.
        joules: energy of all boards so far, idling included; None if unknown.
    """

    number: int
    closed_s: float
    up: int
    down: int
    before: float | None
    after: float | None
    known: int
    joules: float | None = None


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of one configuration with one seed.

    Attributes:
        label: label of the configuration.
        seed: seed of the run.
        summary: its summary.json, personal scores filled in (`outcome.with_personal`).
        records: records of its training rounds, without the final evaluation.
        idle_w: idle power of each device's board in watts; {} if unknown.
    """

    label: str
    seed: int
    summary: Summary
    records: Sequence[RoundRecord]
    idle_w: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def history(self) -> tuple[Point, ...]:
        """One point for each round, ascending."""
        latest: dict[str, Measures] = {}
        points, up, down = [], 0, 0
        joules = joules_by_round(self.records, self.idle_w) if self.idle_w else [None] * len(self.records)
        for record, used in zip(self.records, joules, strict=True):
            for device, reply in record.devices.items():
                latest[device] = reply.measures
                up, down = up + reply.bytes_up, down + reply.bytes_down
            before = mean(measures.before for measures in latest.values())
            after = mean(measures.after for measures in latest.values())
            points.append(Point(record.number, record.closed_s, up, down, before, after, len(latest), used))
        return tuple(points)

    @property
    def settled(self) -> list[Point]:
        """The history from the round by which half of all participants had taken part.

        Before that round, the mean covers too few devices to decide on the best round or a reached target.
        """
        all_known = self.history[-1].known if self.history else 0
        return [point for point in self.history if 2 * point.known >= all_known]
