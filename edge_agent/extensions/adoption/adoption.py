"""Deploys a model on the device: after each round a rule chooses the model, and this module writes its
files.

In runs with [adoption], each newly deployed model becomes a numbered version with a file of its own. The
device keeps the latest few versions. The file of the deployed model is replaced last. So after a power cut
either the old or the new model is deployed, and the repeated round makes the same decision.

When the held-out samples have changed, the device evaluates its versions again. It returns to the best
earlier version if that version is shown to be better than the deployed one. A pinned version always stays
deployed.
"""

import logging
import math
from dataclasses import replace
from typing import Any, Self

import numpy as np
from msgspec import UNSET, structs

from fleetune.edge_agent.extensions.adoption.adoption_rule import AdoptionRule, Evaluated
from fleetune.edge_agent.extensions.adoption.best_checkpoint import BestCheckpoint
from fleetune.edge_agent.extensions.adoption.comparison import LocalOnlyComparison, record_of_local_only
from fleetune.edge_agent.extensions.adoption.decisions import write_decision
from fleetune.edge_agent.extensions.adoption.deployed_model import (
    DeployedModel,
    ModelRecord,
    new_record,
    read_deployed,
    with_threshold,
)
from fleetune.edge_agent.extensions.adoption.roll_out import Releases, RollOut
from fleetune.edge_agent.extensions.adoption.version_files import (
    deploy_version,
    keep_deployed_as_version,
    read_version,
)
from fleetune.edge_agent.extensions.extension import (
    Extension,
    RoundAttempt,
    RunStart,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.extensions.local_only import LocalOnly, LocalOnlyModel
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec

log = logging.getLogger(__name__)


class Adoption(Extension[ModelRecord]):
    """Extension that deploys a model after each round. Its state is the record of the run's best checkpoint.

    Args:
        start: the run, and the device's model and data.
        files: files of the deployed model; they outlive a run.
        rule: chooses the model to deploy.

    Raises:
        PacketError: the file of the deployed model is damaged.
        StoreError: that file cannot be read, or its new metrics cannot be written.
    """

    name = "best_checkpoint"
    state_type = ModelRecord

    def __init__(self, start: RunStart, files: DeployedFiles, rule: AdoptionRule) -> None:
        self._start, self._files, self._rule = start, files, rule
        found = self._read()
        newest_is_best = start.session_keeps_newest and not start.num_validation and not rule.has_versions
        self._in_session = newest_is_best and found is None
        self._in_use = None if found is None else self._resumed(found)

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        if start.files is None:
            return None
        section = start.enrolment.adoption
        compares = section is not UNSET and section.enabled
        return cls(start, start.files, LocalOnlyComparison(start) if compares else BestCheckpoint(start))

    def after_training(
        self, round_: TrainingRound, result: TrainingResult, state: ModelRecord | None
    ) -> ModelRecord | None:
        """Deploy the best model and return the run's best checkpoint; None if the rule keeps none."""
        best = state if state is not None and state.samples == self._start.samples else None
        candidates = self._candidates(round_, result)
        local_only = round_.slots.get(LocalOnly.name)
        pinned = self._look_at_files()
        if pinned is not None:
            self._deploy_pinned(pinned)
        else:
            best = self._choose(candidates, self._best(best), local_only, round_.attempt)
        round_.measures.update(self._measures(self._best(best), local_only, round_.attempt))
        return None if self._rule.has_versions else self._best(best)

    def _candidates(self, round_: TrainingRound, result: TrainingResult) -> list[DeployedModel]:
        """Return the models that the round produced; in a roll-out, only the newest version of the shared
        model.
        """
        releases: Releases | None = round_.slots.get(RollOut.name)
        if releases is not None:
            newest = releases.newest
            if newest is None:
                return []
            record = self._record(RoundAttempt(newest.number, 0), self._start.trainer.score(newest.weights))
            return [DeployedModel(record, newest.weights)]
        found = []
        if result.start is not None:
            record = self._record(round_.attempt, result.start_score)
            found = [DeployedModel(replace(record, trained=False), result.start)]
        record = replace(self._record(round_.attempt, result.score), training_loss=result.training_loss)
        return [*found, DeployedModel(record, result.personal)]

    def _record(self, attempt: RoundAttempt, score: float | None) -> ModelRecord:
        return replace(new_record(self._start.enrolment, attempt, self._start.samples), accuracy=score)

    def _best(self, best: ModelRecord | None) -> ModelRecord | None:
        """Return the best checkpoint of this run. The deployed model may still be one of an earlier run."""
        used = None if self._in_use is None else self._in_use.record
        return used if used is not None and used.run == self._start.enrolment.run else best

    def _choose(
        self,
        candidates: list[DeployedModel],
        best: ModelRecord | None,
        local_only: LocalOnlyModel | None,
        attempt: RoundAttempt,
    ) -> ModelRecord | None:
        """Deploy the model that the rule chooses, and return the run's new best checkpoint."""
        choice = self._rule.choose(candidates, self._in_use, best, local_only, attempt)
        if choice is None:
            return best
        weights = {one.record.origin: one.weights for one in candidates}
        if local_only is not None:
            weights[record_of_local_only(local_only, self._start).origin] = local_only.to_deploy
        self._use(choice.used, weights)
        if choice.decision is not None:
            version = 0 if self._in_use is None else self._in_use.record.version
            write_decision(self._files, structs.replace(choice.decision, version=version))
        return choice.best

    def _use(self, used: Evaluated, weights: dict[tuple[object, ...], FlatArray]) -> None:
        before = self._in_use
        if before is not None and used.record.origin == before.record.origin:
            self._in_use = replace(used, record=before.record)
            return
        record, model = used.record, weights[used.record.origin]
        if self._rule.has_versions:
            follows = before is not None and before.record.local_only and record.local_only
            number = before.record.version if follows and before is not None else self._next_number(record)
            record = replace(record, version=number)
        if record.final_evaluation and record.accuracy is None:
            record = replace(record, accuracy=self._start.trainer.score(model, "test"))
        self._in_use = replace(used, record=self._write(DeployedModel(record, model)))
        log.info("deployed from now on: %s%s", record.words, f"; {record.why}" if record.why else "")

    def _write(self, deployed: DeployedModel) -> ModelRecord:
        """Write a model as a version and then as the deployed model; return its record as written."""
        spec, files = self._start.enrolment.spec, self._files
        record = with_threshold(deployed.record, deployed.weights, self._start.enrolment, self._start.trainer)
        # a final evaluation's session is a discarded copy, so its model needs a file
        if self._in_session and not record.final_evaluation:
            return record
        written = DeployedModel(record, deployed.weights)
        if record.version:
            files.version(record.version).write(codec.encode_own(written, spec, plain=files.deployed.plain))
        files.deployed.write(codec.encode_own(written, spec, plain=files.deployed.plain))
        if record.version:
            files.forget_old(record.version)
        self._in_session = False
        return record

    def _next_number(self, record: ModelRecord) -> int:
        """Return the number for the next version: one above the newest version.

        If a power cut came after this version was written but before it was deployed, its number is used
        again.
        """
        numbers = self._files.numbers
        if not numbers:
            return 1
        newest = read_version(self._files, numbers[-1])
        is_this = newest is not None and newest.record.origin == record.origin
        return numbers[-1] if is_this else numbers[-1] + 1

    def _read(self) -> DeployedModel | None:
        return read_deployed(self._files.deployed.read())

    def _look_at_files(self) -> int | None:
        """Record a version to which the owner rolled back; return the pinned version's number, or None."""
        if not self._rule.has_versions:
            return None
        found = self._read()
        if found is None:
            self._in_use = None
        elif self._in_use is None or self._in_use.record.origin != found.record.origin:
            self._in_use = self._rule.evaluate_deployed(found)
        return self._files.pinned

    def _deploy_pinned(self, number: int) -> None:
        if self._in_use is not None and self._in_use.record.version == number:
            return
        if deploy_version(self._files, number) is None:
            log.warning("version %d is pinned and cannot be read: the deployed model stays", number)
            return
        self._look_at_files()
        log.info("deployed from now on: version %d, which is pinned", number)

    def _resumed(self, found: DeployedModel) -> Evaluated:
        """Evaluate the deployed model or an earlier version, again if the device's samples have changed."""
        if self._rule.has_versions:
            found = self._as_version(found)
        in_use = self._rule.evaluate_deployed(found)
        if found.record.samples == self._start.samples:
            return in_use
        if self._rule.has_versions:
            if self._files.pinned is not None:
                return in_use
            versions = (
                read_version(self._files, one) for one in self._files.numbers if one != in_use.record.version
            )
            earlier = self._rule.better_earlier(in_use, filter(None, versions))
            if earlier is not None:
                evaluated, weights = earlier
                record = self._write(DeployedModel(evaluated.record, weights))
                log.info("deployed again: version %d; %s", record.version, record.why)
                return replace(evaluated, record=record)
        if in_use.record.samples != self._start.samples:  # its model has another structure
            return in_use
        return replace(in_use, record=self._write(DeployedModel(in_use.record, found.weights)))

    def _as_version(self, found: DeployedModel) -> DeployedModel:
        """Give the deployed model a version number, so that the device can go back to it."""
        section = self._start.enrolment.adoption
        if not found.record.version and found.record.is_of(self._start.enrolment.spec):
            number = max(self._files.numbers, default=0) + 1  # a run without versions deployed it
            found = replace(found, record=replace(found.record, version=number))
            self._write(found)
        elif section is not UNSET and section.canary:
            keep_deployed_as_version(self._files, found.record.version)
        return found

    def _measures(
        self, best: ModelRecord | None, local_only: LocalOnlyModel | None, attempt: RoundAttempt
    ) -> dict[str, Any]:
        """Return the fields of `Measures` about the deployed model: origin, score, and the local-only model's
        score.

        Raises:
            StoreError: the deployed model cannot be read.
        """
        if not self._rule.has_versions:
            return {"kept": None if best is None else best.accuracy} if attempt.final_evaluation else {}
        used, found, trainer = self._in_use, self._read(), self._start.trainer
        figures: dict[str, Any] = {}
        if attempt.final_evaluation:
            figures["kept"] = None if found is None else found.record.accuracy
        if used is not None:
            figures["adopted"] = not used.record.local_only
        if local_only is None or not local_only.round:
            return figures
        figures["alone"] = trainer.score(local_only.to_deploy, "test")
        if used is None or found is None or not used.record.is_of(self._start.enrolment.spec):
            return figures
        if figures["alone"] is not None and np.array_equal(found.weights, local_only.to_deploy):
            return figures | {
                "gain": 0.0,
                "gain_error": 0.0,
            }  # both are the same model
        gain = trainer.gain(found.weights, local_only.to_deploy, "test")
        if gain is not None and math.isfinite(gain.standard_error):
            figures |= {"gain": gain.mean, "gain_error": gain.standard_error}
        return figures
