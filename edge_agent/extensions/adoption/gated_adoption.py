"""A device's served model in a run with [adoption]: candidates are judged, versions kept, one is used.

Each round's candidates, the model trained alone and the one in use are judged on the held-out samples of
today, and `choose` of `comparison.py` decides. A model that comes into use becomes a version: a file of its
own, of which the latest few are kept. The file of what is served is replaced last, so a power cut leaves what
was served before or what is served now; asked again after it, the same is decided.

When the held-out samples have changed, the versions are judged anew, and the device goes back to the best
earlier one if that is shown to be better than the one in use: the live metric has fallen. A pinned version is
served whatever comes; everything else goes on.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fleetune.edge_agent.extensions.adoption.comparison import Choice, Judged, Rule, choose
from fleetune.edge_agent.extensions.adoption.decisions import Decision, write_decision
from fleetune.edge_agent.extensions.adoption.deployed_model import (
    DeployedModel,
    Judge,
    ModelRecord,
    other_score,
    read_deployed,
    with_threshold,
)
from fleetune.edge_agent.extensions.adoption.paired_test import Losses, newest_count_most
from fleetune.edge_agent.extensions.adoption.release_comparison import word_of
from fleetune.edge_agent.extensions.adoption.version_files import (
    deploy_version,
    keep_deployed_as_version,
    newest_of_another_run,
    read_version,
    withdraw_version,
)
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel, RoundAttempt
from fleetune.edge_agent.extensions.releases import Releases
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.method.trainer import Part
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.tasks.score_gain import Gain
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.release import ReleaseWord

log = logging.getLogger(__name__)


class LossJudge(Judge, Protocol):
    """A device's model and data, as far as models are judged by them, sample by sample."""

    @property
    def lower_is_better(self) -> bool: ...

    def losses(self, weights: FlatArray, part: Part) -> Losses: ...

    def gain(self, weights: FlatArray, others: FlatArray, part: Part) -> Gain | None: ...


@dataclass(frozen=True)
class Candidate:
    """A model that a round led to, and what its record does not tell."""

    record: ModelRecord
    weights: FlatArray


