"""What several methods came to on the same fleet: each run's figures, and their mean over seeds. No I/O.

The accuracy of a run over time is the fleet's, not that of a round's participants: every device that has
taken part counts with its latest reply. After local training that is exact, because a personal model does
not change while its device is away; with all devices in every round it is the round's own mean.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, Literal

from fleetune.coordinator.reports.averages import mean
from fleetune.coordinator.reports.outcome import personal
from fleetune.coordinator.reports.summary import Summary
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.wire.payloads import Measures

Side = Literal["before", "after"]
WORST = 0.1
SHARE_OF_BEST = 0.95


@dataclass(frozen=True)
class Contender:
    """Who is compared.

    Attributes:
        label: what it is called in tables and plots, and its folder.
        method: its [method] section, `name` included.
        ratios: instead of the file's fleet.ratios; empty: what each device chooses; None: as in the file.
    """

    label: str
    method: Mapping[str, Any]
    ratios: tuple[float, ...] | None = None

    @property
    def options(self) -> str:
        """The settings that are not its defaults, in one line."""
        options = [f"{key} = {value}" for key, value in self.method.items() if key != "name"]
        if self.ratios is not None:
            options.append(f"ratios = {list(self.ratios)}" if self.ratios else "ratios: as each chooses")
        return ", ".join(options)


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
    """

    number: int
    closed_s: float
    up: int
    down: int
    before: float | None
    after: float | None
    known: int


@dataclass(frozen=True)
class Played:
    """A finished run of one contender with one seed.

    Attributes:
        label: of the contender.
        seed: of the run.
        summary: its summary.json, personal accuracies filled in (`outcome.with_personal`).
        records: of its rounds, the final evaluation not among them.
    """

    label: str
    seed: int
    summary: Summary
    records: Sequence[RoundRecord]

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """One a round, ascending."""
        return tuple(_development(self.records))

    @property
    def settled(self) -> list[Point]:
        """From the round by which half of all that ever took part had done so: before, the mean is over
        too few devices to call a round the best or a target reached.
        """
        all_known = self.points[-1].known if self.points else 0
        return [point for point in self.points if 2 * point.known >= all_known]


@dataclass(frozen=True)
class Target:
    """The personal accuracy whose cost is asked for, a fraction, and why that one."""

    accuracy: float
    reason: str


@dataclass(frozen=True)
class Figures:
    """One run in figures; a line of runs.csv. Accuracies are fractions on the devices' own test samples.

    Attributes:
        contender, method, seed: which run.
        rounds, devices: done, and taken part.
        personal_mean, personal_weighted: over the personal models after the last round, and weighted by
            training samples.
        personal_worst_decile: what nine devices in ten reach or exceed.
        personal_worst: of the device that does worst.
        before_mean, before_weighted, after_mean, after_weighted: one more round's work on a copy: the model
            local training starts from, and the personal model it leads to (the final evaluation).
        best_before, best_before_round, best_after, best_after_round: the highest the fleet stood at.
        last_before, last_after: mean over the last round's participants.
        bytes_up, bytes_down, bytes_up_dense, bytes_down_dense: payload as counted on the wire, and as many
            whole models in float32.
        seconds: simulated, until the last round closed.
        rounds_to_target, bytes_up_to_target, bytes_down_to_target, seconds_to_target: until the fleet's
            personal accuracy first reached the target; None: it did not.
    """

    contender: str
    method: str
    seed: int
    rounds: int
    devices: int
    personal_mean: float | None
    personal_weighted: float | None
    personal_worst_decile: float | None
    personal_worst: float | None
    before_mean: float | None
    before_weighted: float | None
    after_mean: float | None
    after_weighted: float | None
    best_before: float | None
    best_before_round: int | None
    best_after: float | None
    best_after_round: int | None
    last_before: float | None
    last_after: float | None
    bytes_up: int
    bytes_down: int
    bytes_up_dense: int
    bytes_down_dense: int
    seconds: float | None
    rounds_to_target: int | None
    bytes_up_to_target: int | None
    bytes_down_to_target: int | None
    seconds_to_target: float | None


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None: of one value only) of `count` values over seeds."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Comparison:
    """Contenders side by side.

    Attributes:
        name: of the run file.
        contenders: in the order asked for.
        seeds: asked for.
        runs: those that are finished.
        target: see `Target`; None: no run has an accuracy.
    """

    name: str
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    runs: tuple[Played, ...]
    target: Target | None

    @cached_property
    def figures(self) -> tuple[Figures, ...]:
        return tuple(figures_of(run, self.target) for run in self.runs)

    @property
    def shown(self) -> list[Contender]:
        """Those with a finished run."""
        there = {run.label for run in self.runs}
        return [contender for contender in self.contenders if contender.label in there]

    def of(self, label: str) -> list[Played]:
        return [run for run in self.runs if run.label == label]

    def spread(self, label: str, figure: str) -> Spread | None:
        """Of one figure (a field of `Figures`) over the contender's seeds; None when no run has it."""
        return spread(getattr(one, figure) for one in self.figures if one.contender == label)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are there; None when there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))


