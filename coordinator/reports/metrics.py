"""Every metric of a run: the one table from which summary, live view, tables, pages, plots and CSV draw.

A new metric is one entry of `METRICS` (and a field of `RoundCost`, if devices measure it): with `EVERYWHERE`
it stands in every view and file. What views compose by hand they compose of named entries; the rest follows.
"""

from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import get_args

from msgspec import UNSET

from fleetune.coordinator.reports.adoption.metrics import ADOPTION_METRICS
from fleetune.coordinator.reports.averages import greatest, last, mean, middle, summed
from fleetune.coordinator.reports.metric import BYTES, COUNT, FRACTION, JOULES, SECONDS, Metric, Place, Value
from fleetune.coordinator.reports.summary import Summary
from fleetune.coordinator.rounds.records import DeviceRound

WORST = 0.1
EVERYWHERE: dict[Place, str] = dict.fromkeys(get_args(Place), "")
_METHODS: dict[Place, str] = {"run table": "", "page cards": "", "page methods": ""}
_ACCURACY = "accuracy on own test samples"


def _kept(reply: DeviceRound) -> Value:
    return None if reply.measures.kept is UNSET else reply.measures.kept


def _worst_decile(summary: Summary) -> Value:
    own = summary.ranked
    return own[ceil(WORST * len(own)) - 1] if own else None


def _measured(name: str) -> Callable[[DeviceRound], Value]:
    """A field of `RoundCost` as the device measured it."""
    return lambda reply: getattr(reply.actual, name)


def _foretold(name: str) -> Callable[[DeviceRound], Value]:
    """A field of `RoundCost` as the device predicted it."""
    return lambda reply: getattr(reply.predicted, name)


# One device, one round.

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
    shown={
        "predictions": "seconds of a round",
        "round line": "",
        "live view": "",
        "run table": "",
        "page cards": "Time",
        "page methods": "",
        "page devices": "",
        "comparison": "",
    },
)
EXPECTED = Metric(
    "predicted_s",
    "expected time",
    "What a device expected a round to take, download, training and upload.",
    SECONDS,
    reply=lambda reply: reply.predicted.round_s,
    over_rounds=middle,
    device=lambda row: row.predicted_s,
    shown={"live view": "", "page devices": ""},
)
BYTES_DOWN = Metric(
    "bytes_down",
    "payload down",
    "Payload bytes from the coordinator to devices, as counted where they were sent and received.",
    BYTES,
    reply=lambda reply: reply.bytes_down,
    predicted=_foretold("bytes_down"),
    over_devices=summed,
    device=lambda row: row.down,
    run=lambda summary: summary.bytes.down,
    shown={
        "predictions": "bytes down",
        "round line": "down",
        "live view": "down",
        "run table": "",
        "device table": "down",
        "page cards": "Sent down",
        "page methods": "sent down",
        "page devices": "down",
        "comparison": "sent down",
    },
)
BYTES_UP = Metric(
    "bytes_up",
    "payload up",
    "Payload bytes from devices to the coordinator, as counted where they were sent and received.",
    BYTES,
    reply=lambda reply: reply.bytes_up,
    predicted=_foretold("bytes_up"),
    over_devices=summed,
    device=lambda row: row.up,
    run=lambda summary: summary.bytes.up,
    shown={
        "predictions": "bytes up",
        "round line": "up",
        "live view": "up",
        "run table": "",
        "device table": "up",
        "page cards": "Sent up",
        "page methods": "sent up",
        "page devices": "up",
        "comparison": "sent up",
    },
)
ENERGY = Metric(
    "joules",
    "energy",
    "Energy that boards drew during training rounds, of those that measure it.",
    JOULES,
    reply=_measured("joules"),
    predicted=_foretold("joules"),
    device=lambda row: row.joules,
    run=lambda summary: summary.joules,
    shown={"predictions": "", "page cards": "Energy"},
)
BEFORE = Metric(
    "accuracy_before",
    _ACCURACY,
    "Accuracy of the model that local training starts from, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.before,
    over_rounds=last,
    over_devices=mean,
    device=lambda row: row.before,
    judges=True,
    shown={"round line": "", "live view": "", "device table": "", "page devices": ""},
)
AFTER = Metric(
    "accuracy_after",
    _ACCURACY,
    "Accuracy of the personal model after a round's work, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.after,
    over_rounds=last,
    over_devices=mean,
    device=lambda row: row.after,
    judges=True,
    shown={"round line": "accuracy", "live view": "accuracy", "device table": "", "page devices": ""},
)
PERSONAL = Metric(
    "accuracy_personal",
    _ACCURACY,
    "Accuracy of the personal model as it stood after the last round, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.personal,
    over_devices=mean,
    device=lambda row: row.personal,
    judges=True,
    shown={"device table": "accuracy", "page devices": "personal accuracy"},
)
SERVED = Metric(
    "accuracy_served",
    "served",
    "Accuracy of the model that a device would serve, of all that the run led it to.",
    FRACTION,
    "higher",
    reply=_kept,
    over_devices=mean,
    device=lambda row: row.kept,
    run=lambda summary: summary.judged.kept_mean,
    judges=True,
    shown={"device table": "", "page cards": "Served", "page devices": ""},
)
SAMPLES = Metric(
    "num_samples",
    "samples",
    "Samples that a device trains on.",
    COUNT,
    reply=lambda reply: reply.measures.num_samples,
    over_rounds=last,
    device=lambda row: row.num_samples,
    shown={"device table": "", "page devices": "training samples"},
)
UPDATES = Metric(
    "updates",
    "updates",
    "Updates that a device sent.",
    COUNT,
    device=lambda row: row.updates,
    shown={"page devices": ""},
)

