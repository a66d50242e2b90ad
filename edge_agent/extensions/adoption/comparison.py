"""Whether a device uses what the fleet led it to: only if that is not worse than what it has, and than alone.

The models that a round leads to are held against each other on the same held-out samples, of today:

- Alone is the floor. A model of the fleet must be **shown** to lose less than the newest model that the
  device trained alone, with the run's confidence (`paired_test.py`), and must not score lower (a lower loss
  with more mistakes is no gain). So it leans to alone: few held-out samples seldom show anything, fewer than
  `LEAST_SAMPLES` never do, and the device stays with what it would have anyway.
- The model of the fleet that is in use gives way to another one that passes this test, has no higher mean
  loss and scores no lower. No confidence is asked for here: both have passed against alone, and to keep an
  old model for want of proof was worse than to change (docs/adoption.md).
- In use, a model of the fleet is held against alone again in every round, because alone goes on learning: it
  stays while its mean loss is no higher, and in the run's final evaluation it has to pass the whole test once
  more. So what many looks let in by chance is looked at again.
- The model trained alone follows its own training, unless its newest state is shown to be worse (of the one
  that is trained on all samples nothing can be shown). One of an earlier run stays until the new run's loses
  no more: that begins anew.
- Without a model trained alone (`compare_alone = 0`) only what is in use has to be beaten.
- What is in use and cannot be judged on these samples (it was trained on some of them, or is of another kind)
  gives way when its known loss is no lower, and in the final evaluation.

All of this is a function of figures: the same on a device and in a simulation. Asked twice it says the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord
from fleetune.edge_agent.extensions.adoption.paired_test import (
    LEAST_SAMPLES,
    Losses,
    PairedDifference,
    paired_difference,
)
from fleetune.protocols.tasks import score_named


@dataclass(frozen=True)
class Judged:
    """A model, and how it does on the held-out samples of today.

    Attributes:
        record: what is known of it.
        losses: by sample, shape (n,); None: it cannot be judged on them.
        score: on them, by the task's first metric, higher is better; None: not known.
    """

    record: ModelRecord
    losses: Losses | None = None
    score: float | None = None


@dataclass(frozen=True)
class Rule:
    """What models are held against each other by.

    Attributes:
        confidence: see `AdoptionSection`.
        weights: of the held-out samples, shape (n,); None: all count alike.
    """

    confidence: float
    weights: Losses | None = None

    def difference(self, one: Judged, other: Judged) -> PairedDifference | None:
        """How much more `one` loses; None: one of them cannot be judged."""
        if one.losses is None or other.losses is None:
            return None
        return paired_difference(one.losses, other.losses, self.weights)

    def beats(self, one: Judged, other: Judged) -> bool:
        """Whether `one` is shown to lose less, and scores no lower."""
        found = self.difference(one, other)
        return found is not None and found.shows_better(self.confidence) and _scores(one, other)

    def mean(self, one: Judged) -> float:
        """The mean loss of a model that can be judged."""
        assert one.losses is not None
        return float(np.average(one.losses, weights=self.weights))

    def holds(self, one: Judged, other: Judged) -> bool:
        """Whether `one` loses no more in the mean, and scores no lower."""
        found = self.difference(one, other)
        return found is not None and found.mean <= 0.0 and _scores(one, other)


@dataclass(frozen=True)
class Choice:
    """What is used from now on, and why, in one line."""

    used: Judged
    why: str


def choose(
    in_use: Judged | None, alone: Judged | None, candidates: Sequence[Judged], rule: Rule, *, closing: bool
) -> Choice | None:
    """What a device uses after a round: the rule at the top of this file.

    Args:
        in_use: until now; None: nothing.
        alone: the newest that the device trained alone; None: it trains none.
        candidates: what the round led to, finite; untrained ones only where others can be judged.
        rule: of the run.
        closing: in its final evaluation.

    Returns:
        None: nothing is fit to be used yet.
    """
    used, why = _floor(in_use, alone, rule, closing=closing)
    best = _best(candidates, used, rule)
    if best is None:
        return None if used is None else Choice(used, why)
    if alone is not None and (objection := _objection_to_alone(best, alone, rule)):
        return Choice(used or alone, f"{why}; {objection}" if why else objection)
    if used is None or _same(used, alone):
        return Choice(best, "the first of this run" if alone is None else "better than alone")
    objection = _objection_to_change(best, used, rule, closing=closing)
    return Choice(used, objection) if objection else Choice(best, "no worse than the one in use")


def _objection_to_change(best: Judged, used: Judged, rule: Rule, *, closing: bool) -> str:
    """Why a model of the fleet does not take the place of the one in use; "": nothing is against it."""
    if _same(used, best):
        return "in use"
    if used.losses is None:
        stays = not closing and not _no_higher(best, used)
        return "in use: it cannot be judged on these samples, and its known loss is lower" if stays else ""
    if rule.beats(best, used) if used.record.alone else rule.holds(best, used):
        return ""
    return f"worse than the one in use{_by(rule.difference(best, used))}"


def _floor(
    in_use: Judged | None, alone: Judged | None, rule: Rule, *, closing: bool
) -> tuple[Judged | None, str]:
    """What the candidates have to beat: what is in use, if it still holds against alone."""
    if alone is None:
        return in_use, ""
    if in_use is None:
        return alone, "trained alone"
    if in_use.record.alone and in_use.record.run == alone.record.run:
        worse = rule.difference(alone, in_use)
        got_worse = worse is not None and worse.shows_worse(rule.confidence)
        return (in_use, f"alone got worse{_by(worse)}") if got_worse else (alone, "trained alone")
    if in_use.losses is None:
        stays = not closing and not _no_higher(alone, in_use)
        return (in_use, "") if stays else (alone, "what was in use cannot be judged on these samples")
    if in_use.record.alone:
        stays, why = not rule.holds(alone, in_use), "trained alone"
    else:
        stays = (
            rule.beats(in_use, alone) if closing else bool(in_use.losses.size) and rule.holds(in_use, alone)
        )
        why = f"back to alone: the one in use is not better{_by(rule.difference(in_use, alone))}"
    return (in_use, "") if stays else (alone, why)


def _best(candidates: Sequence[Judged], used: Judged | None, rule: Rule) -> Judged | None:
    """The one with the lowest mean loss, of equals the last; where none can be judged, the last trained."""
    judged = [one for one in candidates if one.losses is not None and one.losses.size]
    if judged:
        fit = [one for one in judged if one.record.trained or used is not None]
        return min(reversed(fit), key=rule.mean, default=None)
    return next((one for one in reversed(candidates) if one.record.trained), None)


def _objection_to_alone(candidate: Judged, alone: Judged, rule: Rule) -> str:
    """Why a model of the fleet is not used instead of the one trained alone; "": nothing is against it."""
    found = rule.difference(candidate, alone)
    if found is None or (found.num_samples < LEAST_SAMPLES and not found.shows_better(rule.confidence)):
        count = 0 if found is None else found.num_samples
        return f"{count:.0f} held-out samples show nothing ({LEAST_SAMPLES} at least): alone is used"
    if not _scores(candidate, alone):
        return f"the fleet's model scores {_told(candidate)}, alone {_told(alone)}"
    if found.shows_better(rule.confidence):
        return ""
    verdict = "no better than alone" if found.mean >= 0 else "not shown to be better"
    return f"the fleet's model is {verdict}{_by(found)}"


def _told(one: Judged) -> str:
    """A score as the task has it, which may be the better the lower it is."""
    if one.score is None:
        return "nothing"
    score = score_named(one.record.score)
    return f"{-one.score if score is not None and score.better == 'lower' else one.score:.3g}"


def _by(found: PairedDifference | None) -> str:
    if found is None:
        return ""
    return f" (loss {found.mean:+.3g} ± {found.standard_error:.2g}, {found.num_samples:.0f} samples)"


def _scores(one: Judged, other: Judged) -> bool:
    return one.score is None or other.score is None or one.score >= other.score


def _no_higher(candidate: Judged, used: Judged) -> bool:
    ours, theirs = candidate.record.validation_loss, used.record.validation_loss
    return ours is not None and theirs is not None and ours <= theirs


def _same(one: Judged, other: Judged | None) -> bool:
    return other is not None and one.record.origin == other.record.origin
