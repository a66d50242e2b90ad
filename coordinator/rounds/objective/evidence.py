"""What rounds have shown of ratios: whether devices score better at one than at another.

Devices work at different ratios in the same round, drawn for them (`coordinator.rounds.pace`), so that a
round compares ratios and costs no more. What a device's score changed by since its last reply, less the
median of all such changes, is taken for

    worth[ratio now] - worth[ratio then] + noise

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

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.randomness import Key

PRIOR_SPREAD = 0.3
FADING = 0.99
CLIP = 3.0

Shown = tuple[float, float]
"""The ratio that a reply was made at and its score, more being better."""


@dataclass(frozen=True)
class Evidence:
    """All that was seen, as the normal equations of the worths in units of the noise.

    Attributes:
        ratios: seen so far, ascending.
        precision: of their worths beside the prior's, a row a ratio.
        pull: right-hand side, in units of the score.
        noise: of a change of score, its standard deviation were it normal; None: nothing was seen.
    """

    ratios: tuple[float, ...] = ()
    precision: tuple[tuple[float, ...], ...] = ()
    pull: tuple[float, ...] = ()
    noise: float | None = None

    def worths(self, ratios: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and covariance of these, in units of the score; in those of the noise if none was seen."""
        all_ratios = sorted({*self.ratios, *ratios})
        precision, pull = self._of(all_ratios)
        inverse = np.asarray(np.linalg.inv(precision + np.eye(len(all_ratios)) / PRIOR_SPREAD**2), np.float64)
        rows = [all_ratios.index(one) for one in ratios]
        noise = 1.0 if self.noise is None else self.noise
        return (inverse @ pull)[rows], noise**2 * inverse[np.ix_(rows, rows)]

    def drawn(self, ratios: Sequence[float], key: Key) -> NDArray[np.float64]:
        """A worth for each of these ratios, drawn from what is known, in units of the noise; shape (n,)."""
        mean, covariance = self.worths(ratios)
        normal = key.generator().standard_normal(len(ratios))
        noise = 1.0 if self.noise is None else self.noise
        return (mean + np.linalg.cholesky(covariance) @ normal) / noise

    def after(self, changes: Mapping[str, tuple[Shown, Shown]]) -> "Evidence":
        """What is known after a round.

        Args:
            changes: of each device that replied in it, and did before: what it showed then, and now.
        """
        if len(changes) < 2:
            return self
        moved = {device: now[1] - then[1] for device, (then, now) in changes.items()}
        usual = median(moved.values())
        surplus = {device: value - usual for device, value in moved.items()}
        distance = median(abs(value) for value in surplus.values()) * 1.4826  # of a normal: its deviation
        noise = distance
        if self.noise is not None:
            noise = 0.9 * self.noise + 0.1 * min(distance, CLIP * self.noise)
        ratios = sorted({*self.ratios, *(shown[0] for pair in changes.values() for shown in pair)})
        precision, pull = self._of(ratios)
        precision, pull, reach = FADING * precision, FADING * pull, CLIP * noise
        for device, (then, now) in changes.items():
            row = np.zeros(len(ratios))
            row[ratios.index(now[0])] += 1
            row[ratios.index(then[0])] -= 1
            precision += np.outer(row, row)
            pull += row * min(max(surplus[device], -reach), reach)
        rows = tuple(tuple(map(float, row)) for row in precision)
        return Evidence(tuple(ratios), rows, tuple(map(float, pull)), noise or self.noise)

    def _of(self, ratios: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The normal equations with a row for each of these ratios, which hold all that were seen."""
        precision, pull = np.zeros((len(ratios), len(ratios))), np.zeros(len(ratios))
        rows = [ratios.index(one) for one in self.ratios]
        if rows:
            precision[np.ix_(rows, rows)] = self.precision
            pull[rows] = self.pull
        return precision, pull
