"""What a canary finds of the version on trial, against the one before, on its own held-out samples."""

import math
from typing import Protocol

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel
from fleetune.edge_agent.extensions.adoption.paired_test import (
    LEAST_SAMPLES,
    Losses,
    PairedDifference,
    paired_difference,
)
from fleetune.edge_agent.extensions.releases import Releases
from fleetune.protocols.method.trainer import Part
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.release import Comparison, ReleaseWord


class LossesBySample(Protocol):
    """A device's model and data."""

    def losses(self, weights: FlatArray, part: Part) -> Losses: ...


def word_of(
    releases: Releases,
    before: DeployedModel | None,
    enrolment: Enrolment,
    judge: LossesBySample,
    weights: Losses | None,
) -> ReleaseWord:
    """What a device says of its versions.

    Args:
        releases: that it holds.
        before: what it served when the run began; None: nothing.
        enrolment: of the run.
        judge: its model and data.
        weights: of its held-out samples, shape (n,); None: all count alike.
    """
    found = UNSET if releases.trial is None else _compared(releases, before, enrolment, judge, weights)
    return ReleaseWord(releases.numbers, found)


def _compared(
    releases: Releases,
    before: DeployedModel | None,
    enrolment: Enrolment,
    judge: LossesBySample,
    weights: Losses | None,
) -> Comparison | UnsetType:
    """UNSET: this device cannot judge."""
    assert releases.trial is not None
    if releases.out and releases.approved is None:
        return UNSET
    ours = judge.losses(releases.trial.weights, "validation")
    if ours.size == 0:
        return UNSET
    if releases.approved is not None:
        found = paired_difference(ours, judge.losses(releases.approved.weights, "validation"), weights)
    else:
        found = _against_before(ours, before, enrolment, judge, weights)
    count = round(found.num_samples)
    if count < LEAST_SAMPLES or not (math.isfinite(found.mean) and math.isfinite(found.standard_error)):
        return UNSET
    return Comparison(releases.trial.number, releases.out, -found.mean, found.standard_error, count)


def _against_before(
    ours: Losses,
    before: DeployedModel | None,
    enrolment: Enrolment,
    judge: LossesBySample,
    weights: Losses | None,
) -> PairedDifference:
    """Against what the device served when the run began, as far as that can be judged by the same samples; of
    another model its known mean loss stands for it. Else against what the run began with.
    """
    record = None if before is None else before.record
    honest = record is not None and record.held_out >= enrolment.validation_fraction
    if before is None or record is None or not honest:
        return paired_difference(ours, judge.losses(enrolment.weights, "validation"), weights)
    if record.model == enrolment.spec.hash:
        return paired_difference(ours, judge.losses(before.weights, "validation"), weights)
    if record.validation_loss is None:
        return paired_difference(ours, judge.losses(enrolment.weights, "validation"), weights)
    alone = paired_difference(ours, np.full(ours.size, record.validation_loss), weights)
    theirs = alone.standard_error if record.loss_error is None else record.loss_error
    both = math.hypot(alone.standard_error, theirs) * math.sqrt(alone.num_samples)
    return PairedDifference(alone.mean, both, 0.0, alone.num_samples)