# A whole run.


def _of_all(name: str, about: str, shown: Mapping[Place, str]) -> Metric:
    """An accuracy over all devices, as `summary.Accuracies` names it."""
    return Metric(
        name,
        _ACCURACY,
        about,
        FRACTION,
        "higher",
        run=lambda summary: getattr(summary.judged, name),
        judges=True,
        shown=shown,
    )


ROUNDS = Metric(
    "rounds",
    "rounds",
    "Training rounds that closed.",
    COUNT,
    run=lambda summary: summary.rounds,
    shown={"comparison": ""},
)
TOOK_PART = Metric(
    "devices",
    "devices",
    "Devices that sent an update.",
    COUNT,
    "higher",
    run=lambda summary: sum(row.updates > 0 for row in summary.by_device.values()),
    shown={"comparison": ""},
)
PERSONAL_MEAN = _of_all(
    "personal_mean",
    "Accuracy of the personal models after the last round, mean over devices.",
    {
        "run table": "personal\nmean",
        "page cards": "Personal accuracy",
        "page methods": "personal accuracy",
        "comparison": "mean",
    },
)
PERSONAL_WEIGHTED = _of_all(
    "personal_weighted",
    "Accuracy of the personal models after the last round, weighted by training samples.",
    {
        "run table": "personal\nweighted",
        "page cards": "",
        "page methods": "weighted by samples",
        "comparison": "weighted",
    },
)
PERSONAL_WORST_DECILE = Metric(
    "personal_worst_decile",
    _ACCURACY,
    "Accuracy that nine in ten personal models reach or exceed after the last round.",
    FRACTION,
    "higher",
    run=_worst_decile,
    judges=True,
    shown={"comparison": "worst decile"},
)
PERSONAL_WORST = Metric(
    "personal_worst",
    _ACCURACY,
    "Accuracy of the personal model that does worst after the last round.",
    FRACTION,
    "higher",
    run=lambda summary: next(iter(summary.ranked), None),
    judges=True,
    shown={"run table": "worst\ndevice", "page methods": "worst device", "comparison": ""},
)
BEFORE_MEAN = _of_all(
    "before_mean",
    "In the final evaluation, accuracy of the model that local training starts from, mean over devices.",
    {**_METHODS, "comparison": "before"},
)
BEFORE_WEIGHTED = _of_all("before_weighted", "The same, weighted by training samples.", {"comparison": ""})
AFTER_MEAN = _of_all(
    "after_mean",
    "In the final evaluation, accuracy of the personal model after local training, mean over devices.",
    {**_METHODS, "comparison": "after"},
)
AFTER_WEIGHTED = _of_all("after_weighted", "The same, weighted by training samples.", {"comparison": ""})
BYTES_UP_DENSE = Metric(
    "bytes_up_dense",
    "whole models up",
    "Bytes of as many whole models in float32 as updates were sent.",
    BYTES,
    run=lambda summary: summary.bytes.up_dense,
    shown={"comparison": ""},
)
BYTES_DOWN_DENSE = Metric(
    "bytes_down_dense",
    "whole models down",
    "Bytes of as many whole models in float32 as tasks were sent.",
    BYTES,
    run=lambda summary: summary.bytes.down_dense,
    shown={"comparison": ""},
)
SHARE_UP = Metric(
    "share_up",
    "of whole models",
    "Payload up relative to as many whole models in float32.",
    FRACTION,
    run=lambda summary: summary.bytes.share_up,
    shown=_METHODS,
)
SHARE_DOWN = Metric(
    "share_down",
    "of whole models",
    "Payload down relative to as many whole models in float32.",
    FRACTION,
    run=lambda summary: summary.bytes.share_down,
    shown=_METHODS,
)

