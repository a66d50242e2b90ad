"""What runs.csv and tables say of a finished run: its own metrics, and what only a comparison asks.

The former are entries of `coordinator.metrics.registry`; the others stand here, as entries alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fleetune.coordinator.metrics.diagnostics import metrics_in
from fleetune.coordinator.metrics.metric import BYTES, COUNT, FRACTION, JOULES, SECONDS, Metric, Value
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import (
    AFTER,
    AFTER_MEAN,
    AFTER_WEIGHTED,
    BEFORE,
    BEFORE_MEAN,
    BEFORE_WEIGHTED,
    BYTES_DOWN,
    BYTES_DOWN_DENSE,
    BYTES_DOWN_PAPER,
    BYTES_UP,
    BYTES_UP_DENSE,
    BYTES_UP_PAPER,
    DURATION,
    PERSONAL_MEAN,
    PERSONAL_MEAN_ALL,
    PERSONAL_WEIGHTED,
    PERSONAL_WEIGHTED_ALL,
    PERSONAL_WORST,
    PERSONAL_WORST_DECILE,
    ROUNDS,
    TOOK_PART,
    VALIDATION_MEAN,
    shown_at,
)
from fleetune.tools.compare.played import Played, Point, Side


@dataclass(frozen=True)
class Target:
    """The personal score whose cost is asked for, and why that one."""

    score: float
    reason: str


@dataclass(frozen=True)
class Figure:
    """A metric that is read from a finished run; `of` is given the target, too."""

    metric: Metric
    of: Callable[[Played, Target | None], Value]


@dataclass(frozen=True)
class Figures:
    """One run in figures; a line of runs.csv. Accuracies are fractions on the devices' own test samples.

    Attributes:
        contender, method, seed: which run.
        values: by metric, in the order of the columns.
    """

    contender: str
    method: str
    seed: int
    values: Mapping[str, Value]

    def of(self, metric: Metric) -> Value:
        """Its value; None: not measured, not reached, or another method's."""
        return self.values.get(metric.name)


BEST_AFTER = Metric(
    "best_after",
    "best round",
    "The highest accuracy after local training that the fleet stood at.",
    FRACTION,
    "higher",
    judges=True,
)
ROUNDS_TO_TARGET = Metric(
    "rounds_to_target", "rounds", "Rounds until the target was reached.", COUNT, "lower"
)
BYTES_UP_TO_TARGET = Metric(
    "bytes_up_to_target", "sent up", "Payload up until the target was reached.", BYTES, "lower"
)
BYTES_DOWN_TO_TARGET = Metric(
    "bytes_down_to_target", "sent down", "Payload down until the target was reached.", BYTES, "lower"
)
SECONDS_TO_TARGET = Metric(
    "seconds_to_target", "time", "Time until the target was reached.", SECONDS, "lower"
)
JOULES_TO_TARGET = Metric(
    "joules_to_target",
    "energy",
    "Drawn by all boards until the target was reached, idling included.",
    JOULES,
    "lower",
)
_BEST_BEFORE = Metric(
    "best_before",
    "best before",
    "The highest accuracy before local training.",
    FRACTION,
    "higher",
    judges=True,
)
_BEST_BEFORE_ROUND = Metric("best_before_round", "its round", "In which round that was.", COUNT)
_BEST_AFTER_ROUND = Metric("best_after_round", "its round", "In which round that was.", COUNT)
_LAST_BEFORE = Metric(
    "last_before",
    "last before",
    "Before local training, the last round's participants.",
    FRACTION,
    "higher",
    judges=True,
)
_LAST_AFTER = Metric(
    "last_after",
    "last after",
    "After local training, the last round's participants.",
    FRACTION,
    "higher",
    judges=True,
)

ACCURACIES = (PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST_DECILE, BEST_AFTER, BEFORE_MEAN, AFTER_MEAN)
TO_TARGET = (
    ROUNDS_TO_TARGET,
    BYTES_UP_TO_TARGET,
    BYTES_DOWN_TO_TARGET,
    SECONDS_TO_TARGET,
    JOULES_TO_TARGET,
)
_COSTS = (ROUNDS, TOOK_PART, BYTES_UP, BYTES_DOWN, DURATION)
_PAPER_COSTS = (BYTES_UP_PAPER, BYTES_DOWN_PAPER)


def _of_run(metric: Metric) -> Figure:
    """As it stands in summary.json."""
    return Figure(metric, lambda run, _: metric.of_run(run.summary))


def _of_all(metric: Metric, same: Metric) -> Callable[[Played, Target | None], Value]:
    """Over all devices; where all took part, the `same` as over these."""

    def of(run: Played, _: Target | None) -> Value:
        found = metric.of_run(run.summary)
        return same.of_run(run.summary) if found is None else found

    return of


