"""The rule of runs with [adoption]: deploy a fleet model only if it is shown to beat the local-only model.

All models that a round produces are compared on the same current held-out samples:

- The local-only model is the baseline. A fleet model must be **shown** to have a lower loss than the newest
  local-only model, with the run's confidence (`paired_test.py`). It must not score lower either: a lower loss
  with more mistakes is no gain. With few held-out samples a difference is seldom significant. With fewer than
  `LEAST_SAMPLES` it never is, and the device stays with the local-only model.
- A second fleet model replaces the deployed one if it passes this test, has no higher mean loss and scores no
  lower. No confidence is required here, because both have beaten the local-only model. Requiring proof kept
  old models and gave worse results (docs/adoption.md).
- The deployed fleet model is compared with the local-only model again in every round, because the local-only
  model goes on learning. It stays while its mean loss is no higher. In the final evaluation it must pass the
  whole test again. This catches a model that passed by chance in one of many comparisons.
- A deployed local-only model is replaced by its newest state after each training, unless that state is shown
  to be worse. (For a model trained on all samples nothing can be shown.) A local-only model of an earlier run
  stays until the new run's has no higher loss.
- Without a local-only model (`compare_alone = 0`) a candidate only has to beat the deployed model.
- Some deployed models cannot be evaluated on these samples: they were trained on some of them, or have
  another structure. Such a model is replaced if its recorded loss is no lower, and in the final evaluation.

`choose` is a pure function of these metrics, the same on a device and in a simulation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import UNSET

from fleetune.edge_agent.extensions.adoption.adoption_rule import AdoptionRule, Choice, Evaluated
from fleetune.edge_agent.extensions.adoption.decisions import Decision
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord, new_record
from fleetune.edge_agent.extensions.adoption.paired_test import (
    LEAST_SAMPLES,
    Losses,
    PairedDifference,
    newest_count_most,
    paired_difference,
)
from fleetune.edge_agent.extensions.extension import RoundAttempt, RunStart
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.tasks import score_named


@dataclass(frozen=True)
class PairedComparison:
    """Compares two models on the same held-out samples.

    Attributes:
        confidence: see `AdoptionSection`.
        weights: weights of the held-out samples, shape (n,); None for equal weights.
    """

    confidence: float
    weights: Losses | None = None

    def difference(self, one: Evaluated, other: Evaluated) -> PairedDifference | None:
        """Return the loss of `one` minus that of `other`; None if either cannot be evaluated."""
        if one.losses is None or other.losses is None:
            return None
        return paired_difference(one.losses, other.losses, self.weights)

    def beats(self, one: Evaluated, other: Evaluated) -> bool:
        """True if `one` has a significantly lower loss, and scores no lower."""
        found = self.difference(one, other)
        return found is not None and found.shows_better(self.confidence) and _scores(one, other)

    def mean(self, one: Evaluated) -> float:
        """Return the mean loss of a model that can be evaluated."""
        assert one.losses is not None
        return float(np.average(one.losses, weights=self.weights))

    def holds(self, one: Evaluated, other: Evaluated) -> bool:
        """True if the mean loss of `one` is no higher, and it scores no lower."""
        found = self.difference(one, other)
        return found is not None and found.mean <= 0.0 and _scores(one, other)


class LocalOnlyComparison(AdoptionRule):
    """Adoption rule that compares models with the local-only model; see `AdoptionRule`.

    Args:
        start: the run, with its [adoption], and the device's model and data.
    """

    has_versions = True

    def __init__(self, start: RunStart) -> None:
        section = start.enrolment.adoption
        assert section is not UNSET, "the rule of runs with [adoption]"
        weights = newest_count_most(start.num_validation, section.half_life or None)
        self._start, self._compare = start, PairedComparison(section.confidence, weights)

    def evaluate_deployed(self, found: DeployedModel) -> Evaluated:
        """Return the evaluated deployed model or version; without losses if it was trained on held-out
        samples.
        """
        record, start = found.record, self._start
        if not record.is_of(start.enrolment.spec):
            return Evaluated(record)
        if record.samples != start.samples or record.accuracy is None:
            score = start.trainer.score(found.weights, "test")
            record = replace(record, accuracy=score, samples=start.samples)
        if record.local_only and not record.held_out:
            # this model was trained on all samples, so the metrics of the model it replaces are used
            return Evaluated(record)
        if start.num_validation and start.enrolment.validation_fraction <= record.held_out:
            return self._evaluated(DeployedModel(record, found.weights))
        if start.num_validation:
            record = replace(record, validation_loss=start.trainer.loss(found.weights, "validation"))
        return Evaluated(record)

    def choose(
        self,
        candidates: Sequence[DeployedModel],
        in_use: Evaluated | None,
        best: ModelRecord | None,  # noqa: ARG002 - the deployed model has a file of its own
        local_only: LocalOnlyModel | None,
        attempt: RoundAttempt,
    ) -> Choice | None:
        """Choose the model to deploy by `choose` below, and add its lead over the local-only model."""
        own = None if local_only is None else self._local_only(local_only)
        evaluated = [self._evaluated(one) for one in candidates]
        finite = [one for one in evaluated if one.losses is None or np.isfinite(one.losses).all()]
        choice = choose(in_use, own, finite, self._compare, final=attempt.final_evaluation)
        if choice is None:
            return None
        lead, error = self._lead(choice.used, own)
        record = replace(choice.used.record, lead=lead, lead_error=error, why=choice.why)
        decision = self._decision(attempt, finite, own, choice)
        return replace(choice, used=replace(choice.used, record=record), decision=decision)

    def better_earlier(
        self, in_use: Evaluated, versions: Iterable[DeployedModel]
    ) -> tuple[Evaluated, FlatArray] | None:
        """Return the best earlier version that beats the deployed model; its record gives the reason."""
        evaluated = ((self.evaluate_deployed(one), one.weights) for one in versions)
        better = [pair for pair in evaluated if self._compare.beats(pair[0], in_use)]
        if not better:
            return None
        best, weights = min(better, key=lambda pair: self._compare.mean(pair[0]))
        worse = _by(self._compare.difference(in_use, best))
        why = f"version {in_use.record.version} is worse on the present samples{worse}"
        return replace(best, record=replace(best.record, why=why)), weights

    def _evaluated(self, one: DeployedModel) -> Evaluated:
        trainer = self._start.trainer
        if not self._start.num_validation:
            return Evaluated(one.record, np.zeros(0))
        losses = trainer.losses(one.weights, "validation")
        loss = float(np.average(losses, weights=self._compare.weights))
        error = float(losses.std(ddof=1) / math.sqrt(losses.size)) if losses.size > 1 else None
        record = replace(one.record, validation_loss=loss, loss_error=error)
        return Evaluated(record, losses, self._score(one.weights))

    def _score(self, weights: FlatArray) -> float | None:
        """Return the score on the held-out samples; higher is better."""
        trainer = self._start.trainer
        score = trainer.score(weights, "validation")
        return -score if score is not None and trainer.lower_is_better else score

    def _local_only(self, model: LocalOnlyModel) -> Evaluated | None:
        """Return the evaluated local-only model; None if it has not been trained yet."""
        if not model.round:
            return None
        evaluated = self._evaluated(DeployedModel(record_of_local_only(model, self._start), model.weights))
        if model.on_all is None:
            return evaluated
        return replace(evaluated, record=replace(evaluated.record, held_out=0.0))

    def _lead(self, one: Evaluated, own: Evaluated | None) -> tuple[float | None, float | None]:
        """Return the local-only model's loss minus that of `one`, and the difference's standard error."""
        found = None if own is None or one.record.local_only else self._compare.difference(one, own)
        if found is None or not math.isfinite(found.standard_error):
            return None, None
        return -found.mean, found.standard_error

    def _decision(
        self, attempt: RoundAttempt, candidates: Sequence[Evaluated], own: Evaluated | None, choice: Choice
    ) -> Decision:
        """Return the decision in the form that `edge-agent models` shows."""
        fleet = [one for one in candidates if one.losses is not None and one.losses.size]
        best = min(reversed(fleet), key=self._compare.mean, default=None)
        lead, lead_error = (None, None) if best is None else self._lead(best, own)
        return Decision(
            run=self._start.enrolment.run,
            round=attempt.round,
            final_evaluation=attempt.final_evaluation,
            version=0,
            why=choice.why,
            loss=None if best is None else best.record.validation_loss,
            error=None if best is None else best.record.loss_error,
            lead=lead,
            lead_error=lead_error,
        )


def record_of_local_only(model: LocalOnlyModel, start: RunStart) -> ModelRecord:
    """Return the record of a local-only model, before it is evaluated."""
    attempt = RoundAttempt(model.round, model.attempt, model.final_evaluation)
    return replace(new_record(start.enrolment, attempt, start.samples), local_only=True)


def choose(
    in_use: Evaluated | None,
    local_only: Evaluated | None,
    candidates: Sequence[Evaluated],
    compare: PairedComparison,
    *,
    final: bool,
) -> Choice | None:
    """Choose the model that a device deploys after a round, by the rule at the top of this file.

    Args:
        in_use: the deployed model; None if there is none.
        local_only: the newest local-only model; None if the run trains none.
        candidates: finite models that the round produced; untrained ones only if others can be evaluated.
        compare: the run's comparison.
        final: True in the run's final evaluation.

    Returns:
        The choice; None if no model can be deployed yet.
    """
    used, why = _floor(in_use, local_only, compare, final=final)
    best = _best(candidates, used, compare)
    if best is None:
        return None if used is None else Choice(used, why)
    if local_only is not None and (reason := _why_not_better(best, local_only, compare)):
        return Choice(used or local_only, f"{why}; {reason}" if why else reason)
    if used is None or _same(used, local_only):
        return Choice(best, "the first of this run" if local_only is None else "better than local-only")
    reason = _why_not_changed(best, used, compare, final=final)
    return Choice(used, reason) if reason else Choice(best, "no worse than the one in use")


def _why_not_changed(best: Evaluated, used: Evaluated, compare: PairedComparison, *, final: bool) -> str:
    """Return why a fleet model does not replace the deployed one; "" if it does."""
    if _same(used, best):
        return "in use"
    if used.losses is None:
        stays = not final and not _no_higher(best, used)
        return "in use: it cannot be evaluated on these samples, and its known loss is lower" if stays else ""
    if compare.beats(best, used) if used.record.local_only else compare.holds(best, used):
        return ""
    return f"worse than the one in use{_by(compare.difference(best, used))}"


def _floor(
    in_use: Evaluated | None, local_only: Evaluated | None, compare: PairedComparison, *, final: bool
) -> tuple[Evaluated | None, str]:
    """Return the model that candidates have to beat, and the reason.

    It is the deployed model if that holds against the local-only model, else the local-only model.
    """
    if local_only is None:
        return in_use, ""
    if in_use is None:
        return local_only, "local-only"
    if in_use.record.local_only and in_use.record.run == local_only.record.run:
        worse = compare.difference(local_only, in_use)
        got_worse = worse is not None and worse.shows_worse(compare.confidence)
        return (in_use, f"local-only got worse{_by(worse)}") if got_worse else (local_only, "local-only")
    if in_use.losses is None:
        stays = not final and not _no_higher(local_only, in_use)
        return (in_use, "") if stays else (local_only, "the one in use cannot be evaluated on these samples")
    if in_use.record.local_only:
        stays, why = not compare.holds(local_only, in_use), "local-only"
    else:
        holds = bool(in_use.losses.size) and compare.holds(in_use, local_only)
        stays = compare.beats(in_use, local_only) if final else holds
        why = f"back to local-only: the one in use is not better{_by(compare.difference(in_use, local_only))}"
    return (in_use, "") if stays else (local_only, why)


def _best(
    candidates: Sequence[Evaluated], used: Evaluated | None, compare: PairedComparison
) -> Evaluated | None:
    """Return the candidate with the lowest mean loss, the last of equals; without losses, the last trained
    one.
    """
    judged = [one for one in candidates if one.losses is not None and one.losses.size]
    if judged:
        fit = [one for one in judged if one.record.trained or used is not None]
        return min(reversed(fit), key=compare.mean, default=None)
    return next((one for one in reversed(candidates) if one.record.trained), None)


def _why_not_better(candidate: Evaluated, local_only: Evaluated, compare: PairedComparison) -> str:
    """Return why a fleet model is not deployed instead of the local-only model; "" if it is."""
    found = compare.difference(candidate, local_only)
    if found is None or (found.num_samples < LEAST_SAMPLES and not found.shows_better(compare.confidence)):
        count = 0 if found is None else found.num_samples
        return f"{count:.0f} held-out samples show nothing ({LEAST_SAMPLES} at least): local-only is used"
    if not _scores(candidate, local_only):
        return f"the fleet's model scores {_shown(candidate)}, local-only {_shown(local_only)}"
    if found.shows_better(compare.confidence):
        return ""
    verdict = "no better than local-only" if found.mean >= 0 else "not shown to be better"
    return f"the fleet's model is {verdict}{_by(found)}"


def _shown(one: Evaluated) -> str:
    """Return the score with the task's own sign, because for some scores lower is better."""
    if one.score is None:
        return "nothing"
    score = score_named(one.record.score)
    return f"{-one.score if score is not None and score.better == 'lower' else one.score:.3g}"


def _by(found: PairedDifference | None) -> str:
    if found is None:
        return ""
    return f" (loss {found.mean:+.3g} ± {found.standard_error:.2g}, {found.num_samples:.0f} samples)"


def _scores(one: Evaluated, other: Evaluated) -> bool:
    return one.score is None or other.score is None or one.score >= other.score


def _no_higher(candidate: Evaluated, used: Evaluated) -> bool:
    ours, theirs = candidate.record.validation_loss, used.record.validation_loss
    return ours is not None and theirs is not None and ours <= theirs


def _same(one: Evaluated, other: Evaluated | None) -> bool:
    return other is not None and one.record.origin == other.record.origin
