"""A cell of a paper's table beside our runs of it: what its number means, and what may be claimed. No I/O.

Papers differ in which models they test, when, and over whom they average. `MEASURES` has these readings by
name; [paper] accuracy names the one a cell stands for. Accuracies are fractions on the devices' own test
samples. What travels is read two ways: the seconds that payloads took on their links, and bytes as papers
count them: every number at its full width, nothing compressed, no packaging (`tools.papers.traffic`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetune.coordinator.metrics.averages import mean, weighted_mean
from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.registry import (
    BEFORE_MEAN,
    BYTES_DOWN,
    BYTES_UP,
    PERSONAL_MEAN,
    PERSONAL_MEAN_ALL,
    PERSONAL_WEIGHTED,
    PERSONAL_WEIGHTED_ALL,
    ROUNDS,
)
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.simulation import PaperSection
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.compare.comparison import Spread, spread
from fleetune.tools.compare.played import Played
from fleetune.tools.papers.traffic import Traffic

Average = Callable[[Collection[Measures]], float | None]

_SAME_RUN = (
    "run.name",
    "run.seed",
    "run.final_evaluation",
    "data.source",
)  # the source is judged by its size

_WHERE = ("fleet.trainer", "fleet.train_on")  # what computes is no part of a paper's cell


@dataclass(frozen=True)
class Measure:
    """One reading of a paper's number.

    Attributes:
        about: what it is.
        of: its value for a finished run; None: not measured.
        unit: `%` is a fraction; MB are 2^20 bytes, Gbit 10^9 bits.
        counted: reads it from what a method would send, without any training; `of` gives None then.
    """

    about: str
    of: Callable[[Played], float | None]
    unit: Literal["%", "s", "MB", "Gbit"] = "%"
    counted: Callable[[Traffic], float] | None = None


def after_mean(devices: Collection[Measures]) -> float | None:
    """Personal models after local training, every device alike."""
    return mean(one.after for one in devices)


def after_weighted(devices: Collection[Measures]) -> float | None:
    """The same, by training samples."""
    return weighted_mean((one.after, one.num_samples) for one in devices)


def before_mean(devices: Collection[Measures]) -> float | None:
    """What local training starts from, every device alike."""
    return mean(one.before for one in devices)


def best_of_fleet(average: Average) -> Callable[[Played], float | None]:
    """The highest that the whole fleet stood at when a round closed, each device with its latest reply.

    Rounds count from the one by which half of all devices had taken part (`Played.settled`).
    """
    return lambda played: _highest(average(devices) for devices in _fleet(played))


def best_of_participants(average: Average) -> Callable[[Played], float | None]:
    """The highest of any round's participants."""
    return lambda played: _highest(
        average([reply.measures for reply in record.devices.values()]) for record in played.records
    )


def at_the_end(*metrics: Metric) -> Callable[[Played], float | None]:
    """As summary.json has it: of all devices, after the last round; the first of these that it has."""

    def of(played: Played) -> float | None:
        values = (metric.of_run(played.summary) for metric in metrics)
        return next((value for value in values if value is not None), None)

    return of


def seconds_up(played: Played) -> float | None:
    """What sending its updates took a device in all rounds together, mean over devices."""
    by_device: dict[str, float] = {}
    for record in played.records:
        for device, reply in record.devices.items():
            by_device[device] = by_device.get(device, 0.0) + (reply.actual.upload_s or 0.0)
    return mean(by_device.values())


def _counted(about: str, unit: Literal["MB", "Gbit"], counted: Callable[[Traffic], float]) -> Measure:
    return Measure(about, lambda _: None, unit, counted)


MEASURES: Mapping[str, Measure] = {
    "best-mean": Measure("best round, mean over all devices", best_of_fleet(after_mean)),
    "best-weighted": Measure("best round, weighted by samples", best_of_fleet(after_weighted)),
    "best-participants-mean": Measure(
        "best round, mean over its participants", best_of_participants(after_mean)
    ),
    "best-participants-weighted": Measure(
        "best round, its participants weighted by samples", best_of_participants(after_weighted)
    ),
    "best-before-mean": Measure("best round, mean, before local training", best_of_fleet(before_mean)),
    "final-mean": Measure(
        "after the last round, mean over all devices", at_the_end(PERSONAL_MEAN_ALL, PERSONAL_MEAN)
    ),
    "final-weighted": Measure(
        "after the last round, weighted by samples", at_the_end(PERSONAL_WEIGHTED_ALL, PERSONAL_WEIGHTED)
    ),
    "final-before-mean": Measure(
        "after the last round, mean, before one more round's training", at_the_end(BEFORE_MEAN)
    ),
    "seconds-up": Measure("sending updates, all rounds, mean over devices", seconds_up, "s"),
    "up-mb": _counted("an update, mean of all rounds", "MB", lambda sent: sent.up / 2**20),
    "down-mb": _counted("a task, mean of all rounds but the first", "MB", lambda sent: sent.down / 2**20),
    "total-gbit": _counted("all tasks and updates of a run", "Gbit", lambda sent: 8e-9 * sent.total),
}


def measures_beside(name: str) -> list[str]:
    """What a cell's result shows: its own measure first, then the others that the same runs give."""
    if MEASURES[name].counted:
        return [name]
    return sorted(
        (one for one, measure in MEASURES.items() if not measure.counted), key=lambda one: one != name
    )


