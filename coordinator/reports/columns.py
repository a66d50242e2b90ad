"""Columns of tables for people: a metric, or several that share a column."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, Place
from fleetune.coordinator.metrics.registry import shown_at
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.protocols.tasks.scores import ACCURACY, Score

_NARROW = 9  # letters of a line of a narrow head
Row = Summary | DeviceSummary


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: over the column.
        metrics: that stand in it.
        join: writes their values as one text; None: each stands on its own line, as its unit writes it.
    """

    head: str
    metrics: tuple[Metric, ...]
    join: Callable[..., str] | None = None

    def for_score(self, score: Score) -> "Column":
        """The column in a run whose models are judged by `score`."""
        metrics = tuple(metric.for_score(score) for metric in self.metrics)
        if metrics == self.metrics:
            return self
        join = metrics[0].unit.change if self.join is readable.change else self.join
        return replace(self, head=self.head.replace(ACCURACY.title, score.title), metrics=metrics, join=join)

    def of(self, row: Row) -> str:
        """The cell of a run or of a device."""
        values = [value_of(metric, row) for metric in self.metrics]
        if self.join:
            return self.join(*values)
        return "\n".join(one.unit.text(value) for one, value in zip(self.metrics, values, strict=True))


def wide(metric: Metric) -> Column:
    """A metric's own column where there is room."""
    return Column(metric.title, (metric,))


def narrow(metric: Metric) -> Column:
    """A metric's own column in a terminal; its head is broken into short lines."""
    return Column(fill(metric.head, _NARROW, break_long_words=False), (metric,))


def other_metrics(place: Place, by_hand: Sequence[Column], rows: Iterable[Row]) -> list[Metric]:
    """Metrics shown in a place that no column by hand has, and that any of these rows has a value of."""
    placed = {metric.name for one in by_hand for metric in one.metrics}
    known = list(rows)
    return [one for one in shown_at(place, placed) if any(value_of(one, row) is not None for row in known)]


def value_of(metric: Metric, row: Row) -> float | None:
    """A metric of a run or of a device."""
    return metric.of_run(row) if isinstance(row, Summary) else metric.of_device(row)
