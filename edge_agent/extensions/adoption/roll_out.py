"""Takes part in a roll-out, in runs with `adoption.canary`.

The coordinator announces versions of the shared model. All devices get the approved version. Some devices,
the canaries, also get a newer version on trial. A device deploys the newest version that it holds, if the
adoption rule allows it. The version gets the device's own running statistics, which no round averages. Until
the first version is approved, a device keeps the model that it deployed when the run started.

A canary compares the trial version with the one before it on its own held-out samples. It reports the result
with its reply.
"""

import math
from dataclasses import dataclass
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
from fleetune.edge_agent.extensions.adoption.version_files import newest_of_another_run, withdraw_version
from fleetune.edge_agent.extensions.extension import (
    Extension,
    RoundAttempt,
    RunStart,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.wire.release import Comparison, Release, ReleaseWord, Version


@dataclass(frozen=True)
class HeldVersion:
    """A version of the shared model on a device.

    Attributes:
        number: number of the version, see `Version`.
        weights: shape (spec.size,), with the device's own running statistics.
    """

    number: int
    weights: FlatArray


@dataclass(frozen=True)
class Releases:
    """The versions that a device holds.

    Attributes:
        out: number of the approved version; 0 if no version is approved.
        approved: the approved version; None if the device does not have it.
        trial: the version on trial; None if this device is not a canary.
    """

    out: int = 0
    approved: HeldVersion | None = None
    trial: HeldVersion | None = None

    @property
    def newest(self) -> HeldVersion | None:
        """The version that the device may deploy; None if there is none yet."""
        return self.trial or self.approved

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the versions that the device holds."""
        return tuple(one.number for one in (self.approved, self.trial) if one is not None)

    def after(self, release: Release, personal: FlatArray, spec: ModelSpec) -> "Releases":
        """Return the versions that the device holds after a task.

        Args:
            release: the release that the task carries.
            personal: the device's own model, shape (spec.size,).
            spec: structure of the model.

        Raises:
            PacketCorrupt: the weights do not fit this model.
        """
        trial = None if release.trial is UNSET else self._held(release.trial, personal, spec)
        return Releases(release.approved.number, self._held(release.approved, personal, spec), trial)

    def withdrawn(self, since: "Releases") -> int:
        """Return the number of the earlier trial version that the device must stop deploying; 0 if there is
        none.
        """
        before = since.trial.number if since.trial is not None else 0
        return 0 if before in self.numbers else before

    def _held(self, version: Version, personal: FlatArray, spec: ModelSpec) -> HeldVersion | None:
        if version.weights is UNSET:
            return next(
                (one for one in (self.approved, self.trial) if one and one.number == version.number), None
            )
        if version.weights.shape != (spec.num_parameters,):
            raise PacketCorrupt(
                f"version {version.number} of the shared model has weights of shape {version.weights.shape};"
                f" expected {(spec.num_parameters,)}"
            )
        own = personal[spec.num_parameters :]
        return HeldVersion(version.number, np.concatenate([version.weights, own]).astype(np.float32))


class RollOut(Extension[Releases]):
    """Extension that receives versions of the shared model in a roll-out and tries them on this device.

    Its state is the versions that the device has.

    Args:
        start: the run, and the device's model and data.
        files: files of the deployed model and its versions.
        weights: weights of the held-out samples, shape (n,); None for equal weights.
    """

    name = "releases"
    state_type = Releases

    def __init__(self, start: RunStart, files: DeployedFiles, weights: Losses | None) -> None:
        self._enrolment, self._trainer = start.enrolment, start.trainer
        self._files, self._weights = files, weights

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        section = start.enrolment.adoption
        if start.files is None or section is UNSET or not section.enabled:
            return None
        return cls(start, start.files, newest_count_most(start.num_validation, section.half_life or None))

    def after_training(
        self, round_: TrainingRound, result: TrainingResult, state: Releases | None
    ) -> Releases | None:
        """Update the versions that the device holds, and remove a withdrawn one from deployment."""
        if round_.release is UNSET:
            return None
        before = state or Releases()
        releases = before.after(round_.release, result.personal, self._enrolment.spec)
        withdrawn = releases.withdrawn(before)
        if withdrawn and self._files.pinned is None:
            withdraw_version(self._files, new_record(self._enrolment, RoundAttempt(withdrawn, 0)).origin)
        earlier = newest_of_another_run(self._files, self._enrolment.run)
        round_.measures["release"] = self.report(releases, earlier)
        return releases

    def report(self, releases: Releases, before: DeployedModel | None) -> ReleaseWord:
        """Return the device's report on its versions, for the coordinator.

        Args:
            releases: the versions that the device holds.
            before: the model that it deployed when the run started; None if there was none.
        """
        return ReleaseWord(releases.numbers, self._compared(releases, before))

    def _compared(self, releases: Releases, before: DeployedModel | None) -> Comparison | UnsetType:
        """Compare the trial version with the one before it; UNSET if this device cannot compare."""
        trial, approved = releases.trial, releases.approved
        if trial is None or (releases.out and approved is None):
            return UNSET
        ours = self._trainer.losses(trial.weights, "validation")
        if ours.size == 0:
            return UNSET
        if approved is not None:
            found = self._difference(ours, approved.weights)
        else:
            found = self._against_before(ours, before)
        count = round(found.num_samples)
        if count < LEAST_SAMPLES or not (math.isfinite(found.mean) and math.isfinite(found.standard_error)):
            return UNSET
        return Comparison(trial.number, releases.out, -found.mean, found.standard_error, count)

    def _difference(self, ours: Losses, weights: FlatArray) -> PairedDifference:
        return paired_difference(ours, self._trainer.losses(weights, "validation"), self._weights)

    def _against_before(self, ours: Losses, before: DeployedModel | None) -> PairedDifference:
        """Compare the trial version with the model that the device deployed when the run started.

        The comparison is sample by sample if that model was not trained on these samples. For a model of
        another structure, its recorded mean loss is used. Otherwise the run's initial weights are compared.
        """
        if before is None or before.record.held_out < self._enrolment.validation_fraction:
            return self._difference(ours, self._enrolment.weights)
        record = before.record
        if record.model == self._enrolment.spec.hash:
            return self._difference(ours, before.weights)
        if record.validation_loss is None:
            return self._difference(ours, self._enrolment.weights)
        against_mean = paired_difference(ours, np.full(ours.size, record.validation_loss), self._weights)
        theirs = against_mean.standard_error if record.loss_error is None else record.loss_error
        both = math.hypot(against_mean.standard_error, theirs) * math.sqrt(against_mean.num_samples)
        return PairedDifference(against_mean.mean, both, 0.0, against_mean.num_samples)
