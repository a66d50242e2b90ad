"""A finished run of a comparison, and how the fleet stood at the end of each of its rounds. No I/O.

The accuracy of a run over time is the fleet's, not that of a round's participants: every device that has
taken part counts with its latest reply. After local training that is exact, because a personal model does
not change while its device is away; with all devices in every round it is the round's own mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """A run as it stood when a round closed.

    Attributes:
        number: of the round.
        closed_s: simulated seconds since the run began.
        up, down: payload bytes of all replies that counted so far, and of their tasks.
        before, after: accuracy around local training, mean over the devices that have taken part, each
            with its latest reply; None: nobody measured it yet.
        known: how many devices have taken part.
        joules: that all boards drew so far, idling included, see `energy`; None: nothing is known of them.
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
class Played:
    """A finished run of one contender with one seed.

    Attributes:
        label: of the contender.
        seed: of the run.
        summary: its summary.json, personal accuracies filled in (`outcome.with_personal`).
        records: of its rounds, the final evaluation not among them.
        idle_w: what each device's board draws doing nothing; {}: not known.
    """

    label: str
    seed: int
    summary: Summary
    records: Sequence[RoundRecord]
    idle_w: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """One a round, ascending."""
        if not self.idle_w:
            return tuple(_development(self.records))
        pairs = zip(_development(self.records), joules_by_round(self.records, self.idle_w), strict=True)
        return tuple(replace(point, joules=joules) for point, joules in pairs)

    @property
    def settled(self) -> list[Point]:
        """From the round by which half of all that ever took part had done so: before, the mean is over
        too few devices to call a round the best or a target reached.
        """
        all_known = self.points[-1].known if self.points else 0
        return [point for point in self.points if 2 * point.known >= all_known]


def _development(records: Iterable[RoundRecord]) -> Iterable[Point]:
    latest: dict[str, Measures] = {}
    up = down = 0
    for record in records:
        for device, reply in record.devices.items():
            latest[device] = reply.measures
            up, down = up + reply.bytes_up, down + reply.bytes_down
        before = mean(measures.before for measures in latest.values())
        after = mean(measures.after for measures in latest.values())
        yield Point(record.number, record.closed_s, up, down, before, after, len(latest))