class GatedAdoption:
    """See `edge_agent.extensions.adoption.deployed_model.Adoption`; with the run's [adoption] section.

    Args:
        files: of what the device serves, across its runs.
        enrolment: of the run.
        section: its [adoption].
        judge: its model and data.
        num_validation: how many validation samples it has, in the order in which they came.
        samples: fingerprint of the validation and the test samples.

    Raises:
        PacketError: what is kept is damaged.
        StoreError: it cannot be read, or its new figures cannot be written.
    """

    def __init__(
        self,
        files: DeployedFiles,
        enrolment: Enrolment,
        section: AdoptionSection,
        judge: LossJudge,
        *,
        num_validation: int,
        samples: str = "",
    ) -> None:
        self._files, self._enrolment, self._judge = files, enrolment, judge
        self._section, self._samples = section, samples
        weights = newest_count_most(num_validation, section.half_life or None)
        self._rule = Rule(section.confidence, weights)
        self._judges = num_validation > 0
        self._offered: list[Candidate] = []
        self._known: dict[tuple[object, ...], Judged] = {}
        self._used: Judged | None = None
        self._go_back_if_worse()

    @property
    def compare_alone(self) -> int:
        """Every so many rounds the device trains a model alone; 0: never."""
        return self._section.compare_alone

    @property
    def best(self) -> None:
        """Nothing of the run is kept but what is served."""
        return None

    def resume(self, best: ModelRecord | None) -> None:
        """There is nothing to go on with: what is served has a file of its own."""

    def offer(
        self,
        weights: FlatArray,
        turn: RoundAttempt,
        accuracy: float | None,
        *,
        training_loss: float | None = None,
        trained: bool = True,
    ) -> None:
        """A candidate of this round, see `Adoption.offer`; `settle` decides."""
        record = replace(
            self._standing(turn), trained=trained, accuracy=accuracy, training_loss=training_loss
        )
        self._offered.append(Candidate(record, weights))

    def settle(self, turn: RoundAttempt, alone: LocalOnlyModel | None) -> None:
        """Decide what is served from now on.

        Args:
            turn: of the work.
            alone: the newest model trained alone; None: there is none.

        Raises:
            StoreError: it cannot be written; what was served before still is.
        """
        offered, self._offered = self._offered, []
        own = None if alone is None else self._of_alone(alone)
        candidates = [self._judged(one) for one in offered]
        known = {one.record.origin: one for one in offered}
        if alone is not None and own is not None:
            known[own.record.origin] = Candidate(own.record, alone.to_serve)
        self._note_served()
        pinned = self._files.pinned
        if pinned is not None:
            self._serve_pinned(pinned)
            return
        finite = [one for one in candidates if one.losses is None or np.isfinite(one.losses).all()]
        choice = choose(self._used, own, finite, self._rule, closing=turn.closing)
        if choice is None:
            return
        self._use(choice, known, own)
        self._note(turn, finite, own, choice)

    def withdraw(self, version: int) -> None:
        """A version of the run's shared model is not to be served any more; what is pinned stays.

        Raises:
            StoreError: it cannot be written.
        """
        origin = self._standing(RoundAttempt(version, 0)).origin
        if self._files.pinned is not None:
            return
        withdraw_version(self._files, origin)

    def found_of(self, releases: Releases) -> ReleaseWord:
        """What the device says of the shared model's versions."""
        before = newest_of_another_run(self._files, self._enrolment.run)
        return word_of(releases, before, self._enrolment, self._judge, self._rule.weights)

    def told(self, alone: LocalOnlyModel | None) -> Mapping[str, Any]:
        """Whether the model in use is the fleet's, and how it and the one trained alone do on the test split.

        Raises:
            StoreError: what is served cannot be read.
        """
        used, found = self._used, read_deployed(self._files.served.read())
        figures: dict[str, Any] = {"kept": None if found is None else found.record.accuracy}
        if used is not None:
            figures["adopted"] = not used.record.alone
        if alone is None or not alone.round:
            return figures
        figures["alone"] = self._judge.score(alone.to_serve, "test")
        if used is None or found is None or used.record.model != self._enrolment.spec.hash:
            return figures
        if figures["alone"] is not None and np.array_equal(found.weights, alone.to_serve):
            return figures | {"gain": 0.0, "gain_error": 0.0}  # the same model: asking it twice tells no more
        gain = self._judge.gain(found.weights, alone.to_serve, "test")
        if gain is not None and math.isfinite(gain.standard_error):
            figures |= {"gain": gain.mean, "gain_error": gain.standard_error}
        return figures

    def _use(self, choice: Choice, known: dict[tuple[object, ...], Candidate], own: Judged | None) -> None:
        used, before = choice.used, self._used
        if before is not None and used.record.origin == before.record.origin:
            self._used = replace(used, record=before.record)
            return
        follows = before is not None and before.record.alone and used.record.alone
        number = before.record.version if follows and before is not None else self._next_number(used)
        lead, error = self._lead(used, own)
        record = replace(used.record, lead=lead, lead_error=error, why=choice.why, version=number)
        weights = known[used.record.origin].weights
        if record.closing and record.accuracy is None:
            record = replace(record, accuracy=self._judge.score(weights, "test"))
        self._serve(DeployedModel(record, weights))
        self._used = replace(used, record=record)
        log.info("served from now on: %s; %s", record.words, choice.why)

    def _serve(self, served: DeployedModel) -> None:
        """As a version, and then as what is served: a cut in between leaves what was served before."""
        record = with_threshold(served.record, served.weights, self._enrolment, self._judge)
        data = codec.encode(DeployedModel(record, served.weights), self._enrolment.spec)
        number = served.record.version
        if number:
            self._files.version(number).write(data)
        self._files.served.write(data)
        if number:
            self._files.forget_old(number)

    def _next_number(self, used: Judged) -> int:
        """Of the newest version, if a power cut left it before it was served; else one more."""
        numbers = self._files.numbers
        if not numbers:
            return 1
        newest = read_version(self._files, numbers[-1])
        is_this = newest is not None and newest.record.origin == used.record.origin
        return numbers[-1] if is_this else numbers[-1] + 1

    def _serve_pinned(self, number: int) -> None:
        if self._used is not None and self._used.record.version == number:
            return
        if deploy_version(self._files, number) is None:
            log.warning("version %d is pinned and cannot be read: what was served still is", number)
            return
        self._note_served()
        log.info("served from now on: version %d, which is pinned", number)

    def _note_served(self) -> None:
        """What is served, by its file: the owner may have gone back to another version meanwhile."""
        found = read_deployed(self._files.served.read())
        if found is None:
            self._used = None
        elif self._used is None or self._used.record.origin != found.record.origin:
            self._used = self._judged_served(found)

    def _judged_served(self, found: DeployedModel) -> Judged:
        """Judged on the held-out samples of today, as far as it may be: not if it was trained on some."""
        record = found.record
        if record.model != self._enrolment.spec.hash:
            return Judged(record)
        if record.samples != self._samples or record.accuracy is None:
            accuracy = self._judge.score(found.weights, "test")
            record = replace(record, accuracy=accuracy, samples=self._samples)
        if record.alone and not record.held_out:
            return Judged(record)  # trained on all: the figures are of the one that it stands for
        if self._judges and self._enrolment.validation_fraction <= record.held_out:
            return self._judged(Candidate(record, found.weights))
        if self._judges:
            record = replace(record, validation_loss=self._judge.loss(found.weights, "validation"))
        return Judged(record)

    def _judged(self, one: Candidate) -> Judged:
        if not self._judges:
            return Judged(one.record, np.zeros(0))
        known = self._known.get(one.record.origin)
        if known is not None:
            return replace(known, record=replace(known.record, version=one.record.version))
        losses = self._judge.losses(one.weights, "validation")
        loss = float(np.average(losses, weights=self._rule.weights))
        error = float(losses.std(ddof=1) / math.sqrt(losses.size)) if losses.size > 1 else None
        record = replace(one.record, validation_loss=loss, loss_error=error)
        return Judged(record, losses, self._score(one.weights))

    def _score(self, weights: FlatArray) -> float | None:
        """On the held-out samples; higher is better."""
        score = self._judge.score(weights, "validation")
        return -score if score is not None and self._judge.lower_is_better else score

    def _of_alone(self, alone: LocalOnlyModel) -> Judged | None:
        """None: it has not been trained yet."""
        if not alone.round:
            return None
        turn = RoundAttempt(alone.round, alone.attempt, alone.closing)
        record = replace(self._standing(turn), alone=True)
        judged = self._judged(Candidate(record, alone.weights))
        if alone.on_all is None:
            return judged
        return replace(judged, record=replace(judged.record, held_out=0.0))

    def _standing(self, turn: RoundAttempt) -> ModelRecord:
        spec = self._enrolment.spec
        return ModelRecord(
            run=self._enrolment.run,
            round=turn.round,
            attempt=turn.attempt,
            closing=turn.closing,
            model=spec.hash,
            input_shape=spec.input_shape,
            num_classes=spec.num_classes,
            score=other_score(self._enrolment.learns),
            held_out=self._enrolment.validation_fraction,
            samples=self._samples,
        )

    def _lead(self, one: Judged, own: Judged | None) -> tuple[float | None, float | None]:
        """How much lower its loss is than that of the model trained alone, and the standard error of that."""
        found = None if own is None or one.record.alone else self._rule.difference(one, own)
        if found is None or not math.isfinite(found.standard_error):
            return None, None
        return -found.mean, found.standard_error

    def _go_back_if_worse(self) -> None:
        """The versions are judged on samples of today when these have changed."""
        found = read_deployed(self._files.served.read())
        if found is None:
            return
        if not found.record.version and found.record.model == self._enrolment.spec.hash:
            number = max(self._files.numbers, default=0) + 1  # served before there were versions
            found = DeployedModel(replace(found.record, version=number), found.weights)
            self._serve(found)
        elif self._section.canary:
            keep_deployed_as_version(self._files, found.record.version)
        changed = found.record.samples != self._samples
        self._used = self._judged_served(found)
        if not changed or self._files.pinned is not None:
            return
        better = self._best_earlier()
        if better is None:
            self._serve(DeployedModel(self._used.record, found.weights))
            return
        judged, weights = better
        lost = self._rule.difference(self._used, judged)
        amount = "" if lost is None else f" by {lost.mean:.3g} ± {lost.standard_error:.2g} in loss"
        why = f"gone back to: version {found.record.version} is worse on the samples of today{amount}"
        record = replace(judged.record, why=why)
        self._serve(DeployedModel(record, weights))
        self._used = replace(judged, record=record)
        log.info("back to version %d: %s", record.version, why)

    def _best_earlier(self) -> tuple[Judged, FlatArray] | None:
        """The best of the versions that are shown to be better than the one in use."""
        assert self._used is not None
        best: tuple[Judged, FlatArray] | None = None
        for number in self._files.numbers:
            found = read_version(self._files, number)
            if found is None or number == self._used.record.version:
                continue
            judged = self._judged_served(found)
            if self._rule.beats(judged, self._used) and (
                best is None or self._rule.mean(judged) < self._rule.mean(best[0])
            ):
                best = judged, found.weights
        return best

    def _note(
        self, turn: RoundAttempt, candidates: Sequence[Judged], own: Judged | None, choice: Choice
    ) -> None:
        """For `edge-agent models`."""
        fleet = [one for one in candidates if one.losses is not None and one.losses.size]
        best = min(reversed(fleet), key=self._rule.mean, default=None)
        lead, lead_error = (None, None) if best is None else self._lead(best, own)
        decision = Decision(
            run=self._enrolment.run,
            round=turn.round,
            closing=turn.closing,
            version=0 if self._used is None else self._used.record.version,
            why=choice.why,
            loss=None if best is None else best.record.validation_loss,
            error=None if best is None else best.record.loss_error,
            lead=lead,
            lead_error=lead_error,
        )
        write_decision(self._files, decision)
