"""The metrics of runs with [adoption], part of the table in `metrics`: what devices serve, against alone."""

from msgspec import UNSET

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.metric import COUNT, FRACTION, POINTS, Metric, Value
from fleetune.coordinator.metrics.summary import DeviceSummary


def _alone(row: DeviceSummary) -> Value:
    return None if row.adoption is UNSET else row.adoption.alone


ALONE = Metric(
    "accuracy_alone",
    "alone",
    "Accuracy of the model that a device trained alone, beside the run's.",
    FRACTION,
    "higher",
    reply=lambda reply: None if reply.measures.alone is UNSET else reply.measures.alone,
    over_devices=mean,
    judges=True,
    device=_alone,
    run=lambda summary: mean(_alone(row) for row in summary.by_device.values()),
    shown={"page devices": "", "page methods": "alone"},
)
GAIN = Metric(
    "gain_over_alone",
    "over alone",
    "How much better what a device serves is than the model that it trained alone, a share in points.",
    POINTS,
    "higher",
    judges=True,
    reply=lambda reply: None if reply.measures.gain is UNSET else reply.measures.gain,
    over_devices=mean,
    device=lambda row: None if row.adoption is UNSET else row.adoption.gain,
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.gain,
    shown={"device table": "over\nalone", "page devices": "", "page methods": "", "run table": ""},
)
ADOPTED = Metric(
    "devices_adopted",
    "adopted",
    "Devices that serve a model of the fleet, and not the one that they trained alone.",
    COUNT,
    device=lambda row: None if row.adoption is UNSET else int(row.adoption.adopted),
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.adopted,
    shown={"page devices": "", "page methods": "", "run table": ""},
)
BELOW_ALONE = Metric(
    "devices_below_alone",
    "below alone",
    "Devices that serve something worse than what they trained alone, by more than the noise of their tests.",
    COUNT,
    "lower",
    run=lambda summary: None if summary.adoption is UNSET else summary.adoption.below,
    shown={"page methods": ""},
)

ADOPTION_METRICS = (ALONE, GAIN, ADOPTED, BELOW_ALONE)
