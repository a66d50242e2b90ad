"""Which model a device serves: its best so far, from whatever run, until there is a better one.

Candidates are the personal model after each round's work and, in the final evaluation, the model that local
training starts from and the personal model it leads to. The rule, the same on a device and in a simulation:

- Where the device holds validation samples out, the lower validation loss is served, of equals the newer.
  Both are judged on the samples of today: when these have changed, the served one is judged anew. (A model
  of another kind, with another hash, this trainer cannot judge: its loss stands as it was found.)
- Where that cannot tell (no validation samples, or the served model may have been trained on them because
  its run held fewer out), there is nothing honest to compare: within a run the newest model that was
  trained here is served. One from an earlier run stays until the new run's has no higher loss on the training
  samples of today. (Of a model of another kind it is the last epoch's, as seen while training, and the
  new run's final evaluation replaces it in any case.)
- What answers another question (other inputs, other classes) is replaced at once.

The test split never decides; its accuracy is shown.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fleetune.edge_agent.extensions.local_only import LocalOnlyModel, RoundAttempt
from fleetune.edge_agent.extensions.releases import Releases
from fleetune.protocols.method.trainer import Part
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.tasks import score_named
from fleetune.protocols.tasks.anomaly_threshold import FalseAlarms, Threshold
from fleetune.protocols.tasks.reconstruction import Reconstruction
from fleetune.protocols.tasks.scores import ACCURACY
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.release import ReleaseWord

log = logging.getLogger(__name__)


class Memory(Protocol):
    """Where the served model, or a session, is kept: one value, which is replaced as a whole.

    Attributes:
        plain: what is kept there should take little time rather than few bytes.
    """

    @property
    def plain(self) -> bool: ...

    def read(self) -> bytes | None: ...

    def write(self, data: bytes) -> None: ...


class Serving(Protocol):
    """Decides which of the models that a run leads to is served: `Adoption`, or in runs with [adoption]
    `edge_agent.extensions.adoption.gated_adoption.GatedAdoption`.
    """

    @property
    def best(self) -> "ModelRecord | None":
        """What is kept of the run to go on with: its best model so far; None: nothing."""
        ...

    @property
    def compare_alone(self) -> int:
        """Every so many of its rounds the device trains a model alone beside the run's; 0: never."""
        ...

    def resume(self, best: "ModelRecord | None") -> None:
        """Go on with what `best` was when the run stopped."""
        ...

    def offer(
        self,
        weights: FlatArray,
        turn: RoundAttempt,
        accuracy: float | None,
        *,
        training_loss: float | None = None,
        trained: bool = True,
    ) -> None:
        """A candidate of this round."""
        ...

    def settle(self, turn: RoundAttempt, alone: LocalOnlyModel | None) -> None:
        """All candidates of this round were offered."""
        ...

    def withdraw(self, version: int) -> None:
        """A version of the run's shared model is not to be served any more."""
        ...

    def found_of(self, releases: Releases) -> ReleaseWord:
        """What the device says of the shared model's versions."""
        ...

    def told(self, alone: LocalOnlyModel | None) -> Mapping[str, Any]:
        """The fields of `Measures` that say what is served and how it does."""
        ...


class Judge(Protocol):
    """A device's model and data, as far as models are judged by them."""

    def loss(self, weights: FlatArray, part: Part) -> float: ...

    def score(self, weights: FlatArray, part: Part) -> float | None: ...

    def threshold(self, weights: FlatArray) -> Threshold | None: ...


