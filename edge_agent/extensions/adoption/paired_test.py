"""A paired test: is one model better than another on the same held-out samples? Needs numpy only.

Both models are evaluated on the same samples, and the test uses the difference of their losses on each
sample. A hard sample is hard for both models, so its difficulty cancels out. The test is one-sided: with
confidence c, a model that is no better passes in about 1 - c of such comparisons.

The test is Student's t of the mean difference, corrected for skewness by the monotone cubic of Hall (1992,
"On the removal of skewness by transformation", J. R. Statist. Soc. B 54). The correction is needed because
losses have long tails. Without it, a model that is slightly better on most samples and much worse on a few
would pass far too often. With few samples and very skewed differences this error rate is still up to twice
the nominal one (`test_paired_test.py` holds the rates). The test is deterministic.

With fewer than `LEAST_SAMPLES` samples, no difference counts as significant.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.student_t import student_t_quantile

Losses = NDArray[np.float64]

LEAST_SAMPLES = 8
EVEN = 0.5  # at this confidence a lower mean is enough, so no test is needed
# below this skewness the cubic is a line within float precision, and dividing by it would lose digits
_NO_SKEWNESS = 1e-4


@dataclass(frozen=True)
class PairedDifference:
    """Loss of a model minus that of another on the same samples; below 0 the model is better.

    Attributes:
        mean: weighted mean of the differences.
        deviation: their standard deviation; infinite with fewer than two samples.
        skewness: their skewness.
        num_samples: effective number of samples (Kish: 1 / sum of squared shares).
    """

    mean: float
    deviation: float
    skewness: float
    num_samples: float

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; infinite if not known."""
        return self.deviation / math.sqrt(self.num_samples) if self.num_samples else math.inf

    def interval(self, confidence: float) -> tuple[float, float]:
        """Interval of the true mean, each end with one-sided `confidence`, 0.5 <= confidence < 1."""
        if self.deviation == 0.0:
            return self.mean, self.mean
        if not math.isfinite(self.deviation):
            return -math.inf, math.inf
        quantile = student_t_quantile(confidence, self.num_samples - 1)
        return self.mean - self.deviation * self._z(quantile), self.mean - self.deviation * self._z(-quantile)

    def shows_better(self, confidence: float) -> bool:
        """True if the model's loss is significantly lower, with one-sided `confidence`.

        At a confidence of 0.5 a lower mean is enough.
        """
        if confidence <= EVEN:
            return self.mean < 0.0
        return self.num_samples >= LEAST_SAMPLES and self.interval(confidence)[1] < 0.0

    def shows_worse(self, confidence: float) -> bool:
        """True if the model's loss is significantly higher, with one-sided `confidence`."""
        if confidence <= EVEN:
            return self.mean > 0.0
        return self.num_samples >= LEAST_SAMPLES and self.interval(confidence)[0] > 0.0

    def _z(self, quantile: float) -> float:
        """Invert Hall's statistic: the mean, in standard deviations, at which it equals `quantile`.

        The statistic is sqrt(n) * (z + g z^2 / 3 + g^2 z^3 / 27 + g / (6 n)), with skewness g.
        """
        n, g = self.num_samples, self.skewness
        level = quantile / math.sqrt(n)
        if abs(g) < _NO_SKEWNESS:
            return level
        return 3 / g * (math.cbrt(1 + g * (level - g / (6 * n))) - 1)


def paired_difference(losses: Losses, others: Losses, weights: Losses | None = None) -> PairedDifference:
    """Return the difference between `losses` and another model's losses, `others`, on the same samples.

    Args:
        losses: shape (n,).
        others: shape (n,).
        weights: weight of each sample, shape (n,), at least 0 and not all 0; None for equal weights.

    Returns:
        The difference; without samples its mean is 0 and its error infinite.
    """
    if losses.size == 0:
        return PairedDifference(0.0, math.inf, 0.0, 0.0)
    counts = np.ones(losses.size) if weights is None else np.asarray(weights, np.float64)
    shares = counts / counts.sum()
    concentration = float(shares @ shares)
    differences = losses - others
    mean = float(shares @ differences)
    if concentration >= 1.0:
        return PairedDifference(mean, math.inf, 0.0, 1.0)
    variance = float(shares @ np.square(differences - mean))
    if variance == 0.0:
        return PairedDifference(mean, 0.0, 0.0, 1.0 / concentration)
    skewness = float(shares @ ((differences - mean) / math.sqrt(variance)) ** 3)
    return PairedDifference(mean, math.sqrt(variance / (1 - concentration)), skewness, 1.0 / concentration)


def newest_count_most(num_samples: int, half_life: float | None) -> Losses | None:
    """Weights of samples in order of arrival, shape (num_samples,); None for equal weights.

    A weight halves with every `half_life` samples before the newest one.
    """
    if half_life is None:
        return None
    age = np.arange(num_samples - 1, -1, -1, dtype=np.float64)
    return np.exp2(-age / half_life)
