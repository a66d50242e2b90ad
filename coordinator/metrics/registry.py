"""The registry of metrics. To add a metric, add one entry here; all views, files and trackers use it.

Entries are in the order of table columns. A metric that devices measure also needs a field of `RoundCost`.
`shown` lists the places that show a metric; `EVERYWHERE` is all of them. A view positions some metrics
explicitly and appends all others of its place.
"""

from collections.abc import Collection
from dataclasses import replace
from math import ceil
from typing import Any, get_args

from msgspec import UNSET, UnsetType

from fleetune.coordinator.metrics.averages import greatest, last, mean, middle, summed
from fleetune.coordinator.metrics.metric import (
    BYTES,
    COUNT,
    FRACTION,
    JOULES,
    NUMBER,
    POINTS,
    SECONDS,
    Metric,
    Place,
    Value,
)
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.tasks.scores import Score

EVERYWHERE: tuple[Place, ...] = get_args(Place)
ACCURACY_TITLE = "accuracy on own test samples"
_WORST_SHARE = 0.1


def _known(value: Value | UnsetType) -> Value:
    return None if value is UNSET else value


def _cost(name: str) -> dict[str, Any]:
    """Return the functions that read the measured and the predicted value of a field of `RoundCost`."""
    return {
        "reply": lambda reply: getattr(reply.actual, name),
        "predicted": lambda reply: getattr(reply.predicted, name),
    }


def _local_only(row: DeviceSummary) -> Value:
    return None if row.adoption is UNSET else row.adoption.local_only


def _worst_decile(summary: Summary) -> Value:
    own = summary.ranked
    return own[ceil(_WORST_SHARE * len(own)) - 1] if own else None


def _score(name: str, title: str, about: str, *, short: str = "", shown: tuple[Place, ...]) -> Metric:
    """Return the metric of a score over all devices that `summary.Scores` stores under the same name."""
    return Metric(
        name,
        title,
        about,
        FRACTION,
        "higher",
        run=lambda summary: _known(getattr(summary.judged, name)),
        judges=True,
        short=short,
        shown=shown,
    )


# Metrics of one reply, also aggregated over a device's rounds and over devices.

