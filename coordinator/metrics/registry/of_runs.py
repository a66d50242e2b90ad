"""What a whole run came to, as its summary tells."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from msgspec import UNSET, UnsetType

from fleetune.coordinator.metrics.metric import BYTES, COUNT, FRACTION, Metric, Place, Value
from fleetune.coordinator.metrics.registry.of_devices import ACCURACY_TITLE
from fleetune.coordinator.metrics.summary import Summary

_WORST = 0.1
_METHODS: dict[Place, str] = {"run table": "", "page cards": "", "page methods": ""}


def _worst_decile(summary: Summary) -> Value:
    own = summary.ranked
    return own[ceil(_WORST * len(own)) - 1] if own else None


def _known(told: Value | UnsetType) -> Value:
    return None if told is UNSET else told


def _of_all(name: str, about: str, shown: Mapping[Place, str]) -> Metric:
    """An accuracy over all devices, as `summary.Accuracies` names it."""
    return Metric(
        name,
        ACCURACY_TITLE,
        about,
        FRACTION,
        "higher",
        run=lambda summary: getattr(summary.judged, name),
        judges=True,
        shown=shown,
    )


def _of_all_devices(name: str, about: str, shown: Mapping[Place, str]) -> Metric:
    """Likewise, of all devices; None where all took part."""
    metric = _of_all(name, about, shown)
    return replace(metric, run=lambda summary: _known(getattr(summary.judged, name)))


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
    "Accuracy of the personal models after the last round, mean over the devices that took part.",
    {
        "run table": "personal\nmean",
        "page cards": "Personal accuracy",
        "page methods": "personal accuracy",
        "comparison": "mean",
    },
)
PERSONAL_WEIGHTED = _of_all(
    "personal_weighted",
    "The same, weighted by training samples.",
    {
        "run table": "personal\nweighted",
        "page cards": "",
        "page methods": "weighted by samples",
        "comparison": "weighted",
    },
)
PERSONAL_MEAN_ALL = _of_all_devices(
    "personal_mean_all",
    "Accuracy of the personal models after the last round, mean over all devices. One that did not take part "
    "has a model that was never trained.",
    {"page methods": "all devices", "run table": "all\ndevices", "comparison": "all devices"},
)
PERSONAL_WEIGHTED_ALL = _of_all_devices(
    "personal_weighted_all", "The same, weighted by training samples.", {"comparison": ""}
)
VALIDATION_MEAN = replace(
    _of_all(
        "validation_mean",
        "Accuracy of the personal models after the last round on the devices' validation samples, mean over "
        "the devices that took part.",
        {"run table": "validation\nmean", "page methods": "validation", "comparison": "validation"},
    ),
    run=lambda summary: _known(summary.judged.validation_mean),
)
PERSONAL_WORST_DECILE = Metric(
    "personal_worst_decile",
    ACCURACY_TITLE,
    "Accuracy that nine in ten personal models of devices that took part reach or exceed in the end.",
    FRACTION,
    "higher",
    run=_worst_decile,
    judges=True,
    shown={"comparison": "worst decile"},
)
PERSONAL_WORST = Metric(
    "personal_worst",
    ACCURACY_TITLE,
    "Accuracy of the personal model that does worst in the end, of the devices that took part.",
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
BYTES_UP_PAPER = Metric(
    "bytes_up_paper",
    "up as papers count",
    "Bytes of updates as papers count them: 4 a number, a bit a mark of a mask, nothing compressed.",
    BYTES,
    run=lambda summary: summary.bytes.up_paper,
    shown={"page methods": "", "comparison": ""},
)
BYTES_DOWN_PAPER = Metric(
    "bytes_down_paper",
    "down as papers count",
    "Bytes of tasks as papers count them: 4 a number, a bit a mark of a mask, nothing compressed.",
    BYTES,
    run=lambda summary: summary.bytes.down_paper,
    shown={"page methods": "", "comparison": ""},
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
