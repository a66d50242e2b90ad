"""The payloads: enrolment and assignment from the coordinator, reply from the device.

Assignments and replies hold no measured times and no unique run id. So a simulated run and a real one send
equal bytes. The transfer key of a payload names the run.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from fleetune.protocols.bounds import (
    Amount,
    Digest,
    Finite,
    FleetName,
    Int64,
    Label,
    LocalWork,
    Loss,
    NonNegative,
    Number,
    NumSamples,
    Positive,
    Ratio,
    RunId,
    Uplink,
)
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.model.input_scaling import Mean, Std
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.model.spec_check import check_spec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.encoding import PLAIN, Choice, ValueEncodings, check_encodings
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.settings.section import Fraction
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import CLASSIFICATION, task_of
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.update import codec
from fleetune.protocols.update.encodings import chosen
from fleetune.protocols.update.encodings.encoding import Encoding
from fleetune.protocols.update.masks.coding_time import CodingTime, coding_time
from fleetune.protocols.wire.release import Release, ReleaseWord

MAX_ENROLMENT_BYTES = 2**31
MAX_ENROLMENT_ELEMENTS = 200_000
ScoreValue = Finite  # depends on the run's task
MOST_SCORES = 20
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Enrolment:
    """All data that a device needs to take part in a run; sent to each device once.

    Attributes:
        run: unique id of the run.
        seed: seed of all random draws of the run.
        spec: the model.
        method: the [method] section, including `name`.
        training: the [training] section.
        mean, std, validation_fraction: values of the [data] section.
        deadline_s: deadline of a round, in seconds.
        flops_per_sample: floating-point operations of one training step, per sample.
        activation_bytes_per_sample: bytes that the forward pass stores for the backward pass, per sample.
        weights: the initial model, shape (spec.size,).
        continues: id of the run that this one continues. A device with its own model from that run starts
            from it; None if all devices start from `weights`.
        task: the [task] section; omitted for the default: classification with accuracy.
        adoption: the [adoption] section, if it is enabled.
        encoding: encoding of the [encoding] section; omitted if values are not encoded.
        compact: True if messages are compact, from the [encoding] section; omitted otherwise.
        quick_masks: True if a mask is entropy-coded only if that saves time, from the [encoding] section.
        proposes: True if the coordinator proposes each task's ratio. A device then reports which ratios it
            can afford (`DeviceReport.affords`). Omitted otherwise.
        least_work, most_work: smallest and largest share of local training that the coordinator proposes;
            omitted if that is the full training.
        encodings: further encodings of updates that the coordinator may propose, in addition to `encoding`;
            omitted if there are none.
        late: share of a device's rounds that may take longer than the deadline; omitted if the coordinator
            proposes no ratios.
        asks_validation: True if devices report their model's score on their validation samples in the final
            evaluation; omitted if the run holds no validation samples out.
        privacy: the [privacy] section; omitted if the run has none.
        most_tasks: largest number of tasks that a device may answer with updates, by [privacy]; omitted for
            any number.
    """

    run: RunId
    seed: Int64
    spec: ModelSpec
    method: Annotated[dict[Label, Any], Meta(max_length=100)]
    training: TrainingSection
    mean: Mean
    std: Std
    validation_fraction: Fraction
    deadline_s: Positive
    flops_per_sample: Amount
    activation_bytes_per_sample: Amount
    weights: FlatArray
    continues: RunId | None = None
    task: TaskSection | UnsetType = UNSET
    adoption: AdoptionSection | UnsetType = UNSET
    encoding: ValueEncodings | UnsetType = UNSET
    compact: bool | UnsetType = UNSET
    quick_masks: bool | UnsetType = UNSET
    proposes: bool | UnsetType = UNSET
    least_work: Ratio | UnsetType = UNSET
    most_work: LocalWork | UnsetType = UNSET
    late: Ratio | UnsetType = UNSET
    encodings: Annotated[tuple[Choice, ...], Meta(max_length=8)] | UnsetType = UNSET
    asks_validation: bool | UnsetType = UNSET
    privacy: PrivacySection | UnsetType = UNSET
    most_tasks: Number | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_encodings(self.encodings or ())

    @property
    def least_local_work(self) -> float:
        """The smallest share of local training that a task asks for."""
        return 1.0 if self.least_work is UNSET else self.least_work

    @property
    def most_local_work(self) -> float:
        """The largest share of local training that a task asks for."""
        return 1.0 if self.most_work is UNSET else self.most_work

    @property
    def uplink(self) -> Encoding:
        """The devices' default encoding for the values of their updates."""
        return self._encoding.uplink

    @property
    def uplinks(self) -> tuple[Encoding, ...]:
        """All encodings that a task may ask for, the default one first."""
        return self.uplink, *(chosen(one) for one in self.encodings or ())

    @property
    def downlink(self) -> Encoding:
        """The coordinator's encoding for the values of tasks."""
        return self._encoding.downlink

    def mask_time(self, report: DeviceReport | None, direction: Literal["down", "up"]) -> CodingTime | None:
        """Return the time that a device needs to code a mask, from its report; None if unknown."""
        if self.quick_masks is not True or report is None:
            return None
        bps = report.downlink_bps if direction == "down" else report.uplink_bps
        return coding_time(report.samples_per_s, self.flops_per_sample, bps)

    @property
    def _encoding(self) -> ValueEncodings:
        return PLAIN if self.encoding is UNSET else self.encoding

    @property
    def learns(self) -> Task:
        """Return the learning task of the run. Raises SettingError if the task has no such loss or score."""
        return CLASSIFICATION if self.task is UNSET else task_of(self.task)