DURATION = Metric(
    "seconds",
    "time",
    "Download, training and upload of a round; of a run, until its last training round closed.",
    SECONDS,
    reply=lambda reply: reply.actual.round_s,
    predicted=lambda reply: reply.predicted.round_s,
    over_rounds=middle,
    round=lambda record: record.closed_s - record.opened_s,
    device=lambda row: row.actual_s,
    run=lambda summary: summary.seconds.rounds,
    shown=("live", "run table", "run page", "device page", "comparison"),
)
DOWNLOAD = Metric(
    "download_s",
    "download time",
    "Time to receive a round's task.",
    SECONDS,
    **_cost("download_s"),
    run=lambda summary: summary.seconds.down,
)
TRAINING = Metric(
    "train_s",
    "training time",
    "Time of a round's work on the device, evaluations included.",
    SECONDS,
    **_cost("train_s"),
    run=lambda summary: summary.seconds.train,
)
PROCESSOR = Metric(
    "processor_s",
    "processor time of training",
    "Processor time of a round's work; unlike `train_s` it excludes waiting for other programs.",
    SECONDS,
    **_cost("processor_s"),
)
UPLOAD = Metric(
    "upload_s",
    "upload time",
    "Time to send a round's update.",
    SECONDS,
    **_cost("upload_s"),
    run=lambda summary: summary.seconds.up,
)
BYTES_DOWN = Metric(
    "bytes_down",
    "sent down",
    "Payload bytes from the coordinator to devices, as counted where they were sent and received.",
    BYTES,
    reply=lambda reply: reply.bytes_down,
    predicted=lambda reply: reply.predicted.bytes_down,
    over_devices=summed,
    device=lambda row: row.down,
    run=lambda summary: summary.bytes.down,
    shown=EVERYWHERE,
)
BYTES_UP = Metric(
    "bytes_up",
    "sent up",
    "Payload bytes from devices to the coordinator, as counted where they were sent and received.",
    BYTES,
    reply=lambda reply: reply.bytes_up,
    predicted=lambda reply: reply.predicted.bytes_up,
    over_devices=summed,
    device=lambda row: row.up,
    run=lambda summary: summary.bytes.up,
    shown=EVERYWHERE,
)
MEMORY = Metric(
    "memory_bytes",
    "peak memory",
    "Peak resident memory of an agent's process.",
    BYTES,
    **_cost("memory_bytes"),
    over_rounds=greatest,
    over_devices=greatest,
)
ENERGY = Metric(
    "joules",
    "energy",
    "Energy that boards drew during training rounds, of those that measure it.",
    JOULES,
    **_cost("joules"),
    device=lambda row: row.joules,
    run=lambda summary: summary.joules,
    shown=("run page",),
)
PREDICTED = Metric(
    "predicted_s",
    "predicted time",
    "What a device predicted a round to take: download, training and upload.",
    SECONDS,
    reply=lambda reply: reply.predicted.round_s,
    over_rounds=middle,
    device=lambda row: row.predicted_s,
    shown=("live", "device page"),
)
BEFORE = Metric(
    "accuracy_before",
    ACCURACY_TITLE,
    "Accuracy of the model that local training starts from, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.before,
    over_rounds=last,
    over_devices=mean,
    device=lambda row: row.before,
    judges=True,
    short="accuracy",
    shown=("live", "device table", "device page"),
)
AFTER = Metric(
    "accuracy_after",
    ACCURACY_TITLE,
    "Accuracy of the personal model after a round's work, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.after,
    over_rounds=last,
    over_devices=mean,
    device=lambda row: row.after,
    judges=True,
    short="accuracy",
    shown=("live", "device table", "device page"),
)
PERSONAL = Metric(
    "accuracy_personal",
    "personal accuracy",
    "Accuracy of the personal model after the last round, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.personal,
    over_devices=mean,
    device=lambda row: row.personal,
    judges=True,
    short="accuracy",
    shown=("device table", "device page"),
)
VALIDATION = Metric(
    "accuracy_validation",
    "validation accuracy",
    "Accuracy of the personal model after the last round, on a device's validation samples.",
    FRACTION,
    "higher",
    reply=lambda reply: _known(reply.measures.validation),
    over_devices=mean,
    device=lambda row: _known(row.validation),
    judges=True,
    short="validation",
    shown=("device table", "device page"),
)
DEPLOYED = Metric(
    "accuracy_deployed",
    "deployed",
    "Accuracy of the model that a device deploys: the best or the newest of the run, as the device chooses.",
    FRACTION,
    "higher",
    reply=lambda reply: _known(reply.measures.kept),
    over_devices=mean,
    device=lambda row: row.deployed,
    run=lambda summary: summary.judged.deployed_mean,
    judges=True,
    shown=("device table", "run page", "device page"),
)
LOCAL_ONLY = Metric(
    "accuracy_local_only",
    "local-only",
    "Accuracy of the model that a device trained on its own, next to the run's.",
    FRACTION,
    "higher",
    reply=lambda reply: _known(reply.measures.alone),
    over_devices=mean,
    device=_local_only,
    run=lambda summary: mean(_local_only(row) for row in summary.by_device.values()),
    judges=True,
    shown=("run page", "device page"),
)
GAIN_OVER_LOCAL_ONLY = Metric(
    "gain_over_local_only",
    "gain over local-only",
    "How much better the deployed model is than the local-only one; of a share in points.",
    POINTS,
    "higher",
    reply=lambda reply: _known(reply.measures.gain),
    over_devices=mean,
    device=lambda row: None if row.adoption is UNSET else row.adoption.gain,
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.gain,
    judges=True,
    short="over local-only",
    shown=("run table", "device table", "run page", "device page"),
)
ADOPTED = Metric(
    "devices_adopted",
    "adopted",
    "Devices that deploy a model of the fleet instead of their local-only one.",
    COUNT,
    device=lambda row: None if row.adoption is UNSET else int(row.adoption.adopted),
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.adopted,
    shown=("run table", "run page", "device page"),
)
BELOW_LOCAL_ONLY = Metric(
    "devices_below_local_only",
    "below local-only",
    "Devices whose deployed model is worse than their local-only one by more than the noise of their tests.",
    COUNT,
    "lower",
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.below,
    shown=("run page",),
)
SAMPLES = Metric(
    "num_samples",
    "training samples",
    "Samples that a device trains on.",
    COUNT,
    reply=lambda reply: reply.measures.num_samples,
    over_rounds=last,
    device=lambda row: row.num_samples,
    short="samples",
    shown=("device table", "device page"),
)
EPSILON = Metric(
    "epsilon",
    "epsilon",
    "What the tasks of a device have spent of its privacy; of a round or run, the largest of all devices.",
    NUMBER,
    "lower",
    round=lambda record: record.epsilon,
    device=lambda row: _known(row.epsilon),
    run=lambda summary: None if summary.privacy is UNSET else summary.privacy.epsilon,
    shown=("run table", "run page", "device page"),
)
UPDATES = Metric(
    "updates",
    "updates",
    "Updates that a device sent.",
    COUNT,
    device=lambda row: row.updates,
    shown=("device page",),
)