METRICS: tuple[Metric, ...] = (
    DURATION,
    Metric(
        "download_s",
        "download time",
        "What receiving a round's task took.",
        SECONDS,
        reply=_measured("download_s"),
        predicted=_foretold("download_s"),
        run=lambda summary: summary.seconds.down,
        shown={"predictions": "of the download"},
    ),
    Metric(
        "train_s",
        "training time",
        "What a round's work took on devices, evaluations included.",
        SECONDS,
        reply=_measured("train_s"),
        predicted=_foretold("train_s"),
        run=lambda summary: summary.seconds.train,
        shown={"predictions": "of training"},
    ),
    Metric(
        "upload_s",
        "upload time",
        "What sending a round's update took.",
        SECONDS,
        reply=_measured("upload_s"),
        predicted=_foretold("upload_s"),
        run=lambda summary: summary.seconds.up,
        shown={"predictions": "of the upload"},
    ),
    BYTES_DOWN,
    BYTES_UP,
    Metric(
        "memory_bytes",
        "peak memory",
        "Peak resident memory of an agent's process.",
        BYTES,
        reply=_measured("memory_bytes"),
        predicted=_foretold("memory_bytes"),
        over_rounds=greatest,
        over_devices=greatest,
        shown={"predictions": ""},
    ),
    ENERGY,
    EXPECTED,
    BEFORE,
    AFTER,
    PERSONAL,
    SERVED,
    *ADOPTION_METRICS,
    SAMPLES,
    UPDATES,
    ROUNDS,
    TOOK_PART,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_WORST_DECILE,
    PERSONAL_WORST,
    BEFORE_MEAN,
    BEFORE_WEIGHTED,
    AFTER_MEAN,
    AFTER_WEIGHTED,
    BYTES_UP_DENSE,
    BYTES_DOWN_DENSE,
    SHARE_UP,
    SHARE_DOWN,
)


def shown_at(place: Place, but: Collection[str] = ()) -> list[Metric]:
    """All metrics that are shown in a place, but for those of these names: they have their columns."""
    return [metric for metric in METRICS if place in metric.shown and metric.name not in but]


def title_in_predictions(name: str) -> str:
    """What a prediction's quantity is called; one of another release has its name only."""
    return next((one.head("predictions") for one in METRICS if one.name == name), name)