def _fleet(played: Played) -> Iterator[list[Measures]]:
    settled = {point.number for point in played.settled}
    latest: dict[str, Measures] = {}
    for record in played.records:
        latest.update({device: reply.measures for device, reply in record.devices.items()})
        if record.number in settled:
            yield list(latest.values())


def _highest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Label:
    """How far a run is the paper's.

    Attributes:
        scaled: what is smaller than or other than in the paper; empty: nothing that the paper gives.
        chosen: keys that the paper leaves open and that were set otherwise than in the cell's file.
        changes: of these, what was not in the cell's file but asked for.
    """

    scaled: tuple[str, ...]
    chosen: tuple[str, ...]
    changes: tuple[str, ...]

    def __str__(self) -> str:
        if self.scaled:
            return f"scaled: {'; '.join((*self.scaled, *self.chosen))}"
        return f"full, another choice of ours: {'; '.join(self.chosen)}" if self.chosen else "full"


def label_of(cell: RunSettings, asked: RunSettings, num_samples: int) -> Label:
    """Compare what is run with the cell's file.

    Args:
        cell: the file's settings, [paper] among them.
        asked: these with the user's changes.
        num_samples: of the data source.
    """
    paper = _paper(cell)
    ours, theirs = _flat(asked), _flat(cell)
    changed = {
        key: ours.get(key) for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)
    }
    changed = {key: value for key, value in changed.items() if key not in _SAME_RUN}
    scaled = [f"{key}={value}" for key, value in changed.items() if not _is_open(key, paper)]
    chosen = [f"{key}={value}" for key, value in changed.items() if _is_open(key, paper)]
    if num_samples != paper.samples:
        scaled.append(f"a source of {num_samples:,} samples, not {paper.samples:,}")
    return Label((*paper.scaled, *scaled), tuple(chosen), (*scaled, *chosen))


def _is_open(key: str, paper: PaperSection) -> bool:
    names = (*paper.open, *_WHERE)
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _paper(cell: RunSettings) -> PaperSection:
    assert cell.paper is not None, "a cell has a [paper] table"
    return cell.paper


def _flat(settings: RunSettings) -> dict[str, Any]:
    """Every key of a run as section.key, but for those that no run reads."""

    def walk(prefix: str, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in content.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield f"{prefix}{key}", value

    content = msgspec.to_builtins(settings)
    return dict(walk("", {key: value for key, value in content.items() if key not in ("paper", "compare")}))


@dataclass(frozen=True)
class Outcome:
    """Our runs of a cell beside the paper's number.

    Attributes:
        name: of the cell.
        paper: its [paper] table.
        label: how far the runs are the paper's.
        runs: finished ones.
        traffic: of a cell about bytes, counted by seed.
    """

    name: str
    paper: PaperSection
    label: Label
    runs: Sequence[Played]
    traffic: Mapping[int, Traffic] = field(default_factory=dict)

    @property
    def ours(self) -> Spread | None:
        """What stands beside the paper's number."""
        return self.measured(self.paper.accuracy)

    def measured(self, measure: str) -> Spread | None:
        """Mean and standard deviation over seeds; None when no run has it."""
        counted = MEASURES[measure].counted
        if counted:
            return spread(counted(sent) for sent in self.traffic.values())
        return spread(MEASURES[measure].of(run) for run in self.runs)

    @property
    def verdict(self) -> str:
        """What may be claimed, in points of percent or in the measure's unit."""
        ours, paper, unit = self.ours, self.paper, MEASURES[self.paper.accuracy].unit
        if ours is None:
            return "nothing measured"
        gain, of = ours.mean - paper.value, "points" if unit == "%" else unit
        apart = f"{points(abs(gain), None, unit)} {of} {'above' if gain >= 0 else 'below'} the paper's"
        if self.label.scaled:
            return "no claim: a scaled run says nothing about the paper's number"
        if unit != "%" and points(ours.mean, None, unit) == points(paper.value, None, unit):
            return "the paper's number, to the last digit that it prints"
        if paper.deviation is None:
            return f"{apart}, which has no standard deviation"
        times = abs(ours.mean - paper.value) / paper.deviation if paper.deviation else float("inf")
        if times <= 1:
            return f"{apart}, within its standard deviation"
        return f"{apart}, {times:.1f} of its standard deviations"

    def as_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "cell": self.name,
            "paper": msgspec.to_builtins(self.paper),
            "ours": _spread(self.ours),
            "label": str(self.label),
            "verdict": self.verdict,
            "measures": {name: _spread(self.measured(name)) for name in measures_beside(self.paper.accuracy)},
            "runs": [
                {
                    "seed": run.seed,
                    ROUNDS.name: ROUNDS.of_run(run.summary),
                    **{name: MEASURES[name].of(run) for name in measures_beside(self.paper.accuracy)},
                    **{one.name: one.of_run(run.summary) for one in (BYTES_UP, BYTES_DOWN)},
                }
                for run in self.runs
            ],
        }


def _spread(found: Spread | None) -> dict[str, Any] | None:
    return {"mean": found.mean, "deviation": found.deviation, "seeds": found.count} if found else None


def points(value: float | None, deviation: float | None = None, unit: str = "%") -> str:
    """97.97 ± 0.75: percent, or what else it is measured in, as papers print it."""
    if value is None:
        return "–"  # noqa: RUF001 - an en dash, as in printed tables
    scale = 100 if unit == "%" else 1
    return f"{scale * value:.2f}" + (f" ± {scale * deviation:.2f}" if deviation is not None else "")