# Metrics of a whole run, read from its summary.

ROUNDS = Metric(
    "rounds",
    "rounds",
    "Training rounds that closed.",
    COUNT,
    run=lambda summary: summary.rounds,
    shown=("comparison",),
)
TOOK_PART = Metric(
    "devices",
    "devices",
    "Devices that sent an update.",
    COUNT,
    "higher",
    run=lambda summary: sum(row.updates > 0 for row in summary.by_device.values()),
    shown=("comparison",),
)
PERSONAL_MEAN = _score(
    "personal_mean",
    "personal accuracy",
    "Accuracy of the personal models after the last round, mean over the devices that took part.",
    short="personal mean",
    shown=("run table", "run page", "comparison"),
)
PERSONAL_WEIGHTED = _score(
    "personal_weighted",
    "weighted by samples",
    "The same, weighted by training samples.",
    short="personal weighted",
    shown=("run table", "run page", "comparison"),
)
PERSONAL_MEAN_ALL = _score(
    "personal_mean_all",
    "all devices",
    "Accuracy of the personal models after the last round, mean over all devices. The model of a device that "
    "did not take part was never trained. None where all took part.",
    shown=("run table", "run page", "comparison"),
)
PERSONAL_WEIGHTED_ALL = _score(
    "personal_weighted_all",
    "all devices, weighted",
    "The same, weighted by training samples.",
    shown=("comparison",),
)
VALIDATION_MEAN = _score(
    "validation_mean",
    "validation accuracy",
    "Accuracy of the personal models after the last round on the devices' validation samples, mean over the "
    "devices that took part.",
    short="validation mean",
    shown=("run table", "run page", "comparison"),
)
PERSONAL_WORST_DECILE = replace(
    _score(
        "personal_worst_decile",
        "worst decile",
        "Accuracy that nine in ten personal models of devices that took part reach or exceed in the end.",
        shown=("comparison",),
    ),
    run=_worst_decile,
)
PERSONAL_WORST = replace(
    _score(
        "personal_worst",
        "worst device",
        "Lowest accuracy of a personal model in the end, of the devices that took part.",
        shown=("run table", "run page", "comparison"),
    ),
    run=lambda summary: next(iter(summary.ranked), None),
)
BEFORE_MEAN = _score(
    "before_mean",
    "before",
    "In the final evaluation, accuracy of the model that local training starts from, mean over devices.",
    shown=("run table", "run page", "comparison"),
)
BEFORE_WEIGHTED = _score(
    "before_weighted", "before, weighted", "The same, weighted by training samples.", shown=("comparison",)
)
AFTER_MEAN = _score(
    "after_mean",
    "after",
    "In the final evaluation, accuracy of the personal model after local training, mean over devices.",
    shown=("run table", "run page", "comparison"),
)
AFTER_WEIGHTED = _score(
    "after_weighted", "after, weighted", "The same, weighted by training samples.", shown=("comparison",)
)
BYTES_UP_DENSE = Metric(
    "bytes_up_dense",
    "whole models up",
    "Bytes of as many whole models in float32 as updates were sent.",
    BYTES,
    run=lambda summary: summary.bytes.up_dense,
    shown=("comparison",),
)
BYTES_DOWN_DENSE = Metric(
    "bytes_down_dense",
    "whole models down",
    "Bytes of as many whole models in float32 as tasks were sent.",
    BYTES,
    run=lambda summary: summary.bytes.down_dense,
    shown=("comparison",),
)
BYTES_UP_PAPER = Metric(
    "bytes_up_paper",
    "up as papers count",
    "Bytes of updates as papers count them: 4 a number, a bit a mark of a mask, nothing compressed.",
    BYTES,
    run=lambda summary: summary.bytes.up_paper,
    shown=("run page", "comparison"),
)
BYTES_DOWN_PAPER = Metric(
    "bytes_down_paper",
    "down as papers count",
    "Bytes of tasks as papers count them: 4 a number, a bit a mark of a mask, nothing compressed.",
    BYTES,
    run=lambda summary: summary.bytes.down_paper,
    shown=("run page", "comparison"),
)
SHARE_UP = Metric(
    "share_up",
    "of whole models",
    "Payload up relative to as many whole models in float32.",
    FRACTION,
    run=lambda summary: summary.bytes.share_up,
    shown=("run table", "run page"),
)
SHARE_DOWN = Metric(
    "share_down",
    "of whole models",
    "Payload down relative to as many whole models in float32.",
    FRACTION,
    run=lambda summary: summary.bytes.share_down,
    shown=("run table", "run page"),
)

