"""What rounds have shown of ratios: whether devices score better at one than at another.

Devices work at different ratios in the same round, drawn for them (`rounds.proposals.pace`), and with
different shares of the local training, so that a round compares these and costs no more. What a device's
score changed by since its last reply, less the median of all such changes, is taken for

    worth[ratio now] + worth[share now] - worth[ratio then] - worth[share then] + noise

so neither easy samples, nor a fleet that learns, nor who always works at the same ratio says anything of one.
The worths are the least squares of that with a normal prior around 0, `PRIOR_SPREAD` times the noise; older
rounds fade. A ratio is drawn by its chance to be the best one (Thompson 1933). For arms drawn one by one,
each of a worth that stays what it is, T draws of K arms then lose no more than O(sqrt(K T log T)) (Agrawal
and Goyal 2013); here several devices draw at once, and worths change as a model learns.

What a device says of its score cannot be looked at. None counts beyond `CLIP` times the usual distance, so
one that lies moves a worth by no more than its share of the replies times that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.choice import Budget
from fleetune.protocols.randomness import Key

PRIOR_SPREAD = 0.3
FADING = 0.99
CLIP = 3.0


class Arm(NamedTuple):
    """What is compared: a ratio, or a share of the local training."""

    of: Literal["ratio", "work"]
    value: float


class Shown(NamedTuple):
    """What a reply was made at and its score, more being better."""

    budget: Budget
    score: float


def arms_of(budget: Budget) -> tuple[Arm, ...]:
    """Those whose worths add up to that of a budget."""
    return Arm("ratio", budget.ratio), Arm("work", budget.local_work)


@dataclass(frozen=True)
class Evidence:
    """All that was seen, as the normal equations of the worths in units of the noise.

    Attributes:
        arms: seen so far, ascending.
        precision: of their worths beside the prior's, a row an arm.
        pull: right-hand side, in units of the score.
        noise: of a change of score, its standard deviation were it normal; None: nothing was seen.
    """

    arms: tuple[Arm, ...] = ()
    precision: tuple[tuple[float, ...], ...] = ()
    pull: tuple[float, ...] = ()
    noise: float | None = None

    def worths(self, arms: Sequence[Arm]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and covariance of these, in units of the score; in those of the noise if none was seen."""
        all_arms = sorted({*self.arms, *arms})
        precision, pull = self._of(all_arms)
        inverse = np.asarray(np.linalg.inv(precision + np.eye(len(all_arms)) / PRIOR_SPREAD**2), np.float64)
        rows = [all_arms.index(one) for one in arms]
        noise = 1.0 if self.noise is None else self.noise
        return (inverse @ pull)[rows], noise**2 * inverse[np.ix_(rows, rows)]

    def drawn(self, budgets: Sequence[Budget], key: Key) -> NDArray[np.float64]:
        """A worth for each of these, drawn from what is known, in units of the noise; shape (n,)."""
        arms = sorted({arm for budget in budgets for arm in arms_of(budget)})
        mean, covariance = self.worths(arms)
        normal = key.generator().standard_normal(len(arms))
        noise = 1.0 if self.noise is None else self.noise
        worth = dict(zip(arms, (mean + np.linalg.cholesky(covariance) @ normal) / noise, strict=True))
        return np.array([sum(worth[arm] for arm in arms_of(budget)) for budget in budgets])

    def after(self, changes: Mapping[str, tuple[Shown, Shown]]) -> "Evidence":
        """What is known after a round.

        Args:
            changes: of each device that replied in it, and did before: what it showed then, and now.
        """
        if len(changes) < 2:
            return self
        moved = {device: now.score - then.score for device, (then, now) in changes.items()}
        usual = median(moved.values())
        surplus = {device: value - usual for device, value in moved.items()}
        distance = median(abs(value) for value in surplus.values()) * 1.4826  # of a normal: its deviation
        noise = distance
        if self.noise is not None:
            seen = distance or self.noise  # most changes are the same where most scores stay as they are
            noise = 0.9 * self.noise + 0.1 * min(seen, CLIP * self.noise)
        compared = {arm for pair in changes.values() for shown in pair for arm in arms_of(shown.budget)}
        arms = sorted({*self.arms, *compared})
        precision, pull = self._of(arms)
        precision, pull, reach = FADING * precision, FADING * pull, CLIP * noise
        for device, (then, now) in changes.items():
            row = np.zeros(len(arms))
            for arm in arms_of(now.budget):
                row[arms.index(arm)] += 1
            for arm in arms_of(then.budget):
                row[arms.index(arm)] -= 1
            precision += np.outer(row, row)
            pull += row * min(max(surplus[device], -reach), reach)
        rows = tuple(tuple(map(float, row)) for row in precision)
        return Evidence(tuple(arms), rows, tuple(map(float, pull)), noise or self.noise)

    def _of(self, arms: Sequence[Arm]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The normal equations with a row for each of these arms, which hold all that were seen."""
        precision, pull = np.zeros((len(arms), len(arms))), np.zeros(len(arms))
        rows = [arms.index(one) for one in self.arms]
        if rows:
            precision[np.ix_(rows, rows)] = self.precision
            pull[rows] = self.pull
        return precision, pull
