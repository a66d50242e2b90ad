"""Definitions of the papers' numbers, and the same numbers of our runs. No I/O.

Papers differ in which models they test, when, and over which devices they average. `MEASURES` has these
definitions by name; [paper] accuracy names the one of a cell. Accuracies are fractions on the devices' own
test samples. Traffic has two definitions: the seconds of payloads on their links, and bytes as papers count
them (`tools.papers.traffic`).
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
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.papers.traffic import Traffic

Value = float | None
Average = Callable[[Collection[Measures]], Value]
OfRun = Callable[[FinishedRun], Value]

_SAME_RUN = (
    "run.name",
    "run.seed",
    "run.final_evaluation",
    "data.source",
)  # the size of the data set is compared instead of its source
_WHERE = ("fleet.trainer", "fleet.train_on")  # a paper's cell does not include the hardware


@dataclass(frozen=True)
class Measure:
    """One definition of a paper's number.

    Attributes:
        about: description.
        of: function that returns the value of a finished run; None if it was not measured.
        unit: `%` is a fraction; MB are 2^20 bytes, Gbit 10^9 bits.
        counted: function that reads the value from a method's traffic, without training; `of` then returns
            None.
    """

    about: str
    of: OfRun
    unit: Literal["%", "s", "MB", "Gbit"] = "%"
    counted: Callable[[Traffic], float] | None = None


def _after_mean(devices: Collection[Measures]) -> Value:
    return mean(one.after for one in devices)


def _after_weighted(devices: Collection[Measures]) -> Value:
    return weighted_mean((one.after, one.num_samples) for one in devices)


def _before_mean(devices: Collection[Measures]) -> Value:
    return mean(one.before for one in devices)


def _best_of_fleet(average: Average) -> OfRun:
    """Return a function that returns the highest score of the whole fleet, each device with its latest reply.

    Rounds count from the one by which half of all devices had taken part (`FinishedRun.settled`).
    """
    return lambda run: _highest(average(devices) for devices in _fleet(run))


def _fleet(run: FinishedRun) -> Iterator[list[Measures]]:
    settled = {point.number for point in run.settled}
    latest: dict[str, Measures] = {}
    for record in run.records:
        latest.update({device: reply.measures for device, reply in record.devices.items()})
        if record.number in settled:
            yield list(latest.values())


def _best_of_participants(average: Average) -> OfRun:
    """Return a function that returns the highest mean score of a round's participants."""
    return lambda run: _highest(
        average([reply.measures for reply in record.devices.values()]) for record in run.records
    )


def _highest(values: Iterator[Value]) -> Value:
    return max((value for value in values if value is not None), default=None)


def _at_the_end(*metrics: Metric) -> OfRun:
    """Return a function that returns the first of these metrics that summary.json has."""

    def of(run: FinishedRun) -> Value:
        values = (metric.of_run(run.summary) for metric in metrics)
        return next((value for value in values if value is not None), None)

    return of


def _seconds_up(run: FinishedRun) -> Value:
    """Seconds for which a device sent updates, in all rounds together, mean over devices."""
    by_device: dict[str, float] = {}
    for record in run.records:
        for device, reply in record.devices.items():
            by_device[device] = by_device.get(device, 0.0) + (reply.actual.upload_s or 0.0)
    return mean(by_device.values())


def _counted(about: str, unit: Literal["MB", "Gbit"], counted: Callable[[Traffic], float]) -> Measure:
    return Measure(about, lambda _: None, unit, counted)


MEASURES: Mapping[str, Measure] = {
    "best-mean": Measure("best round, mean over all devices", _best_of_fleet(_after_mean)),
    "best-weighted": Measure("best round, weighted by samples", _best_of_fleet(_after_weighted)),
    "best-participants-mean": Measure(
        "best round, mean over its participants", _best_of_participants(_after_mean)
    ),
    "best-participants-weighted": Measure(
        "best round, its participants weighted by samples", _best_of_participants(_after_weighted)
    ),
    "best-before-mean": Measure("best round, mean, before local training", _best_of_fleet(_before_mean)),
    "final-mean": Measure(
        "after the last round, mean over all devices", _at_the_end(PERSONAL_MEAN_ALL, PERSONAL_MEAN)
    ),
    "final-weighted": Measure(
        "after the last round, weighted by samples", _at_the_end(PERSONAL_WEIGHTED_ALL, PERSONAL_WEIGHTED)
    ),
    "final-before-mean": Measure(
        "after the last round, mean, before one more round's training", _at_the_end(BEFORE_MEAN)
    ),
    "seconds-up": Measure("sending updates, all rounds, mean over devices", _seconds_up, "s"),
    "up-mb": _counted("an update, mean of all rounds", "MB", lambda sent: sent.up / 2**20),
    "down-mb": _counted("a task, mean of all rounds but the first", "MB", lambda sent: sent.down / 2**20),
    "total-gbit": _counted("all tasks and updates of a run", "Gbit", lambda sent: 8e-9 * sent.total),
}


def measures_with(name: str) -> list[str]:
    """Return the measures that a result shows: the cell's own first, then the others of the same runs."""
    if MEASURES[name].counted:
        return [name]
    return sorted(
        (one for one, measure in MEASURES.items() if not measure.counted), key=lambda one: one != name
    )