STEP_RATIO = Metric(
    "step_ratio",
    "step size",
    "RMS of the update's step from the shared model, relative to the round's median; the mean over rounds.",
    NUMBER,
    reply=lambda reply: reply.step.ratio if reply.step else None,
    device=lambda row: row.steps.ratio,
    over_rounds=mean,
    over_devices=greatest,
    shown=("device page",),
)
STEP_COSINE = Metric(
    "step_cosine",
    "step direction",
    "Cosine of the angle between the update's step and the round's median step; the mean over rounds.",
    NUMBER,
    reply=lambda reply: reply.step.cosine if reply.step else None,
    device=lambda row: row.steps.cosine,
    over_rounds=mean,
    over_devices=mean,
    shown=("device page",),
)
CLIPPED = Metric(
    "clipped",
    "clipped rounds",
    "Share of a device's rounds in which its step was clipped.",
    FRACTION,
    reply=lambda reply: float(reply.step.clipped) if reply.step else None,
    device=lambda row: row.steps.clipped,
    over_rounds=mean,
    over_devices=mean,
    shown=("device page",),
)
STEPS = (STEP_RATIO, STEP_COSINE, CLIPPED)

METRICS: tuple[Metric, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Metric))


def shown_at(place: Place, but: Collection[str] = ()) -> list[Metric]:
    """Return the metrics shown in a place, except those named in `but`."""
    return [metric for metric in METRICS if place in metric.shown and metric.name not in but]


def predicted_metrics() -> list[Metric]:
    """Return the metrics of a round's cost that devices predict."""
    return [metric for metric in METRICS if metric.predicted]


def metrics_without_key() -> list[Metric]:
    """Return the shown metrics that summary.json stores under `metrics`, because they have no key of their
    own.
    """
    return [one for one in METRICS if one.shown and one.reply and not one.device and not one.run]


def metrics_of_rounds() -> list[Metric]:
    """Return the metrics that can be read from a closed round."""
    return [metric for metric in METRICS if metric.reply or metric.round]


def round_row(record: RoundRecord, score: Score) -> dict[str, Any]:
    """Return a closed round as a row of plain numbers; None where no device reported the value.

    `participants` is the number of devices that received a task, `replies` the number of counted replies.
    `opened_s` and `closed_s` are seconds since the run began.
    """
    return {
        "round": record.number,
        "opened_s": record.opened_s,
        "closed_s": record.closed_s,
        "participants": len(record.participants),
        "replies": len(record.devices),
        **{metric.column(score): metric.of_round(record) for metric in metrics_of_rounds()},
    }