def target_of(runs: Sequence[Played], accuracy: float | None) -> Target | None:
    """The target that was asked for, else 95 % of the best contender's personal accuracy in the end."""
    if accuracy is not None:
        return Target(accuracy, "as asked for")
    ends: dict[str, list[float | None]] = {}
    for run in runs:
        ends.setdefault(run.label, []).append(run.summary.accuracy.personal_mean)
    means = {label: found.mean for label, values in ends.items() if (found := spread(values))}
    if not means:
        return None
    best = max(means, key=lambda label: means[label])
    reason = f"{SHARE_OF_BEST:.0%} of what the best method ended with ({best})".replace("%", " %")
    return Target(SHARE_OF_BEST * means[best], reason)


def figures_of(run: Played, target: Target | None) -> Figures:
    """All figures of a run."""
    summary, accuracy, num_bytes = run.summary, run.summary.accuracy, run.summary.bytes
    own = sorted(personal(summary).values())
    before, after = _best(run.settled, "before"), _best(run.settled, "after")
    reached = next((p for p in run.settled if target and (p.after or 0) >= target.accuracy), None)
    return Figures(
        contender=run.label,
        method=summary.method,
        seed=run.seed,
        rounds=summary.rounds,
        devices=sum(row.updates > 0 for row in summary.by_device.values()),
        personal_mean=accuracy.personal_mean,
        personal_weighted=accuracy.personal_weighted,
        personal_worst_decile=own[ceil(WORST * len(own)) - 1] if own else None,
        personal_worst=own[0] if own else None,
        before_mean=accuracy.before_mean,
        before_weighted=accuracy.before_weighted,
        after_mean=accuracy.after_mean,
        after_weighted=accuracy.after_weighted,
        best_before=before[0],
        best_before_round=before[1],
        best_after=after[0],
        best_after_round=after[1],
        last_before=_participants(run.records, "before"),
        last_after=_participants(run.records, "after"),
        bytes_up=num_bytes.up,
        bytes_down=num_bytes.down,
        bytes_up_dense=num_bytes.up_dense,
        bytes_down_dense=num_bytes.down_dense,
        seconds=summary.seconds.rounds,
        rounds_to_target=reached.number if reached else None,
        bytes_up_to_target=reached.up if reached else None,
        bytes_down_to_target=reached.down if reached else None,
        seconds_to_target=reached.closed_s if reached else None,
    )


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


def _best(points: Iterable[Point], side: Side) -> tuple[float | None, int | None]:
    """The highest accuracy and its round; of equal ones the earliest."""
    scored = [(value, point.number) for point in points if (value := getattr(point, side)) is not None]
    return max(scored, key=lambda pair: (pair[0], -pair[1]), default=(None, None))


def _participants(records: Sequence[RoundRecord], side: Side) -> float | None:
    replies = records[-1].devices.values() if records else ()
    return mean(getattr(reply.measures, side) for reply in replies)
