"""What is known of one device in one round, and summed up over its rounds and over devices."""

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from fleetune.coordinator.metrics.averages import greatest, last, mean, middle, summed
from fleetune.coordinator.metrics.metric import BYTES, COUNT, FRACTION, JOULES, SECONDS, Metric, Value
from fleetune.coordinator.rounds.records import DeviceRound

ACCURACY_TITLE = "accuracy on own test samples"


def _told(value: Value | UnsetType) -> Value:
    return None if value is UNSET else value


def _kept(reply: DeviceRound) -> Value:
    return None if reply.measures.kept is UNSET else reply.measures.kept


def _measured(name: str) -> Callable[[DeviceRound], Value]:
    """A field of `RoundCost` as the device measured it."""
    return lambda reply: getattr(reply.actual, name)


def _foretold(name: str) -> Callable[[DeviceRound], Value]:
    """A field of `RoundCost` as the device predicted it."""
    return lambda reply: getattr(reply.predicted, name)


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
    ACCURACY_TITLE,
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
    ACCURACY_TITLE,
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
    ACCURACY_TITLE,
    "Accuracy of the personal model as it stood after the last round, on a device's own test samples.",
    FRACTION,
    "higher",
    reply=lambda reply: reply.measures.personal,
    over_devices=mean,
    device=lambda row: row.personal,
    judges=True,
    shown={"device table": "accuracy", "page devices": "personal accuracy"},
)
VALIDATION = Metric(
    "accuracy_validation",
    "validation accuracy",
    "Accuracy of the personal model as it stood after the last round, on a device's validation samples.",
    FRACTION,
    "higher",
    reply=lambda reply: _told(reply.measures.validation),
    over_devices=mean,
    device=lambda row: _told(row.validation),
    judges=True,
    shown={"device table": "validation", "page devices": "validation"},
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
DOWNLOAD = Metric(
    "download_s",
    "download time",
    "What receiving a round's task took.",
    SECONDS,
    reply=_measured("download_s"),
    predicted=_foretold("download_s"),
    run=lambda summary: summary.seconds.down,
    shown={"predictions": "of the download"},
)
TRAINING = Metric(
    "train_s",
    "training time",
    "What a round's work took on devices, evaluations included.",
    SECONDS,
    reply=_measured("train_s"),
    predicted=_foretold("train_s"),
    run=lambda summary: summary.seconds.train,
    shown={"predictions": "of training"},
)
PROCESSOR = Metric(
    "processor_s",
    "processor time of training",
    "What a round's work used of a device's processors: it does not wait for other programs.",
    SECONDS,
    reply=_measured("processor_s"),
    predicted=_foretold("processor_s"),
    shown={"predictions": "of these the processor's"},
)
UPLOAD = Metric(
    "upload_s",
    "upload time",
    "What sending a round's update took.",
    SECONDS,
    reply=_measured("upload_s"),
    predicted=_foretold("upload_s"),
    run=lambda summary: summary.seconds.up,
    shown={"predictions": "of the upload"},
)
MEMORY = Metric(
    "memory_bytes",
    "peak memory",
    "Peak resident memory of an agent's process.",
    BYTES,
    reply=_measured("memory_bytes"),
    predicted=_foretold("memory_bytes"),
    over_rounds=greatest,
    over_devices=greatest,
    shown={"predictions": ""},
)