@dataclass(frozen=True)
class Assignment(Generic[T]):
    """A task for one device in one attempt at a round.

    Attributes:
        release: version of the shared model that the device may deploy, in runs with adoption.canary.
        base: digest of the model to which the values are differences (`protocols.update.reference_model`).
        ratio: ratio that the coordinator proposes for the device, in runs with an objective.
        local_work: proposed share of the local training; omitted for the full training.
        uplink: proposed index in `Enrolment.uplinks` for the update's encoding; omitted for the first.
        span_s: proposed duration of the round, in seconds.
    """

    device: FleetName
    round: Number
    attempt: Number
    rehearsal: bool
    task: T
    release: Release | UnsetType = UNSET
    base: Digest | UnsetType = UNSET
    ratio: Ratio | UnsetType = UNSET
    local_work: LocalWork | UnsetType = UNSET
    span_s: Positive | UnsetType = UNSET
    uplink: Uplink | UnsetType = UNSET

    @property
    def final_evaluation(self) -> bool:
        """True in the final evaluation, as in `Round` and `TransferKey`."""
        return self.rehearsal


def proposed_budget(
    ratio: float | UnsetType, local_work: float | UnsetType, uplink: int | UnsetType = UNSET
) -> Budget | None:
    """Return the budget that an `Assignment` proposes; None if the device chooses."""
    if ratio is UNSET:
        return None
    return Budget(ratio, 1.0 if local_work is UNSET else local_work, uplink or 0)


@dataclass(frozen=True)
class Measures:
    """Scores of a device's models on its own test split; None without a test split.

    The score is that of the run's task: accuracy in classification.

    Attributes:
        num_samples, num_test: number of the device's training and test samples.
        train_loss: mean loss of the last epoch during local training; None if the device did not train.
        before: score of the model that local training started from.
        after: score of the personal model after the round's work.
        personal: in a final evaluation, score of the personal model from before it.
        kept: in a final evaluation, score of the best checkpoint of this run. Other replies do not carry it.
        scores: all scores of the task for the personal model, by name; omitted in runs without a [task].
        adopted: True if the deployed model is a model of the fleet, False if it is the local-only model. This
            and the next four fields are only in runs with [adoption].
        alone: accuracy of the local-only model after this round's work.
        gain: accuracy of the deployed model minus that of the local-only model, on the same samples.
        gain_error: standard error of `gain`.
        release: report about the shared model's versions, in runs with adoption.canary.
        local_work: share of the run's local training that was done; omitted for the full training.
        validation: in a final evaluation, score of the personal model from before it on the validation
            samples; omitted by devices without validation samples.
    """

    num_samples: NumSamples
    num_test: NumSamples
    train_loss: Loss | None = None
    before: ScoreValue | None = None
    after: ScoreValue | None = None
    personal: ScoreValue | None = None
    kept: ScoreValue | UnsetType | None = UNSET
    scores: Annotated[dict[Label, ScoreValue], Meta(max_length=MOST_SCORES)] | UnsetType = UNSET
    adopted: bool | UnsetType = UNSET
    alone: ScoreValue | UnsetType | None = UNSET
    gain: Finite | UnsetType = UNSET
    gain_error: NonNegative | UnsetType = UNSET
    release: ReleaseWord | UnsetType = UNSET
    local_work: LocalWork | UnsetType = UNSET
    validation: ScoreValue | UnsetType | None = UNSET


@dataclass(frozen=True)
class Reply(Generic[U]):
    """A device's answer to an assignment.

    Attributes:
        update: the method's update; None in a final evaluation.
        base: digest of the reference model that the values were encoded with
            (`protocols.update.reference_model`), if an encoding was used.
    """

    device: FleetName
    round: Number
    attempt: Number
    leaving: bool
    measures: Measures
    update: U | None
    base: Digest | UnsetType = UNSET


def run_key(seed: int) -> Key:
    """Return the root key of all random draws of a run."""
    return Key.of("fleetune", seed)


def work_key(seed: int, round_number: int, attempt: int, device: str) -> Key:
    """Return the key of a device's own random draws in one attempt at a round."""
    return run_key(seed).child("work", round_number, attempt, device)


def read_enrolment(data: bytes, limit: int = MAX_ENROLMENT_BYTES) -> Enrolment:
    """Decode an enrolment from the wire, and check all of it.

    Args:
        data: the encoded enrolment.
        limit: largest accepted size after unpacking, in bytes.

    Raises:
        PacketError: the enrolment is damaged, too large, or describes an impossible model.
    """
    enrolment = codec.decode(data, Enrolment, None, limit=limit, elements=MAX_ENROLMENT_ELEMENTS)
    check_spec(enrolment.spec)
    codec.check_model(data, enrolment.spec)
    if enrolment.weights.shape != (enrolment.spec.size,) or enrolment.weights.dtype != np.float32:
        raise PacketCorrupt(f"enrolment of run {enrolment.run}: the initial weights do not fit the model")
    return enrolment