def _of_best(side: Side, part: int) -> Callable[[Played, Target | None], Value]:
    return lambda run, _: best_point(run.settled, side, better_by(run.summary.judged_by))[part]


def _of_last(metric: Metric) -> Callable[[Played, Target | None], Value]:
    return lambda run, _: metric.of_round(run.records[-1]) if run.records else None


def _at_target(read: Callable[[Point], float | None]) -> Callable[[Played, Target | None], Value]:
    def of(run: Played, target: Target | None) -> Value:
        sign = better_by(run.summary.judged_by)
        told = ((point, point.after) for point in run.settled if target and point.after is not None)
        reached = (point for point, after in told if target and sign * (after - target.score) >= 0)
        return next((read(point) for point in reached), None)

    return of


FIGURES = (
    *map(_of_run, (ROUNDS, TOOK_PART, PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST_DECILE)),
    *map(_of_run, (PERSONAL_WORST, BEFORE_MEAN, BEFORE_WEIGHTED, AFTER_MEAN, AFTER_WEIGHTED)),
    Figure(PERSONAL_MEAN_ALL, _of_all(PERSONAL_MEAN_ALL, PERSONAL_MEAN)),
    Figure(PERSONAL_WEIGHTED_ALL, _of_all(PERSONAL_WEIGHTED_ALL, PERSONAL_WEIGHTED)),
    _of_run(VALIDATION_MEAN),
    Figure(_BEST_BEFORE, _of_best("before", 0)),
    Figure(_BEST_BEFORE_ROUND, _of_best("before", 1)),
    Figure(BEST_AFTER, _of_best("after", 0)),
    Figure(_BEST_AFTER_ROUND, _of_best("after", 1)),
    Figure(_LAST_BEFORE, _of_last(BEFORE)),
    Figure(_LAST_AFTER, _of_last(AFTER)),
    *map(_of_run, (BYTES_UP, BYTES_DOWN, BYTES_UP_DENSE, BYTES_DOWN_DENSE)),
    *map(_of_run, (BYTES_UP_PAPER, BYTES_DOWN_PAPER, DURATION)),
    Figure(ROUNDS_TO_TARGET, _at_target(lambda point: point.number)),
    Figure(BYTES_UP_TO_TARGET, _at_target(lambda point: point.up)),
    Figure(BYTES_DOWN_TO_TARGET, _at_target(lambda point: point.down)),
    Figure(SECONDS_TO_TARGET, _at_target(lambda point: point.closed_s)),
    Figure(JOULES_TO_TARGET, _at_target(lambda point: point.joules)),
)


def _others() -> list[Metric]:
    """What else the table of metrics shows in a comparison: behind the columns that have their place."""
    return shown_at("comparison", {figure.metric.name for figure in FIGURES})


def metrics() -> list[Metric]:
    """The columns of runs.csv behind contender, method and seed."""
    return [*(figure.metric for figure in FIGURES), *_others()]


def accuracies(runs: Iterable[Played]) -> tuple[Metric, ...]:
    """What the table of accuracies of these runs shows: also over all devices where not all took part, and
    on validation samples where there are some.
    """
    summaries = [run.summary for run in runs]
    more = (
        *[PERSONAL_MEAN_ALL] * any(summary.who_took_part for summary in summaries),
        *[VALIDATION_MEAN] * any(VALIDATION_MEAN.of_run(summary) is not None for summary in summaries),
    )
    return (*ACCURACIES, *more)


def costs(runs: Iterable[Played]) -> tuple[Metric, ...]:
    """What the table of costs of these runs shows."""
    summaries = [run.summary for run in runs]
    told = (one for one in _PAPER_COSTS if any(one.of_run(summary) is not None for summary in summaries))
    return (*_COSTS, *told, *_others())


def inside(runs: Iterable[Played]) -> list[Metric]:
    """What the methods of these runs tell of their inner workings; the last columns of the CSV files."""
    return metrics_in(run.summary for run in runs)


def figures_of(run: Played, target: Target | None) -> Figures:
    """All figures of a run."""
    figures = (*FIGURES, *map(_of_run, [*_others(), *inside([run])]))
    values = {figure.metric.name: figure.of(run, target) for figure in figures}
    return Figures(run.label, run.summary.method, run.seed, values)


def best_point(points: Iterable[Point], side: Side, sign: int = 1) -> tuple[float | None, int | None]:
    """The best score and its round, of equal ones the earliest; `sign` as of `outcome.better_by`."""
    scored = [(value, point.number) for point in points if (value := getattr(point, side)) is not None]
    return max(scored, key=lambda pair: (sign * pair[0], -pair[1]), default=(None, None))
