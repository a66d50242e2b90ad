"""How well devices predicted the cost of a round: predicted against actual, reply by reply."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.registry import PROCESSOR, predicted_metrics
from fleetune.coordinator.metrics.summary import Errors, PredictionErrors
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.method import DeviceId

LEARNING_ROUNDS = 5  # of each device, its first ones


@dataclass(frozen=True)
class Pair:
    """A metric of one reply, predicted and actual.

    Attributes:
        device, round: of the reply.
        predicted, actual: both known; `actual` above 0.
        learned: whether the device had replied at least `LEARNING_ROUNDS` times before.
    """

    device: DeviceId
    round: int
    predicted: float
    actual: float
    learned: bool

    @property
    def error(self) -> float:
        """Relative to the actual value, at least 0."""
        return abs(self.predicted - self.actual) / self.actual


def pairs_of(records: Sequence[RoundRecord], metric: Metric) -> list[Pair]:
    """Pairs of all replies to training rounds. An actual value of 0 has no relative error: it is left out.

    Args:
        records: of closed rounds, ascending.
        metric: one that devices predict.
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
    """Errors by metric, of all pairs and of those after the first five rounds of each device.

    A metric without pairs is None; so is the result when all are. Without pairs the processor's seconds are
    left out: not all agents report them, and no simulated one does.
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
    """Number of pairs, their median relative error, and the error that a tenth of them reaches or exceeds."""
    ranked = sorted(pair.error for pair in pairs)
    if not ranked:
        return None
    return Errors(len(ranked), median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1])
