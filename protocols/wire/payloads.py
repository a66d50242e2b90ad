"""What travels as a payload: enrolment and assignment down, reply up.

Nothing measured by a clock and no run's unique id stands in assignments and replies, so that a simulated
run and a real one send equal bytes; the transfer key they travel under names the run.
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
ScoreValue = Finite  # the run's task says what it can be
MOST_SCORES = 20
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Enrolment:
    """All that a device needs to take part in a run; sent to each device once.

    Attributes:
        run: unique id of the run.
        seed: of every draw of the run.
        spec: the model.
        method: the [method] section, `name` included.
        training: the [training] section.
        mean, std, validation_fraction: of the [data] section.
        deadline_s: of a round.
        flops_per_sample: floating-point operations of one training step, per sample.
        activation_bytes_per_sample: what its forward pass keeps for its backward pass, per sample.
        weights: the initial model, shape (spec.size,).
        continues: id of the run that this one goes on from: a device that has a model of its own from there
            starts from it; None: all start from `weights`.
        task: the [task] section; left out where it is the default: classification by accuracy.
        adoption: the [adoption] section, where it is enabled.
        encoding: of the [encoding] section; left out where nothing is encoded.
        compact: of the [encoding] section; left out where it is not wanted.
        quick_masks: of the [encoding] section: a mask's code must be worth its time.
        proposes: the coordinator proposes each task's ratio, so a device says what it could do
            (`DeviceReport.affords`); left out where it does not.
        least_work, most_work: how little and how much of the local training it proposes; each is left out
            where that is all of it.
        encodings: of updates, beside that of `encoding`, which it may propose; left out where there is none.
        late: share of a device's rounds that may take longer than the deadline; left out where the
            coordinator proposes no ratios.
        asks_validation: in the final evaluation a device reports its model's score on its validation samples;
            left out where it holds none out.
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

    def __post_init__(self) -> None:
        check_encodings(self.encodings or ())

    @property
    def least_local_work(self) -> float:
        """The smallest share of local training that is ever asked for."""
        return 1.0 if self.least_work is UNSET else self.least_work

    @property
    def most_local_work(self) -> float:
        """The most of it, likewise."""
        return 1.0 if self.most_work is UNSET else self.most_work

    @property
    def uplink(self) -> Encoding:
        """How its devices write the values of their updates, unless a task asks for another."""
        return self._encoding.uplink

    @property
    def uplinks(self) -> tuple[Encoding, ...]:
        """All that a task may ask for, that one first."""
        return self.uplink, *(chosen(one) for one in self.encodings or ())

    @property
    def downlink(self) -> Encoding:
        """How the coordinator writes the values of their tasks."""
        return self._encoding.downlink

    def mask_time(self, report: DeviceReport | None, direction: Literal["down", "up"]) -> CodingTime | None:
        """What the code of a mask takes of a device that says so; None: it is no matter, or not known."""
        if self.quick_masks is not True or report is None:
            return None
        bps = report.downlink_bps if direction == "down" else report.uplink_bps
        return coding_time(report.samples_per_s, self.flops_per_sample, bps)

    @property
    def _encoding(self) -> ValueEncodings:
        return PLAIN if self.encoding is UNSET else self.encoding

    @property
    def learns(self) -> Task:
        """What the run learns. Raises SettingError: the task has no such loss or score."""
        return CLASSIFICATION if self.task is UNSET else task_of(self.task)


@dataclass(frozen=True)
class Assignment(Generic[T]):
    """A task for one device in one attempt at a round.

    Attributes:
        release: which version of the shared model the device may serve; in runs with adoption.canary.
        base: the digest of what its values were written with (`protocols.update.base`), where they are
            differences to what the device holds.
        ratio: that the coordinator proposes for it, in runs with an objective.
        local_work: likewise, how much of the local training; left out where that is all of it, once.
        uplink: likewise, which of `Enrolment.uplinks` is to write its update; left out for the first.
        span_s: likewise, seconds that its round is given.
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
        """What `Round` and `TransferKey` say, by the name that it has on the wire."""
        return self.rehearsal


def proposed_budget(
    ratio: float | UnsetType, local_work: float | UnsetType, uplink: int | UnsetType = UNSET
) -> Budget | None:
    """What an `Assignment` proposes; None: nothing, the device chooses."""
    if ratio is UNSET:
        return None
    return Budget(ratio, 1.0 if local_work is UNSET else local_work, uplink or 0)


@dataclass(frozen=True)
class Measures:
    """How well a device's models do: by the score of the run's task (accuracy, in classification), on the
    device's own test split, None without one.

    Attributes:
        num_samples, num_test: the device's own.
        train_loss: of the last epoch of local training, as seen while training; None if it did not train.
        before: of the model that local training started from.
        after: of the personal model after the round's work.
        personal: in a final evaluation, of the personal model as it was before.
        kept: in a final evaluation, of the model that the device would serve, of all that this run
            has led it to. It does not travel with other replies.
        scores: all that the task has, of the personal model, by name; left out by runs without a [task].
        adopted: in a run with [adoption], as all below: whether the model that the device serves is one of
            the fleet, and not the one that it trained alone.
        alone: accuracy of the model trained alone, as it is after this work.
        gain: how much more often the model that it serves is right than that one, on the same samples.
        gain_error: standard error of `gain`.
        release: what it says of the shared model's versions, in runs with adoption.canary.
        local_work: how much of the run's local training it did, where that is not all of it, once.
        validation: in a final evaluation, of the personal model as it was before, on the validation samples;
            left out by devices that hold none out.
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
        update: None in a final evaluation.
        base: the digest of what its values were written with (`protocols.update.base`), where an encoding
            wrote them.
    """

    device: FleetName
    round: Number
    attempt: Number
    leaving: bool
    measures: Measures
    update: U | None
    base: Digest | UnsetType = UNSET


def run_key(seed: int) -> Key:
    """The root of all draws of a run."""
    return Key.of("fleetune", seed)


def work_key(seed: int, round_number: int, attempt: int, device: str) -> Key:
    """Of a device's own draws in one attempt at a round."""
    return run_key(seed).child("work", round_number, attempt, device)


def read_enrolment(data: bytes, limit: int = MAX_ENROLMENT_BYTES) -> Enrolment:
    """Read an enrolment that came over the wire, and check all of it.

    Args:
        data: what the coordinator encoded.
        limit: most bytes of it, unpacked.

    Raises:
        PacketError: it is damaged, too large, or what it says of the model makes no sense.
    """
    enrolment = codec.decode(data, Enrolment, None, limit=limit, elements=MAX_ENROLMENT_ELEMENTS)
    check_spec(enrolment.spec)
    codec.check_model(data, enrolment.spec)
    if enrolment.weights.shape != (enrolment.spec.size,) or enrolment.weights.dtype != np.float32:
        raise PacketCorrupt(f"enrolment of run {enrolment.run}: the initial weights do not fit the model")
    return enrolment
