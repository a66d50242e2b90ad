"""Results of several configurations: a table with one row for each run, and means over seeds. No I/O."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, VALIDATION_MEAN
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.tools.compare.columns import RunRow, Target, metrics, row_of
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.rows import Row, round_rows

SHARE_OF_BEST = 0.95
AS_ASKED = "as asked for"


@dataclass(frozen=True)
class Configuration:
    """Run settings with a label, such as a method with its options.

    Attributes:
        label: its name in tables and plots; it also names the folder of its runs.
        method: its [method] section, `name` included.
        changes: other settings that differ from the run file, by `section.key`.
        within: labels of configurations that limit the simulated time. A run of this configuration ends with
            the first round that closes later than all their runs with the same seed. () sets no limit.
    """

    label: str
    method: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    within: tuple[str, ...] = ()

    @property
    def options(self) -> str:
        """The settings that differ from the method's defaults and from the run file, in one line."""
        options = {key: value for key, value in self.method.items() if key != "name"}
        options |= {path.rpartition(".")[2]: value for path, value in self.changes.items()}
        return ", ".join(
            "ratios: as each chooses" if (key, value) == ("ratios", []) else f"{key} = {value}"
            for key, value in options.items()
        )

    def value(self, key: str) -> Any:
        """Return the value of a setting in which configurations differ, by `section.key`."""
        return self.method["name"] if key == "method.name" else self.changes[key]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of `count` values; the deviation of a single value is None."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Comparison:
    """Results of configurations on the same fleet and data.

    Attributes:
        name: name of the run file.
        configurations: configurations in the order of the tables.
        seeds: requested seeds.
        runs: finished runs.
        target: score whose cost is reported; None if no run has a score.
        keys: settings in which the configurations of a sweep differ.
    """

    name: str
    configurations: tuple[Configuration, ...]
    seeds: tuple[int, ...]
    runs: tuple[FinishedRun, ...]
    target: Target | None
    keys: tuple[str, ...] = ()

    @property
    def each(self) -> str:
        """The word for a configuration in texts, e.g. "method"."""
        return "combination" if self.keys else "method"

    @property
    def score(self) -> Score:
        """The score of all runs, which have the same task."""
        return self.runs[0].summary.judged_by if self.runs else ACCURACY

    @cached_property
    def rows(self) -> tuple[RunRow, ...]:
        """One row for each run."""
        return tuple(row_of(run, self.target) for run in self.runs)

    @cached_property
    def _by_label(self) -> dict[str, Configuration]:
        return {one.label: one for one in self.configurations}

    @property
    def ranked_by(self) -> Metric:
        """The metric that ranks a sweep: the validation score if any run has one, else the test score."""
        scores = [VALIDATION_MEAN.of_run(run.summary) for run in self.runs]
        return PERSONAL_MEAN if None in scores or not scores else VALIDATION_MEAN

    @property
    def ranked(self) -> "Comparison":
        """Return the comparison with the best configuration first, and those without a score last."""
        sign = better_by(self.score)
        scores = {one.label: self.spread(one.label, self.ranked_by) for one in self.configurations}
        place = {label: -sign * found.mean if found else float("inf") for label, found in scores.items()}
        return replace(
            self,
            configurations=tuple(sorted(self.configurations, key=lambda one: place[one.label])),
            runs=tuple(sorted(self.runs, key=lambda run: place[run.label])),
        )

    @property
    def shown(self) -> list[Configuration]:
        """The configurations with a finished run."""
        there = {run.label for run in self.runs}
        return [one for one in self.configurations if one.label in there]

    def of(self, label: str) -> list[FinishedRun]:
        """Return the finished runs of a configuration."""
        return [run for run in self.runs if run.label == label]

    def spread(self, label: str, metric: Metric) -> Spread | None:
        """Return mean and deviation of a metric over the seeds of a configuration; None if no run has the
        metric.
        """
        return spread(row.of(metric) for row in self.rows if row.label == label)

    def difference(self, label: str, other: str, metric: Metric) -> Spread | None:
        """Return mean and deviation of `label` minus `other` over their common seeds; None without common
        seeds.
        """
        mine, theirs = (
            {row.seed: row.of(metric) for row in self.rows if row.label == name} for name in (label, other)
        )
        pairs = ((mine[seed], theirs.get(seed)) for seed in mine)
        return spread(a - b for a, b in pairs if a is not None and b is not None)

    def identity(self, label: str) -> Row:
        """Return the table columns that identify a configuration."""
        one = self._by_label[label]
        settings = {key: as_cell(one.value(key)) for key in self.keys}
        return {"configuration": label, "method": one.method["name"], **settings}

    def run_rows(self) -> list[Row]:
        """Return all metrics, one row for each run."""
        columns = {metric.column(self.score): metric for metric in metrics(self.runs)}
        return [
            {
                **self.identity(row.label),
                "seed": row.seed,
                **{column: row.of(metric) for column, metric in columns.items()},
            }
            for row in self.rows
        ]

    def round_rows(self) -> list[Row]:
        """Return one row for each run and round, see `rows.round_rows`."""
        return [
            {**self.identity(run.label), "seed": run.seed, **row}
            for run in self.runs
            for row in round_rows(run)
        ]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and deviation of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def target_of(runs: Sequence[FinishedRun], score: float | None, each: str = "method") -> Target | None:
    """Return the requested target; without a request, 95 % of the best configuration's final personal score.

    If a lower score is better, the default target is the best score divided by 0.95.
    """
    if score is not None:
        return Target(score, AS_ASKED)
    scores: dict[str, list[float | None]] = {}
    for run in runs:
        scores.setdefault(run.label, []).append(PERSONAL_MEAN.of_run(run.summary))
    means = {label: found.mean for label, values in scores.items() if (found := spread(values))}
    if not means:
        return None
    sign = better_by(runs[0].summary.judged_by)
    best = max(means, key=lambda label: sign * means[label])
    share = SHARE_OF_BEST if sign > 0 else 1 / SHARE_OF_BEST
    reason = f"{share:.0%} of what the best {each} ended with ({best})".replace("%", " %")
    return Target(share * means[best], reason)


def as_cell(value: Any) -> Any:
    """Return a setting's value for a table: numbers and texts unchanged, other values as JSON."""
    return value if isinstance(value, int | float | str) else as_text(value)


def as_text(value: Any) -> str:
    """Return a setting's value as text for people."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
