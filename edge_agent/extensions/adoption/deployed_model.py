"""The model that a device deploys, and the record of a model: its origin and its scores."""

from dataclasses import dataclass, replace

from fleetune.edge_agent.extensions.extension import RoundAttempt
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.tasks import score_named
from fleetune.protocols.tasks.anomaly_threshold import FalseAlarms, Threshold
from fleetune.protocols.tasks.reconstruction import Reconstruction
from fleetune.protocols.tasks.scores import ACCURACY
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment


@dataclass(frozen=True)
class ModelRecord:
    """Where a model comes from, and its known metrics.

    Attributes:
        run, round: the run and round that trained it.
        final_evaluation: True if the run's final evaluation trained it.
        model: hash of its `ModelSpec`.
        input_shape, num_classes: shape of its inputs, and number of its outputs.
        held_out: share of the training samples that its run held out as validation samples.
        validation_loss: loss on the validation samples; None if there were none.
        trained: True if local training on this device produced it; False if local training started from it.
        training_loss: mean loss of the last epoch during training; None if not known.
        accuracy: accuracy on the device's test split, 0..1, or the score named in `score`; None without test
            split.
        samples: fingerprint of the samples behind the metrics, see `DeviceData.fingerprint`.
        threshold: for a model that reconstructs its input: a larger error marks an anomaly.
        attempt: attempt at the round.
        local_only: True if it was trained on this device's samples only; False for the run's method.
        loss_error: standard error of `validation_loss`.
        lead: validation loss of the local-only model minus that of this model, at the last evaluation; None
            if there was no local-only model, or if this is it.
        lead_error: standard error of `lead`.
        why: the reason for choosing it, in one line.
        version: its number among the models that this device has deployed; 0 if it has none.
        score: name of the score in `accuracy`, if the run's task uses another one.
        false_alarms: fraction of normal samples that `threshold` marks as anomalies; None if not known.
    """

    run: str
    round: int
    final_evaluation: bool
    model: str
    input_shape: tuple[int, ...]
    num_classes: int
    trained: bool = True
    held_out: float = 0.0
    validation_loss: float | None = None
    training_loss: float | None = None
    accuracy: float | None = None
    samples: str = ""
    threshold: float | None = None
    attempt: int = 0
    local_only: bool = False
    loss_error: float | None = None
    lead: float | None = None
    lead_error: float | None = None
    why: str = ""
    version: int = 0
    score: str = ""
    false_alarms: FalseAlarms | None = None

    @property
    def scored(self) -> str:
        """Return the score on the device's test split as text; "" if unknown."""
        if self.accuracy is None:
            return ""
        score = score_named(self.score)
        if score is None or score == ACCURACY:
            return f"{self.accuracy:.1%} right"
        return f"{score.title} {self.accuracy:.1%}" if score.share else f"{score.title} {self.accuracy:.4g}"

    @property
    def origin(self) -> tuple[object, ...]:
        """The values that identify the model."""
        return self.run, self.round, self.attempt, self.final_evaluation, self.trained, self.local_only

    @property
    def words(self) -> str:
        """Return a line with the model's origin and metrics."""
        said = [f"run {self.run}, {self._when}"]
        if self.local_only:
            said[0] += ", local-only"
        if self.validation_loss is not None:
            said.append(f"validation loss {self.validation_loss:.4g}")
        if self.scored:
            said.append(f"{self.scored} on its own test samples")
        return "; ".join(said)

    @property
    def _when(self) -> str:
        if not self.final_evaluation:
            return f"round {self.round}"
        return f"final evaluation, {'after' if self.trained else 'before'} local training"

    def is_of(self, spec: ModelSpec) -> bool:
        """True if a trainer of the model `spec` can evaluate this one."""
        return self.model == spec.hash


@dataclass(frozen=True)
class DeployedModel:
    """The model that a device deploys, or a version of it.

    Attributes:
        record: origin and known metrics.
        weights: shape (spec.size,).
    """

    record: ModelRecord
    weights: FlatArray


def other_score(task: Task) -> str:
    """Return the value of `ModelRecord.score` in runs of this task."""
    return "" if task.score == ACCURACY else task.score.name


def new_record(enrolment: Enrolment, attempt: RoundAttempt, samples: str = "") -> ModelRecord:
    """Make the record of a model of this run before it is evaluated; `samples` is a fingerprint."""
    spec = enrolment.spec
    return ModelRecord(
        run=enrolment.run,
        round=attempt.round,
        attempt=attempt.attempt,
        final_evaluation=attempt.final_evaluation,
        model=spec.hash,
        input_shape=spec.input_shape,
        num_classes=spec.num_classes,
        score=other_score(enrolment.learns),
        held_out=enrolment.validation_fraction,
        samples=samples,
    )


def read_deployed(data: bytes | None, spec: ModelSpec | None = None) -> DeployedModel | None:
    """Decode the file of a deployed model; None if there is no file yet.

    Raises:
        PacketError: the file is damaged, or holds another model than `spec`.
    """
    return None if data is None else codec.decode(data, DeployedModel, spec)


def with_threshold(
    record: ModelRecord, weights: FlatArray, enrolment: Enrolment, trainer: LocalTrainer
) -> ModelRecord:
    """Return `record` with the anomaly threshold if the run learns to reconstruct."""
    if not isinstance(enrolment.learns, Reconstruction):
        return record
    found = trainer.threshold(weights)
    if found is None:
        return replace(record, threshold=None, false_alarms=None)
    return replace(record, threshold=found.error, false_alarms=found.false_alarms)


def threshold_in(record: ModelRecord) -> Threshold | None:
    """Return the anomaly threshold of a deployed model; None if it has none."""
    found = record.threshold
    return None if found is None else Threshold(found, record.false_alarms)