@dataclass(frozen=True)
class ModelRecord:
    """A candidate to be served, and what is known of how well it does.

    Attributes:
        run, round: in which it was trained.
        closing: in the run's final evaluation.
        model: hash of its `ModelSpec`.
        input_shape, num_classes: the question it answers.
        held_out: share of the training samples that its run held out as validation samples.
        validation_loss: None: there were no validation samples.
        trained: it comes out of local training here; False: it is what local training started from.
        training_loss: of the last epoch, as seen while training, or on the training samples of today; None:
            not known.
        accuracy: on the device's test split, 0..1, or another score; None: without one.
        samples: which samples the two were found on, see `DeviceData.fingerprint`.
        threshold: of a reconstruction that is served: errors above are anomalies.
        false_alarms: how often it calls normal samples anomalies; None: not known.
        attempt: at the round, where models are gated (see `gated_adoption`); as all below.
        alone: trained by this device on its own samples alone; False: by the run's method.
        loss_error: standard error of `validation_loss`.
        lead: how much lower its validation loss was than that of the model trained alone, when it was last
            judged; None: there was none, or it is that model.
        lead_error: standard error of `lead`.
        why: it is served, in one line.
        version: its number among those that this device has served; 0: it has none.
        score: the name of what `accuracy` holds, where that is another score of the run's task.
    """

    run: str
    round: int
    closing: bool
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
    alone: bool = False
    loss_error: float | None = None
    lead: float | None = None
    lead_error: float | None = None
    why: str = ""
    version: int = 0
    score: str = ""
    false_alarms: FalseAlarms | None = None

    @property
    def scored(self) -> str:
        """How it does on the device's test split, for people; "" where that is not known."""
        if self.accuracy is None:
            return ""
        score = score_named(self.score)
        if score is None or score == ACCURACY:
            return f"{self.accuracy:.1%} right"
        return f"{score.title} {self.accuracy:.1%}" if score.share else f"{score.title} {self.accuracy:.4g}"

    @property
    def origin(self) -> tuple[object, ...]:
        """What makes it the model that it is."""
        return self.run, self.round, self.attempt, self.closing, self.trained, self.alone

    @property
    def words(self) -> str:
        """Where the model comes from and how well it does, for people."""
        said = [f"run {self.run}, {'final evaluation' if self.closing else f'round {self.round}'}"]
        if self.alone:
            said[0] += ", trained alone"
        if self.validation_loss is not None:
            said.append(f"validation loss {self.validation_loss:.4g}")
        if self.scored:
            said.append(f"{self.scored} on its own test samples")
        return "; ".join(said)


@dataclass(frozen=True)
class DeployedModel:
    """The model that a device serves.

    Attributes:
        record: what is known of it.
        weights: shape (spec.size,).
    """

    record: ModelRecord
    weights: FlatArray


def other_score(task: Task) -> str:
    """`ModelRecord.score` of a run of this task."""
    return "" if task.score == ACCURACY else task.score.name


def read_deployed(data: bytes | None, spec: ModelSpec | None = None) -> DeployedModel | None:
    """Read what `Adoption` wrote; None: there is nothing yet.

    Raises:
        PacketError: it is damaged, or of another model than `spec`.
    """
    return None if data is None else codec.decode(data, DeployedModel, spec)


def is_better(candidate: ModelRecord, served: ModelRecord | None) -> bool:
    """Whether `candidate` replaces `served`: the rule at the top of this file."""
    if served is None or _question(candidate) != _question(served):
        return candidate.trained
    ours, theirs = candidate.validation_loss, served.validation_loss
    if ours is not None and theirs is not None and candidate.held_out <= served.held_out:
        return ours <= theirs
    if not candidate.trained or candidate.run == served.run:
        return candidate.trained
    if candidate.closing and candidate.model != served.model:
        return True
    ours, theirs = candidate.training_loss, served.training_loss
    return ours is None or theirs is None or ours <= theirs


def with_threshold(
    record: ModelRecord, weights: FlatArray, enrolment: Enrolment, judge: Judge
) -> ModelRecord:
    """`record` as it is served: with the threshold of anomalies, where the run learns to reconstruct."""
    if not isinstance(enrolment.learns, Reconstruction):
        return record
    found = judge.threshold(weights)
    if found is None:
        return replace(record, threshold=None, false_alarms=None)
    return replace(record, threshold=found.error, false_alarms=found.false_alarms)


def threshold_in(record: ModelRecord) -> Threshold | None:
    """The threshold of anomalies that a served model has; None: it has none."""
    found = record.threshold
    return None if found is None else Threshold(found, record.false_alarms)


def _question(record: ModelRecord) -> tuple[object, ...]:
    return record.input_shape, record.num_classes


