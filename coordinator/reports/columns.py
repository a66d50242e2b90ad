"""Columns of tables: each shows one metric, or several metrics in one cell."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, Place
from fleetune.coordinator.metrics.registry import shown_at
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.protocols.tasks.scores import ACCURACY, Score

_NARROW = 9  # width of a line of a narrow head, in characters
Row = Summary | DeviceSummary


@dataclass(frozen=True)
class Column:
    """A column of a table, with one or several metrics.

    Attributes:
        head: text over the column.
        metrics: metrics in the column.
        join: function that formats the metrics' values as one text; None puts each value on its own line.
    """

    head: str
    metrics: tuple[Metric, ...]
    join: Callable[..., str] | None = None

    def for_score(self, score: Score) -> "Column":
        """Return the column with its titles for a run whose models are judged by `score`."""
        metrics = tuple(metric.for_score(score) for metric in self.metrics)
        if metrics == self.metrics:
            return self
        join = metrics[0].unit.change if self.join is readable.change else self.join
        return replace(self, head=self.head.replace(ACCURACY.title, score.title), metrics=metrics, join=join)

    def of(self, row: Row) -> str:
        """Return the text of the column's cell for a run or a device."""
        values = [value_of(metric, row) for metric in self.metrics]
        if self.join:
            return self.join(*values)
        return "\n".join(one.unit.text(value) for one, value in zip(self.metrics, values, strict=True))


def wide(metric: Metric) -> Column:
    """Return a metric's column for a wide table."""
    return Column(metric.title, (metric,))


def narrow(metric: Metric) -> Column:
    """Return a metric's column for a terminal table; the head wraps into short lines."""
    return Column(fill(metric.head, _NARROW, break_long_words=False), (metric,))


def other_metrics(place: Place, by_hand: Sequence[Column], rows: Iterable[Row]) -> list[Metric]:
    """Return the metrics shown in a place that no column of `by_hand` contains and that any row has."""
    placed = {metric.name for one in by_hand for metric in one.metrics}
    known = list(rows)
    return [one for one in shown_at(place, placed) if any(value_of(one, row) is not None for row in known)]


def value_of(metric: Metric, row: Row) -> float | None:
    """Return the value of a metric for a run or a device; None if unknown."""
    return metric.of_run(row) if isinstance(row, Summary) else metric.of_device(row)
