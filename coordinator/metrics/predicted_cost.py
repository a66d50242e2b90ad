"""Accuracy of devices' cost predictions: predicted against actual cost of each reply."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.registry import PROCESSOR, predicted_metrics
from fleetune.coordinator.metrics.summary import Errors, PredictionErrors
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.method import DeviceId

LEARNING_ROUNDS = 5  # a device's first rounds, in which it still learns to predict


@dataclass(frozen=True)
class Pair:
    """Predicted and actual value of a metric, for one reply.

    Attributes:
        device, round: device and round of the reply.
        predicted, actual: the two values; `actual` is above 0.
        learned: True if the device had replied at least `LEARNING_ROUNDS` times before.
    """

    device: DeviceId
    round: int
    predicted: float
    actual: float
    learned: bool

    @property
    def error(self) -> float:
        """Absolute error relative to the actual value."""
        return abs(self.predicted - self.actual) / self.actual


def pairs_of(records: Sequence[RoundRecord], metric: Metric) -> list[Pair]:
    """Return predicted and actual values of a metric for all replies to training rounds.

    Replies with an actual value of 0 are left out, because they have no relative error.

    Args:
        records: records of closed rounds, ascending.
        metric: a metric that devices predict.
    """
    found, replies = [], dict[DeviceId, int]()
    for record in records:
        for device, reply in record.devices.items() if not record.final_evaluation else ():
            replies[device] = replies.get(device, 0) + 1
            predicted, actual = metric.predicted_of(reply), metric.of_reply(reply)
            if predicted is not None and actual:
                learned = replies[device] > LEARNING_ROUNDS
                found.append(Pair(device, record.number, predicted, actual, learned))
    return found


def predicted_vs_actual(records: Sequence[RoundRecord]) -> dict[str, PredictionErrors | None] | None:
    """Return prediction errors by metric, over all replies and over those after each device's first five
    rounds.

    A metric that no reply predicts and reports is None; if all are, the result is None. Processor seconds are
    then omitted instead: some agents and all simulated devices do not report them.
    """
    by_metric = {metric.name: pairs_of(records, metric) for metric in predicted_metrics()}
    by_metric = {name: pairs for name, pairs in by_metric.items() if pairs or name != PROCESSOR.name}
    if not any(by_metric.values()):
        return None
    return {
        name: PredictionErrors(errors_of(pairs), errors_of(one for one in pairs if one.learned))
        if pairs
        else None
        for name, pairs in by_metric.items()
    }


def errors_of(pairs: Iterable[Pair]) -> Errors | None:
    """Return the number of pairs, and the median and 90th percentile of their relative errors; None without
    pairs.
    """
    ranked = sorted(pair.error for pair in pairs)
    if not ranked:
        return None
    return Errors(len(ranked), median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1])
