"""Makes the summary of a run from its records and its ledger."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from msgspec import UNSET, UnsetType, structs

from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.metrics.adoption import adoption_over, latest_adoption
from fleetune.coordinator.metrics.averages import mean, total, weighted_mean
from fleetune.coordinator.metrics.diagnostics import histories, metric_of
from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.registry import (
    AFTER,
    BEFORE,
    DEPLOYED,
    DURATION,
    ENERGY,
    PERSONAL,
    PREDICTED,
    PROCESSOR,
    STEPS,
    VALIDATION,
    metrics_without_key,
    predicted_metrics,
)
from fleetune.coordinator.metrics.summary import (
    Accuracies,
    BestRound,
    DeviceSteps,
    DeviceSummary,
    Errors,
    PayloadBytes,
    PredictionErrors,
    RolloutSummary,
    Seconds,
    Summary,
    over_participants,
)
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, Past, RoundRecord, Traffic
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import ACCURACY, Score

T = TypeVar("T")
LEARNING_ROUNDS = 5  # a device's first rounds, in which it still learns to predict


def summarise(
    settings: RunSettings,
    spec: ModelSpec,
    records: Sequence[RoundRecord],
    ledger: Ledger,
    counters: dict[str, int],
    *,
    reports: Mapping[DeviceId, DeviceReport] | None = None,
    simulated: bool,
    diagnostics: Sequence[Diagnostic] = (),
    rollout: Rollout | None = None,
) -> Summary:
    """Return the summary of a run.

    Args:
        settings: settings of the run.
        spec: description of its model.
        records: records of all closed rounds, ascending. Without a final evaluation the personal scores are
            None.
        ledger: ledger of the run.
        counters: counters of the engine, e.g. replies and declines that do not count, by rejection reason.
        reports: latest report of each device.
        simulated: True if times are of a virtual clock.
        diagnostics: diagnostics that the method declares.
        rollout: versions of the shared model; None if the run has no roll-out groups.
    """
    training = [record for record in records if not record.final_evaluation]
    final_evaluation = next((record for record in records if record.final_evaluation), None)
    of_updates = [metric_of(one) for one in diagnostics if one.of == "update"]
    rows = _devices(training, final_evaluation, ledger, reports or {}, of_updates)
    past = ledger.past if isinstance(ledger.past, Past) else Past()
    score = task_of(settings.task).score
    judged = over_participants(_accuracies(training, final_evaluation, score), rows.values())
    validated = mean(VALIDATION.of_device(row) for row in rows.values() if row.took_part)
    if validated is not None:
        judged = structs.replace(judged, validation_mean=validated)
    by_accuracy = score == ACCURACY
    return Summary(
        method=settings.method["name"],
        model=spec.name,
        parameters=spec.num_parameters,
        rounds=len(training) + past.rounds,
        devices=len(ledger.traffic),
        seed=settings.run.seed,
        simulated=simulated,
        accuracy=judged if by_accuracy else Accuracies(),
        bytes=_bytes(spec, ledger),
        seconds=_seconds(training, ledger, past, simulated=simulated),
        ratios=_by_device(training, lambda reply: reply.ratio),
        joules=total([past.joules, *(ENERGY.of_reply(reply) for reply in _replies(training))]),
        predicted_vs_actual=predicted_vs_actual(training),
        refused={**ledger.refusals, **{f"engine-{name}": n for name, n in sorted(counters.items())}},
        refused_by_device={
            device: dict(sorted(kinds.items())) for device, kinds in sorted(ledger.refusals_by_device.items())
        },
        by_device=rows,
        adoption=adoption_over([row.adoption for row in rows.values() if row.adoption is not UNSET]) or UNSET,
        metrics=_over_devices(list(rows.values())),
        diagnostics=histories(diagnostics, training) or UNSET,
        downsampled=past.rounds or UNSET,
        score=UNSET if by_accuracy else score,
        scored=UNSET if by_accuracy else judged,
        scores=_mean_scores(rows.values()),
        rollout=UNSET if rollout is None else _rollout(rollout),
    )


def _mean_scores(rows: Iterable[DeviceSummary]) -> dict[str, float | None] | UnsetType:
    """Return the mean of each score over the devices that took part and reported it."""
    reported = [row.scores for row in rows if row.took_part and row.scores is not UNSET]
    names = dict.fromkeys(name for scores in reported for name in scores)
    return {name: mean(scores.get(name) for scores in reported) for name in names} or UNSET


def _accuracies(
    training: Sequence[RoundRecord], final_evaluation: RoundRecord | None, score: Score
) -> Accuracies:
    final = list(final_evaluation.devices.values()) if final_evaluation else []

    def both(metric: Metric) -> tuple[float | None, float | None]:
        """Return the mean over devices, and the mean weighted by training samples."""
        pairs = [(metric.of_reply(reply), reply.measures.num_samples) for reply in final]
        return mean(value for value, _ in pairs), weighted_mean(pairs)

    scored = [(value, one.number) for one in training if (value := AFTER.of_round(one)) is not None]
    sign = 1 if score.better == "higher" else -1
    best = max(scored, default=None, key=lambda pair: (sign * pair[0], -pair[1]))
    (personal, before, after, deployed) = (both(one) for one in (PERSONAL, BEFORE, AFTER, DEPLOYED))
    return Accuracies(
        *personal, *before, *after, *deployed, best_round=BestRound(best[1], best[0]) if best else None
    )


def _bytes(spec: ModelSpec, ledger: Ledger) -> PayloadBytes:
    traffic = ledger.traffic.values()
    return PayloadBytes(
        up=sum(one.up for one in traffic),
        down=sum(one.down for one in traffic),
        up_dense=4 * spec.num_parameters * sum(one.updates for one in traffic),
        down_dense=4 * spec.num_parameters * sum(one.tasks for one in traffic),
        up_paper=sum(one.paper_up for one in traffic),
        down_paper=sum(one.paper_down for one in traffic),
        enrolment=sum(one.enrolment for one in traffic),
        final_evaluation_up=sum(one.final_evaluation_up for one in traffic),
        final_evaluation_down=sum(one.final_evaluation_down for one in traffic),
    )


def _seconds(training: Sequence[RoundRecord], ledger: Ledger, past: Past, *, simulated: bool) -> Seconds:
    replies = [reply.actual for reply in _replies(training)]
    began_at, ended_at = ledger.began_at, ledger.ended_at
    whole_s = None if began_at is None or ended_at is None else ended_at - began_at
    return Seconds(
        wall=None if simulated else whole_s,
        virtual=whole_s if simulated and whole_s is not None else UNSET,
        rounds=training[-1].closed_s if training else None,
        train=total([past.train_s, *(actual.train_s for actual in replies)]),
        up=total([past.upload_s, *(actual.upload_s for actual in replies)]),
        down=total([past.download_s, *(actual.download_s for actual in replies)]),
    )


def _by_device(training: Sequence[RoundRecord], pick: Callable[[DeviceRound], T]) -> dict[DeviceId, list[T]]:
    found: dict[DeviceId, list[T]] = {}
    for record in training:
        for device, reply in record.devices.items():
            found.setdefault(device, []).append(pick(reply))
    return dict(sorted(found.items()))


def _replies(training: Sequence[RoundRecord]) -> list[DeviceRound]:
    return [reply for record in training for reply in record.devices.values()]


def _devices(
    training: Sequence[RoundRecord],
    final_evaluation: RoundRecord | None,
    ledger: Ledger,
    reports: Mapping[DeviceId, DeviceReport],
    of_updates: Sequence[Metric],
) -> dict[DeviceId, DeviceSummary]:
    closing = final_evaluation.devices if final_evaluation else {}
    rounds = _by_device(training, lambda reply: reply)
    return {
        device: _device(traffic, closing.get(device), reports.get(device), rounds.get(device, []), of_updates)
        for device, traffic in sorted(ledger.traffic.items())
    }


def _device(
    traffic: Traffic,
    closing: DeviceRound | None,
    report: DeviceReport | None,
    replies: Sequence[DeviceRound],
    of_updates: Sequence[Metric],
) -> DeviceSummary:
    diagnosed = {one.name: one.of_replies(replies) for one in of_updates}
    known = {name: value for name, value in diagnosed.items() if value is not None}
    return DeviceSummary(
        ratio=closing.ratio if closing else None,
        num_samples=closing.measures.num_samples if closing else None,
        personal=closing.measures.personal if closing else None,
        validation=UNSET if closing is None else _or_unset(VALIDATION.of_reply(closing)),
        before=closing.measures.before if closing else None,
        after=closing.measures.after if closing else None,
        deployed=DEPLOYED.of_reply(closing) if closing else None,
        scores=closing.measures.scores if closing else UNSET,
        up=traffic.up,
        down=traffic.down,
        updates=traffic.updates,
        reason=report.reason if report else None,
        predicted_s=PREDICTED.of_replies(replies),
        actual_s=DURATION.of_replies(replies),
        joules=ENERGY.of_replies(replies),
        adoption=latest_adoption([*replies, *([closing] if closing else [])]) or UNSET,
        metrics={**{one.name: one.of_replies(replies) for one in metrics_without_key()}, **known} or UNSET,
        steps=DeviceSteps(*(metric.of_replies(replies) for metric in STEPS)),
    )


def _rollout(rollout: Rollout) -> RolloutSummary:
    return RolloutSummary(
        rollout.approved,
        rollout.trial,
        len(rollout.canaries),
        len(rollout.reporting),
        rollout.num_approved,
        rollout.num_stopped,
        tuple(one.words for one in rollout.stopped),
    )


def _or_unset(value: float | None) -> float | UnsetType:
    return UNSET if value is None else value


def _over_devices(rows: Sequence[DeviceSummary]) -> dict[str, float | None] | UnsetType:
    """Return the mean over devices of each metric without a key of its own; UNSET if there are none."""
    found = {one.name: one.over_devices(map(one.of_device, rows)) for one in metrics_without_key()}
    return found or UNSET


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
