"""Metrics as columns of a table of plain numbers, under the names that the run's score gives them.

Where a metric is of how well a model does, its column is called by the score of the run's task: in place of
`accuracy` in its name, else in front of it (`mae_after`, `mae_personal_mean`).
"""

from typing import Any

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.registry import METRICS
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.tasks.scores import ACCURACY, Score

Row = dict[str, Any]
OF_ROUNDS = tuple(metric for metric in METRICS if metric.reply or metric.round)


def column_of(metric: Metric, score: Score) -> str:
    """What the metric's column is called where models are judged by `score`."""
    if not metric.judges:
        return metric.name
    if ACCURACY.name in metric.name:
        return metric.name.replace(ACCURACY.name, score.name)
    return f"{score.name}_{metric.name}"


def round_row(record: RoundRecord, score: Score) -> Row:
    """A closed round, over the replies that counted; None where nobody told it.

    `participants` were asked, `replies` counted; `opened_s` and `closed_s` are seconds since the run began.
    """
    return {
        "round": record.number,
        "opened_s": record.opened_s,
        "closed_s": record.closed_s,
        "participants": len(record.participants),
        "replies": len(record.devices),
        **{column_of(metric, score): metric.of_round(record) for metric in OF_ROUNDS},
    }
