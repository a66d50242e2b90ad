"""Takes part in a roll-out: holds versions of the shared model and, as a canary, tests the one on trial.

A canary compares the trial version with the one before it on its own held-out samples. It reports the result
with its reply.
"""

import math
from typing import Self

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, new_record
from fleetune.edge_agent.extensions.adoption.paired_test import (
    LEAST_SAMPLES,
    Losses,
    PairedDifference,
    newest_count_most,
    paired_difference,
)
from fleetune.edge_agent.extensions.adoption.releases import Releases
from fleetune.edge_agent.extensions.adoption.version_files import newest_of_another_run, withdraw_version
from fleetune.edge_agent.extensions.extension import (
    EvaluatingTrainer,
    Extension,
    RoundAttempt,
    RunStart,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.release import Comparison, ReleaseWord


class RollOut(Extension[Releases]):
    """Holds the versions of the shared model in runs with `adoption.canary`.

    Args:
        enrolment: enrolment of the run.
        files: files of the deployed model and its versions.
        weights: weights of the held-out samples, shape (n,); None for equal weights.
    """

    name = "releases"
    state_type = Releases

    def __init__(self, enrolment: Enrolment, files: DeployedFiles, weights: Losses | None) -> None:
        self._enrolment, self._files, self._weights = enrolment, files, weights

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        section = start.enrolment.adoption
        if start.files is None or section is UNSET or not section.enabled:
            return None
        weights = newest_count_most(start.num_validation, section.half_life or None)
        return cls(start.enrolment, start.files, weights)

    def after_training(
        self, round_: TrainingRound, result: TrainingResult, state: Releases | None
    ) -> Releases | None:
        """Update the versions that the device holds, and remove a withdrawn one from deployment."""
        if round_.release is UNSET:
            return None
        before = state or Releases()
        releases = before.taken_in(round_.release, result.personal, self._enrolment.spec)
        withdrawn = releases.withdrawn(before)
        if withdrawn and self._files.pinned is None:
            withdraw_version(self._files, new_record(self._enrolment, RoundAttempt(withdrawn, 0)).origin)
        earlier = newest_of_another_run(self._files, self._enrolment.run)
        round_.measures["release"] = word_of(
            releases, earlier, self._enrolment, round_.trainer, self._weights
        )
        return releases


def word_of(
    releases: Releases,
    before: DeployedModel | None,
    enrolment: Enrolment,
    trainer: EvaluatingTrainer,
    weights: Losses | None,
) -> ReleaseWord:
    """The device's report about its versions.

    Args:
        releases: the versions that it holds.
        before: the model that it deployed when the run started; None if there was none.
        enrolment: enrolment of the run.
        trainer: the device's model and data.
        weights: weights of its held-out samples, shape (n,); None for equal weights.
    """
    found = UNSET if releases.trial is None else _compared(releases, before, enrolment, trainer, weights)
    return ReleaseWord(releases.numbers, found)


def _compared(
    releases: Releases,
    before: DeployedModel | None,
    enrolment: Enrolment,
    trainer: EvaluatingTrainer,
    weights: Losses | None,
) -> Comparison | UnsetType:
    """Compare the trial version with the one before it; UNSET if this device cannot compare."""
    assert releases.trial is not None
    if releases.out and releases.approved is None:
        return UNSET
    ours = trainer.losses(releases.trial.weights, "validation")
    if ours.size == 0:
        return UNSET
    if releases.approved is not None:
        found = paired_difference(ours, trainer.losses(releases.approved.weights, "validation"), weights)
    else:
        found = _against_before(ours, before, enrolment, trainer, weights)
    count = round(found.num_samples)
    if count < LEAST_SAMPLES or not (math.isfinite(found.mean) and math.isfinite(found.standard_error)):
        return UNSET
    return Comparison(releases.trial.number, releases.out, -found.mean, found.standard_error, count)


def _against_before(
    ours: Losses,
    before: DeployedModel | None,
    enrolment: Enrolment,
    trainer: EvaluatingTrainer,
    weights: Losses | None,
) -> PairedDifference:
    """Compare the trial version with the model that the device deployed when the run started.

    The comparison is sample by sample if that model was not trained on these samples. For a model of another
    structure, its recorded mean loss is used. Otherwise the run's initial weights are compared.
    """
    record = None if before is None else before.record
    honest = record is not None and record.held_out >= enrolment.validation_fraction
    if before is None or record is None or not honest:
        return paired_difference(ours, trainer.losses(enrolment.weights, "validation"), weights)
    if record.model == enrolment.spec.hash:
        return paired_difference(ours, trainer.losses(before.weights, "validation"), weights)
    if record.validation_loss is None:
        return paired_difference(ours, trainer.losses(enrolment.weights, "validation"), weights)
    against_mean = paired_difference(ours, np.full(ours.size, record.validation_loss), weights)
    theirs = against_mean.standard_error if record.loss_error is None else record.loss_error
    both = math.hypot(against_mean.standard_error, theirs) * math.sqrt(against_mean.num_samples)
    return PairedDifference(against_mean.mean, both, 0.0, against_mean.num_samples)