@dataclass(frozen=True)
class Label:
    """Differences between a run and the paper's cell.

    Attributes:
        scaled: settings that differ from those the paper gives; () if all are the same.
        chosen: settings that the paper leaves open and that differ from the cell's file.
        changes: all settings that differ from the cell's file.
    """

    scaled: tuple[str, ...]
    chosen: tuple[str, ...]
    changes: tuple[str, ...]

    def __str__(self) -> str:
        if self.scaled:
            return f"scaled: {'; '.join((*self.scaled, *self.chosen))}"
        return f"full, another choice of ours: {'; '.join(self.chosen)}" if self.chosen else "full"


def label_of(cell: RunSettings, asked: RunSettings, num_samples: int) -> Label:
    """Compare the settings of a run with those of the cell's file.

    Args:
        cell: the file's settings, [paper] included.
        asked: the same with the user's changes.
        num_samples: number of samples of the data source.
    """
    paper = paper_of(cell)
    ours, theirs = _flat(asked), _flat(cell)
    keys = sorted(ours.keys() | theirs.keys())
    changed = [key for key in keys if ours.get(key) != theirs.get(key) and key not in _SAME_RUN]
    scaled = [f"{key}={ours.get(key)}" for key in changed if not _is_open(key, paper)]
    chosen = [f"{key}={ours.get(key)}" for key in changed if _is_open(key, paper)]
    if num_samples != paper.samples:
        scaled.append(f"a source of {num_samples:,} samples, not {paper.samples:,}")
    return Label((*paper.scaled, *scaled), tuple(chosen), (*scaled, *chosen))


def paper_of(cell: RunSettings) -> PaperSection:
    """Return the [paper] table of a cell."""
    assert cell.paper is not None, "a cell has a [paper] table"
    return cell.paper


def _is_open(key: str, paper: PaperSection) -> bool:
    names = (*paper.open, *_WHERE)
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(settings: RunSettings) -> dict[str, Any]:
    """Return every key of a run by `section.key`, without those that no run uses."""

    def walk(prefix: str, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in content.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield f"{prefix}{key}", value

    content = msgspec.to_builtins(settings)
    return dict(walk("", {key: value for key, value in content.items() if key not in ("paper", "compare")}))


@dataclass(frozen=True)
class CellResult:
    """Our runs of a cell, and the paper's number.

    Attributes:
        name: name of the cell.
        paper: its [paper] table.
        label: differences between the runs and the paper's cell.
        runs: finished runs.
        traffic: counted traffic by seed, for a cell about bytes.
    """

    name: str
    paper: PaperSection
    label: Label
    runs: Sequence[FinishedRun]
    traffic: Mapping[int, Traffic] = field(default_factory=dict)

    @property
    def ours(self) -> Spread | None:
        """Our value of the paper's number."""
        return self.measured(self.paper.accuracy)

    @property
    def unit(self) -> str:
        """The unit of both numbers."""
        return MEASURES[self.paper.accuracy].unit

    @property
    def texts(self) -> tuple[str, str]:
        """The paper's number and ours as texts."""
        return number(self.paper.value, self.paper.deviation, self.unit), number_of(self.ours, self.unit)

    def measured(self, measure: str) -> Spread | None:
        """Mean and standard deviation over seeds; None if no run has the measure."""
        counted = MEASURES[measure].counted
        if counted:
            return spread(counted(sent) for sent in self.traffic.values())
        return spread(MEASURES[measure].of(run) for run in self.runs)

    @property
    def verdict(self) -> str:
        """The comparison of both numbers in words, in percentage points or in the measure's unit."""
        ours, paper, unit = self.ours, self.paper, self.unit
        if ours is None:
            return "nothing measured"
        gain, of = ours.mean - paper.value, "points" if unit == "%" else unit
        apart = f"{number(abs(gain), None, unit)} {of} {'above' if gain >= 0 else 'below'} the paper's"
        if self.label.scaled:
            return "no claim: a scaled run says nothing about the paper's number"
        if unit != "%" and number(ours.mean, None, unit) == number(paper.value, None, unit):
            return "the paper's number, to the last digit that it prints"
        if paper.deviation is None:
            return f"{apart}, which has no standard deviation"
        times = abs(gain) / paper.deviation if paper.deviation else float("inf")
        if times <= 1:
            return f"{apart}, within its standard deviation"
        return f"{apart}, {times:.1f} of its standard deviations"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of result.json."""
        names = measures_with(self.paper.accuracy)
        return {
            "cell": self.name,
            "paper": msgspec.to_builtins(self.paper),
            "ours": spread_as_dict(self.ours),
            "label": str(self.label),
            "verdict": self.verdict,
            "measures": {name: spread_as_dict(self.measured(name)) for name in names},
            "runs": [
                {
                    "seed": run.seed,
                    ROUNDS.name: ROUNDS.of_run(run.summary),
                    **{name: MEASURES[name].of(run) for name in names},
                    **{one.name: one.of_run(run.summary) for one in (BYTES_UP, BYTES_DOWN)},
                }
                for run in self.runs
            ],
        }


def spread_as_dict(found: Spread | None) -> dict[str, Any] | None:
    """Mean, deviation and number of seeds as a dict."""
    return {"mean": found.mean, "deviation": found.deviation, "seeds": found.count} if found else None


def number_of(found: Spread | None, unit: str) -> str:
    """Return a mean and its deviation as papers print them."""
    return number(found.mean, found.deviation, unit) if found else number(None)


def number(value: Value, deviation: Value = None, unit: str = "%") -> str:
    """Return a number as papers print it, in percent or in its unit: 97.97 ± 0.75."""
    if value is None:
        return "–"  # noqa: RUF001 - an en dash, as in printed tables
    scale = 100 if unit == "%" else 1
    return f"{scale * value:.2f}" + (f" ± {scale * deviation:.2f}" if deviation is not None else "")
