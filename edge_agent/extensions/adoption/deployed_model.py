"""The model that a device deploys, and the record of a model: its origin and its scores."""

from dataclasses import dataclass, replace

from fleetune.edge_agent.extensions.extension import EvaluatingTrainer, RoundAttempt
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
    """Where a model comes from, and what is known of how well it does.

    Attributes:
        run, round: in which it was trained.
        final_evaluation: whether that was in the run's final evaluation.
        model: hash of its `ModelSpec`.
        input_shape, num_classes: what it takes and answers.
        held_out: share of the training samples that its run held out as validation samples.
        validation_loss: None: there were no validation samples.
        trained: whether it comes out of local training here; False: local training started from it.
        training_loss: of the last epoch, as seen while training; None: not known.
        accuracy: on the device's test split, 0..1, or another score; None: without one.
        samples: fingerprint of the samples that the figures were found on, see `DeviceData.fingerprint`.
        threshold: of a deployed model that reconstructs: larger errors are anomalies.
        attempt: at the round.
        local_only: whether it was trained on this device's samples only; False: by the run's method.
        loss_error: standard error of `validation_loss`.
        lead: how much lower its validation loss was than that of the local-only model, when it was last
            evaluated; None: there was none, or it is that model.
        lead_error: standard error of `lead`.
        why: it was chosen, in one line.
        version: its number among the models that this device has deployed; 0: it has none.
        score: name of what `accuracy` holds, where that is another score of the run's task.
        false_alarms: how often `threshold` calls normal samples anomalies; None: not known.
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
        """Its score on the device's test split, for people; "" where that is not known."""
        if self.accuracy is None:
            return ""
        score = score_named(self.score)
        if score is None or score == ACCURACY:
            return f"{self.accuracy:.1%} right"
        return f"{score.title} {self.accuracy:.1%}" if score.share else f"{score.title} {self.accuracy:.4g}"

    @property
    def origin(self) -> tuple[object, ...]:
        """What identifies the model."""
        return self.run, self.round, self.attempt, self.final_evaluation, self.trained, self.local_only

    @property
    def words(self) -> str:
        """Where the model comes from and how well it does, for people."""
        said = [f"run {self.run}, {'final evaluation' if self.final_evaluation else f'round {self.round}'}"]
        if self.local_only:
            said[0] += ", local-only"
        if self.validation_loss is not None:
            said.append(f"validation loss {self.validation_loss:.4g}")
        if self.scored:
            said.append(f"{self.scored} on its own test samples")
        return "; ".join(said)

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether a trainer of this model can evaluate it."""
        return self.model == spec.hash


@dataclass(frozen=True)
class DeployedModel:
    """The model that a device deploys, or a version of it.

    Attributes:
        record: what is known of it.
        weights: shape (spec.size,).
    """

    record: ModelRecord
    weights: FlatArray


def other_score(task: Task) -> str:
    """`ModelRecord.score` of a run of this task."""
    return "" if task.score == ACCURACY else task.score.name


def new_record(enrolment: Enrolment, attempt: RoundAttempt, samples: str = "") -> ModelRecord:
    """The record of a model of this run, before it is evaluated; `samples` is their fingerprint."""
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
    """Read the file of a deployed model; None: there is none yet.

    Raises:
        PacketError: it is damaged, or of another model than `spec`.
    """
    return None if data is None else codec.decode(data, DeployedModel, spec)


def with_threshold(
    record: ModelRecord, weights: FlatArray, enrolment: Enrolment, trainer: EvaluatingTrainer
) -> ModelRecord:
    """`record` with the threshold of anomalies, where the run learns to reconstruct."""
    if not isinstance(enrolment.learns, Reconstruction):
        return record
    found = trainer.threshold(weights)
    if found is None:
        return replace(record, threshold=None, false_alarms=None)
    return replace(record, threshold=found.error, false_alarms=found.false_alarms)


def threshold_in(record: ModelRecord) -> Threshold | None:
    """The threshold of anomalies of a deployed model; None: it has none."""
    found = record.threshold
    return None if found is None else Threshold(found, record.false_alarms)