class Adoption:
    """A device's served model during one run, and the best model of this run, which the run's figures tell
    of.

    Args:
        memory: of the served model, across the device's runs.
        enrolment: of the run.
        judge: its model and data.
        num_validation: how many validation samples it has.
        samples: fingerprint of the validation and the test samples.
        session_keeps_newest: what is written anyway is not written twice: where nothing is kept yet, and no
            validation samples could prefer an older model, a round's is the personal model in the session.

    Raises:
        PacketError: what is kept is damaged.
        StoreError: it cannot be read, or its new figures cannot be written.
    """

    def __init__(
        self,
        memory: Memory,
        enrolment: Enrolment,
        judge: Judge,
        *,
        num_validation: int,
        samples: str = "",
        session_keeps_newest: bool = False,
    ) -> None:
        self._memory, self._enrolment, self._judge = memory, enrolment, judge
        self._judges = num_validation > 0
        self._in_session = session_keeps_newest and not self._judges
        self._samples = samples
        self._best: ModelRecord | None = None
        self.served = self._judged_today()

    @property
    def compare_alone(self) -> int:
        return 0

    def resume(self, best: ModelRecord | None) -> None:
        """Go on with the `best` of this run as it was when the run stopped."""
        self._best = best if best is not None and best.samples == self._samples else None

    @property
    def best(self) -> ModelRecord | None:
        """The model of this run to be served, whether it is served or an earlier run's still is."""
        served = self.served
        return served if served is not None and served.run == self._enrolment.run else self._best

    def offer(
        self,
        weights: FlatArray,
        turn: RoundAttempt,
        accuracy: float | None,
        *,
        training_loss: float | None = None,
        trained: bool = True,
    ) -> None:
        """Serve a candidate from now on if it is better.

        Args:
            weights: of the candidate, shape (spec.size,); not kept in memory.
            turn: of the work.
            accuracy: see `ModelRecord`, as for the rest.
            training_loss: of its local training.
            trained: whether there was any.

        Raises:
            StoreError: it is better, but cannot be written; the one before is still served.
        """
        spec = self._enrolment.spec
        if trained and self._by_training_loss(self.served):
            training_loss = self._judge.loss(weights, "train")
        candidate = ModelRecord(
            run=self._enrolment.run,
            round=turn.round,
            closing=turn.closing,
            model=spec.hash,
            input_shape=spec.input_shape,
            num_classes=spec.num_classes,
            score=other_score(self._enrolment.learns),
            trained=trained,
            held_out=self._enrolment.validation_fraction,
            validation_loss=self._loss(weights),
            training_loss=training_loss,
            accuracy=accuracy,
            samples=self._samples,
        )
        if not math.isfinite(candidate.validation_loss or 0.0) or not is_better(candidate, self.best):
            better = f"that of {self.best.words} is better" if self.best else "it was not trained here"
            log.info("model of %s: not served, %s", candidate.words, better)
            return
        self._best = candidate
        if is_better(candidate, self.served):
            self._serve(candidate, weights)
            log.info("model of %s: served from now on", candidate.words)
        else:
            served = self.served.words if self.served else "another run"
            log.info("model of %s: that of %s is still served", candidate.words, served)

    def settle(self, turn: RoundAttempt, alone: LocalOnlyModel | None) -> None:
        """Each candidate was decided on when it was offered."""

    def withdraw(self, version: int) -> None:
        """There are versions only where models are gated."""

    def found_of(self, releases: Releases) -> ReleaseWord:
        return ReleaseWord(releases.numbers)

    def told(self, alone: LocalOnlyModel | None) -> Mapping[str, Any]:  # noqa: ARG002 - there is none
        best = self.best
        return {"kept": None if best is None else best.accuracy}

    def _loss(self, weights: FlatArray) -> float | None:
        return self._judge.loss(weights, "validation") if self._judges else None

    def _by_training_loss(self, served: ModelRecord | None) -> bool:
        """Whether a model of an earlier run is served that only the training samples can judge."""
        if served is None or served.run == self._enrolment.run:
            return False
        judged = self._judges and self._enrolment.validation_fraction <= served.held_out
        return served.model == self._enrolment.spec.hash and not judged

    def _judged_today(self) -> ModelRecord | None:
        """What is served, with its figures on the samples of today if this trainer can find them."""
        found = read_deployed(self._memory.read())
        self._in_session &= found is None
        if found is None or found.record.model != self._enrolment.spec.hash:
            return None if found is None else found.record
        served = found.record
        if served.samples != self._samples:
            accuracy = self._judge.score(found.weights, "test")
            loss = self._loss(found.weights)
            served = replace(served, validation_loss=loss, accuracy=accuracy, samples=self._samples)
            self._serve(served, found.weights)
        if self._by_training_loss(served):
            served = replace(served, training_loss=self._judge.loss(found.weights, "train"))
        return served

    def _serve(self, record: ModelRecord, weights: FlatArray) -> None:
        record = with_threshold(record, weights, self._enrolment, self._judge)
        if record.closing or not self._in_session:  # a final evaluation's is a copy's
            kept, plain = DeployedModel(record, weights), self._memory.plain
            self._memory.write(codec.encode(kept, self._enrolment.spec, own=True, plain=plain))
            self._in_session = False
        self.served = record
