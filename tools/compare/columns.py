"""The columns of a comparison: metrics of a run, and metrics that only a comparison has.

A run's metrics are entries of `coordinator.metrics.registry`. The other metrics are declared here in the same
form.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

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
from fleetune.tools.compare.finished_run import FinishedRun, Point, Side


@dataclass(frozen=True)
class Target:
    """The personal score for which costs are reported, and the reason for its choice."""

    score: float
    reason: str


Read = Callable[[FinishedRun, Target | None], Value]


@dataclass(frozen=True)
class RunRow:
    """One run as a row of the table of results. Accuracies are fractions of the devices' own test samples.

    Attributes:
        label, seed: configuration and seed of the run.
        values: values by metric name, in the order of the columns.
    """

    label: str
    seed: int
    values: Mapping[str, Value] = field(default_factory=dict)

    def of(self, metric: Metric) -> Value:
        """Return the value of a metric; None if it was not measured, not reached, or belongs to another
        method.
        """
        return self.values.get(metric.name)


_score = partial(Metric, unit=FRACTION, better="higher", judges=True)
_cost = partial(Metric, better="lower")

BEST_AFTER = _score("best_after", "best round", "The highest accuracy of the fleet after local training.")
_BEST_BEFORE = _score("best_before", "best before", "The highest accuracy before local training.")
_LAST_BEFORE = _score("last_before", "last before", "Before local training, the last round's participants.")
_LAST_AFTER = _score("last_after", "last after", "After local training, the last round's participants.")
_BEST_BEFORE_ROUND = Metric("best_before_round", "its round", "The round of that accuracy.", COUNT)
_BEST_AFTER_ROUND = Metric("best_after_round", "its round", "The round of that accuracy.", COUNT)
ROUNDS_TO_TARGET = _cost("rounds_to_target", "rounds", "Rounds until the target was reached.", COUNT)
BYTES_UP_TO_TARGET = _cost("bytes_up_to_target", "sent up", "Payload up until the target was reached.", BYTES)
BYTES_DOWN_TO_TARGET = _cost(
    "bytes_down_to_target", "sent down", "Payload down until the target was reached.", BYTES
)
SECONDS_TO_TARGET = _cost("seconds_to_target", "time", "Time until the target was reached.", SECONDS)
JOULES_TO_TARGET = _cost(
    "joules_to_target",
    "energy",
    "Drawn by all boards until the target was reached, idling included.",
    JOULES,
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


def _of_run(metric: Metric, otherwise: Metric | None = None) -> tuple[Metric, Read]:
    """Return a metric and the function that reads it from summary.json, or reads `otherwise` if it is
    missing.
    """

    def read(run: FinishedRun, _: Target | None) -> Value:
        found = metric.of_run(run.summary)
        return otherwise.of_run(run.summary) if found is None and otherwise else found

    return metric, read


def _of_best(side: Side, part: int) -> Read:
    return lambda run, _: best_point(run.settled, side, better_by(run.summary.judged_by))[part]


def _of_last(metric: Metric) -> Read:
    return lambda run, _: metric.of_round(run.records[-1]) if run.records else None


def _at_target(read: Callable[[Point], Value]) -> Read:
    def of(run: FinishedRun, target: Target | None) -> Value:
        sign = better_by(run.summary.judged_by)
        for point in run.settled if target else ():
            if target and point.after is not None and sign * (point.after - target.score) >= 0:
                return read(point)
        return None

    return of


COLUMNS: tuple[tuple[Metric, Read], ...] = (
    *map(_of_run, (ROUNDS, TOOK_PART, PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST_DECILE)),
    *map(_of_run, (PERSONAL_WORST, BEFORE_MEAN, BEFORE_WEIGHTED, AFTER_MEAN, AFTER_WEIGHTED)),
    _of_run(PERSONAL_MEAN_ALL, PERSONAL_MEAN),
    _of_run(PERSONAL_WEIGHTED_ALL, PERSONAL_WEIGHTED),
    _of_run(VALIDATION_MEAN),
    (_BEST_BEFORE, _of_best("before", 0)),
    (_BEST_BEFORE_ROUND, _of_best("before", 1)),
    (BEST_AFTER, _of_best("after", 0)),
    (_BEST_AFTER_ROUND, _of_best("after", 1)),
    (_LAST_BEFORE, _of_last(BEFORE)),
    (_LAST_AFTER, _of_last(AFTER)),
    *map(_of_run, (BYTES_UP, BYTES_DOWN, BYTES_UP_DENSE, BYTES_DOWN_DENSE)),
    *map(_of_run, (BYTES_UP_PAPER, BYTES_DOWN_PAPER, DURATION)),
    (ROUNDS_TO_TARGET, _at_target(lambda point: point.number)),
    (BYTES_UP_TO_TARGET, _at_target(lambda point: point.up)),
    (BYTES_DOWN_TO_TARGET, _at_target(lambda point: point.down)),
    (SECONDS_TO_TARGET, _at_target(lambda point: point.closed_s)),
    (JOULES_TO_TARGET, _at_target(lambda point: point.joules)),
)


def _others() -> list[Metric]:
    """Return the metrics that comparisons show but that have no fixed place among the columns."""
    return shown_at("comparison", {metric.name for metric, _ in COLUMNS})


def metrics(runs: Iterable[FinishedRun] = ()) -> list[Metric]:
    """Return the columns of runs.csv; with `runs`, also the diagnostics that their methods report."""
    return [*(metric for metric, _ in COLUMNS), *_others(), *diagnostics(runs)]


def accuracies(runs: Iterable[FinishedRun]) -> tuple[Metric, ...]:
    """Return the columns of the table of accuracies.

    The columns include a mean over all devices if some took no part, and validation scores if a run has any.
    """
    summaries = [run.summary for run in runs]
    more = (
        *[PERSONAL_MEAN_ALL] * any(summary.who_took_part for summary in summaries),
        *[VALIDATION_MEAN] * any(VALIDATION_MEAN.of_run(summary) is not None for summary in summaries),
    )
    return (*ACCURACIES, *more)


def costs(runs: Iterable[FinishedRun]) -> tuple[Metric, ...]:
    """Return the columns of the table of costs."""
    summaries = [run.summary for run in runs]
    known = (one for one in _PAPER_COSTS if any(one.of_run(summary) is not None for summary in summaries))
    return (*_COSTS, *known, *_others())


def diagnostics(runs: Iterable[FinishedRun]) -> list[Metric]:
    """Return the diagnostics that the methods of these runs report."""
    return metrics_in(run.summary for run in runs)


def row_of(run: FinishedRun, target: Target | None) -> RunRow:
    """Return all metrics of a run."""
    entries = (*COLUMNS, *map(_of_run, [*_others(), *diagnostics([run])]))
    return RunRow(run.label, run.seed, {metric.name: read(run, target) for metric, read in entries})


def best_point(points: Iterable[Point], side: Side, sign: int = 1) -> tuple[float | None, int | None]:
    """Return the best score and its round, the earliest of equal ones; None without a score.

    `sign` is 1 if a higher score is better, else -1 (`better_by`).
    """
    scored = [(value, point.number) for point in points if (value := getattr(point, side)) is not None]
    return max(scored, key=lambda pair: (sign * pair[0], -pair[1]), default=(None, None))
