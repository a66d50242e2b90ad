"""The rule of runs without [adoption]: deploy the best checkpoint so far, also across runs.

Candidates are the personal model after each round and, in the final evaluation, the model that local training
starts from. The rule is the same on a device and in a simulation:

- If the device holds out validation samples, it deploys the model with the lower validation loss. With equal
  losses it deploys the newer model. Both are evaluated on the current samples. A model with another structure
  (another hash) cannot be evaluated by this trainer, so its recorded loss is used.
- Sometimes no fair comparison is possible. There are no validation samples, or the deployed model may have
  been trained on them because its run held out fewer. Then the newest trained model of a run is deployed. A
  model of an earlier run stays until the new run's model has no higher loss on the current training samples.
  For a model of another structure the rule uses the loss of its last epoch. The final evaluation replaces it
  in any case.
- A model with other inputs or classes is replaced at once.

The test split never decides. Its score is only shown.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetune.edge_agent.extensions.adoption.adoption_rule import AdoptionRule, Choice, Evaluated
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.extensions.extension import RoundAttempt, RunStart
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel
from fleetune.protocols.model.spec import FlatArray

log = logging.getLogger(__name__)


def is_better(candidate: ModelRecord, deployed: ModelRecord | None) -> bool:
    """True if `candidate` replaces `deployed`, by the rule at the top of this file."""
    if deployed is None or _question(candidate) != _question(deployed):
        return candidate.trained
    ours, theirs = candidate.validation_loss, deployed.validation_loss
    if ours is not None and theirs is not None and candidate.held_out <= deployed.held_out:
        return ours <= theirs
    if not candidate.trained or candidate.run == deployed.run:
        return candidate.trained
    if candidate.final_evaluation and candidate.model != deployed.model:
        return True
    ours, theirs = candidate.training_loss, deployed.training_loss
    return ours is None or theirs is None or ours <= theirs


def _why_not(record: ModelRecord, best: ModelRecord | None) -> str:
    """Return in words why `record` does not replace `best`."""
    if not math.isfinite(record.validation_loss or 0.0):
        return "its validation loss is not finite"
    if best is None or (not record.trained and record.validation_loss is None):
        return "it has not been trained on this device"
    return f"that of {best.words} has the lower loss"


def _question(record: ModelRecord) -> tuple[object, ...]:
    return record.input_shape, record.num_classes


@dataclass(frozen=True)
class BestCheckpoint(AdoptionRule):
    """Adoption rule that deploys the best checkpoint so far; see `AdoptionRule`.

    Attributes:
        start: the run, and the device's model and data.
    """

    start: RunStart

    def evaluate_deployed(self, found: DeployedModel) -> Evaluated:
        """Return the deployed model with metrics on the current samples, if this trainer can evaluate it."""
        record, start = found.record, self.start
        if not record.is_of(start.enrolment.spec):
            return Evaluated(record)
        if record.samples != start.samples:
            score, loss = start.trainer.score(found.weights, "test"), self._validation_loss(found.weights)
            record = replace(record, validation_loss=loss, accuracy=score, samples=start.samples)
        if not self._needs_training_loss(record):
            return Evaluated(record)
        return Evaluated(record, training_loss=start.trainer.loss(found.weights, "train"))

    def choose(
        self,
        candidates: Sequence[DeployedModel],
        in_use: Evaluated | None,
        best: ModelRecord | None,
        local_only: LocalOnlyModel | None,  # noqa: ARG002 - runs without [adoption] train none
        attempt: RoundAttempt,  # noqa: ARG002
    ) -> Choice | None:
        """Choose the best of the deployed model and the candidates, and the run's best checkpoint."""
        rejected = []
        for candidate in candidates:
            evaluated = self._evaluated(candidate, in_use)
            record = evaluated.record
            if not math.isfinite(record.validation_loss or 0.0) or not is_better(record, best):
                rejected.append(f"model of {record.words}: not deployed, {_why_not(record, best)}")
                continue
            best = record
            if is_better(record, None if in_use is None else in_use.known):
                in_use = evaluated
            else:
                deployed = in_use.record.words if in_use else "another run"
                rejected.append(f"model of {record.words}: that of {deployed} stays deployed")
        # a candidate that is deployed has a line of its own, which answers for the others
        origins = {one.record.origin for one in candidates}
        if rejected and (in_use is None or in_use.record.origin not in origins):
            log.info("%s", rejected[-1])
        return None if in_use is None else Choice(in_use, best=best)

    def _evaluated(self, candidate: DeployedModel, in_use: Evaluated | None) -> Evaluated:
        record, weights = candidate.record, candidate.weights
        if record.trained and self._needs_training_loss(None if in_use is None else in_use.record):
            record = replace(record, training_loss=self.start.trainer.loss(weights, "train"))
        return Evaluated(replace(record, validation_loss=self._validation_loss(weights)))

    def _validation_loss(self, weights: FlatArray) -> float | None:
        return self.start.trainer.loss(weights, "validation") if self.start.num_validation else None

    def _needs_training_loss(self, deployed: ModelRecord | None) -> bool:
        """True if the deployed model is of an earlier run and only training samples can evaluate it."""
        enrolment = self.start.enrolment
        if deployed is None or deployed.run == enrolment.run:
            return False
        by_validation = self.start.num_validation > 0 and enrolment.validation_fraction <= deployed.held_out
        return deployed.is_of(enrolment.spec) and not by_validation
