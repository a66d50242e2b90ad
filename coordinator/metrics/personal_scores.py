"""What tables, plots and the page read off a summary beyond what stands in it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.averages import mean, weighted_mean
from fleetune.coordinator.metrics.metric import Metric, Place, Value
from fleetune.coordinator.metrics.registry import shown_at, title_in_predictions
from fleetune.coordinator.metrics.summary import (
    DeviceSummary,
    Errors,
    PredictionErrors,
    Summary,
    over_participants,
)
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols import errors
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.protocols.wire.payloads import Measures

LOCAL = "local-only"

_REFUSED = {
    "late": "update for a round that was closed already",
    "stale": "update for an attempt that was abandoned",
    "duplicate": "second answer to the same task",
    "foreign": "update from a device that was not asked",
    "unknown": "update that nobody was asked for yet",
    "abandoned-deadline": "attempt at a round given up: too few had replied by the deadline",
    "abandoned-too-few": "attempt at a round given up: too few devices were left to reply",
    "declined": "round that a device declined",
    "refused": "device that would not join the run",
    "gone": "time a device went away",
    "share-cut": "update that counted as fewer samples than it claimed (round.max_share)",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: a metric, or several that share it.

    Attributes:
        head: over the column.
        metrics: what stands in it.
        join: their values as a text; None: each as its unit says, one below the other.
    """

    head: str
    metrics: tuple[Metric, ...]
    join: Callable[..., str] | None = None

    def seen_as(self, score: Score) -> "Column":
        """As a run says it whose models are judged by `score`."""
        metrics = tuple(metric.seen_as(score) for metric in self.metrics)
        if metrics == self.metrics:
            return self
        head = self.head.replace(ACCURACY.title, score.title)
        join = metrics[0].unit.change if self.join is readable.change else self.join
        return Column(head, metrics, join)

    def of_run(self, summary: Summary) -> str:
        """The run's cell."""
        return self._text([metric.of_run(summary) for metric in self.metrics])

    def of_device(self, row: DeviceSummary) -> str:
        """A device's cell."""
        return self._text([metric.of_device(row) for metric in self.metrics])

    def _text(self, values: Sequence[Value]) -> str:
        if self.join:
            return self.join(*values)
        pairs = zip(self.metrics, values, strict=True)
        return "\n".join(metric.unit.text(value) for metric, value in pairs)


def other_run_columns(place: Place, by_hand: Sequence[Column], summaries: Iterable[Summary]) -> list[Column]:
    """Of the metrics that are shown there beside those by hand, and known of any of these runs."""
    runs = list(summaries)
    others = (one for one in _others(place, by_hand) if any(one.of_run(run) is not None for run in runs))
    return [column(one, place) for one in others]


def other_device_columns(
    place: Place, by_hand: Sequence[Column], rows: Iterable[DeviceSummary]
) -> list[Column]:
    """Of the metrics that are shown there beside those by hand, and known of any of these devices."""
    devices = list(rows)
    others = (
        one for one in _others(place, by_hand) if any(one.of_device(row) is not None for row in devices)
    )
    return [column(one, place) for one in others]


def column(metric: Metric, place: Place) -> Column:
    """A metric's own column."""
    return Column(metric.head(place), (metric,))


def _others(place: Place, by_hand: Sequence[Column]) -> list[Metric]:
    return shown_at(place, {metric.name for one in by_hand for metric in one.metrics})


def with_personal(summary: Summary, records: Sequence[RoundRecord]) -> Summary:
    """The summary, its personal accuracies filled in from each device's last reply.

    A run without a final evaluation has none; `after` of the last reply is the same quantity: how the
    personal model did when it was last trained.
    """
    last = {
        device: reply.measures
        for record in records
        if not record.final_evaluation
        for device, reply in record.devices.items()
    }
    rows = {device: _filled(row, last.get(device)) for device, row in summary.by_device.items()}
    judged = summary.judged
    if judged.personal_mean is None:
        judged = replace(
            judged,
            personal_mean=mean(row.personal for row in rows.values()),
            personal_weighted=weighted_mean((row.personal, row.num_samples or 0) for row in rows.values()),
        )
        judged = over_participants(judged, rows.values())
    return replace(summary.with_judged(judged), by_device=rows)


def _filled(row: DeviceSummary, last: Measures | None) -> DeviceSummary:
    if row.personal is not None or last is None:
        return row
    return replace(row, personal=last.after, num_samples=last.num_samples)


def personal(summary: Summary) -> dict[DeviceId, float]:
    """Personal score of every device that has one."""
    rows = summary.by_device.items()
    return {device: row.personal for device, row in rows if row.personal is not None}


def trained(summary: Summary) -> dict[DeviceId, float]:
    """Personal score of every device that took part and has one."""
    rows = summary.by_device
    return {device: score for device, score in personal(summary).items() if rows[device].took_part}


def gains(summary: Summary, rival: Summary) -> dict[DeviceId, float]:
    """By how much each device's personal score is better than the rival's, of devices that took part in both
    runs.
    """
    theirs, sign = trained(rival), better_by(summary.judged_by)
    ours = trained(summary).items()
    return {device: sign * (value - theirs[device]) for device, value in ours if device in theirs}


def better_by(score: Score) -> int:
    """1 where more is better, -1 where less is."""
    return 1 if score.better == "higher" else -1


def yardstick(rivals: Mapping[str, Summary]) -> str | None:
    """The rival that a device's gain is measured against: local-only where it is there."""
    return LOCAL if LOCAL in rivals else next(iter(rivals), None)


def ratio_of(summary: Summary, device: DeviceId) -> float | None:
    """The latest ratio of a device."""
    if used := summary.ratios.get(device):
        return used[-1]
    row = summary.by_device.get(device)
    return row.ratio if row else None


def ratio_range(summary: Summary, device: DeviceId) -> tuple[float, float] | None:
    """The least and the greatest ratio of a device that used several; None: it used one, or none."""
    used = summary.ratios.get(device, [])
    return (min(used), max(used)) if len(set(used)) > 1 else None


def prediction_rows(summary: Summary) -> list[list[str]]:
    """Of each metric its name, replies, median error and worst decile; the latter two after five rounds."""
    rows = []
    for name, found in (summary.predicted_vs_actual or {}).items():
        known = found or PredictionErrors()
        overall, learned = known.overall or Errors(), known.after_five_rounds or Errors()
        found_errors = overall.median, overall.worst_decile, learned.median, learned.worst_decile
        rows.append([title_in_predictions(name), f"{overall.pairs:,}", *map(readable.error, found_errors)])
    return rows


def refused(summary: Summary) -> list[tuple[str, int, str]]:
    """(kind, how often, what it means), the most frequent first.

    The engine counts the replies it drops, too; what the ledger names already is not said twice.
    """
    counts = {kind: count for kind, count in summary.refused.items() if count}
    named = {"abandoned" if kind.startswith("abandoned-") else kind for kind in counts}
    rows = [
        (kind.removeprefix("engine-"), count, _meaning(kind.removeprefix("engine-")))
        for kind, count in counts.items()
        if not (kind.startswith("engine-") and kind.removeprefix("engine-") in named)
    ]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _meaning(kind: str) -> str:
    error = getattr(errors, kind, None)
    return _REFUSED.get(kind) or (error.__doc__ if isinstance(error, type) else None) or ""
