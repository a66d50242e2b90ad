"""The error threshold for anomalies, and its rate of false alarms.

The threshold is an order statistic of the errors of n normal samples that the model was not trained on: the
k-th smallest, k = ceil(quantile (n + 1)). If samples are independent, the share of new normal samples above
it has the distribution Beta(n + 1 - k, k), whatever the distribution of errors. Its mean is (n + 1 - k) / (n
+ 1), at most 1 - quantile. If n is too small for that, k = n: new normal samples exceed the largest error
with probability 1 / (n + 1).
"""

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fleetune.protocols.student_t import beta_quantile

_TAIL = 0.025  # probability on either side of the interval
_SLACK = 1e-9  # tolerance for products that are whole numbers in exact arithmetic
ROUNDING = 1e-4  # relative difference of one sample's error between trainers and exported models


class FalseAlarms(Struct, frozen=True):
    """The share of normal samples that a threshold calls anomalies.

    Attributes:
        expected: mean of the share, 0..1.
        low, high: its 95 % interval.
        num_samples: number of normal samples that the threshold was found on.
        of: which samples these are, such as "validation".
    """

    expected: float
    low: float
    high: float
    num_samples: int
    of: str

    def __str__(self) -> str:
        return (
            f"expected false alarms {self.expected:.1%} of normal samples"
            f" (95 % interval {self.low:.1%} to {self.high:.1%}; by {self.num_samples} {self.of} samples)"
        )


class Threshold(Struct, frozen=True):
    """Samples with a larger error are anomalies; `false_alarms` is None if no sample was held out."""

    error: float
    false_alarms: FalseAlarms | None = None


def num_needed(quantile: float) -> int:
    """Return the smallest number of samples whose largest error is a threshold of this quantile."""
    return math.ceil(quantile / (1 - quantile) - _SLACK)


def threshold_of(errors: NDArray[np.floating], quantile: float) -> float:
    """Return the threshold for the errors of n > 0 normal samples, shape (n,)."""
    rank = _rank(len(errors), quantile)
    return float(np.partition(errors, rank - 1)[rank - 1])


def false_alarms_of(num_samples: int, quantile: float, of: str) -> FalseAlarms:
    """Return the false alarms of the threshold from `threshold_of`, found on `num_samples` > 0 samples."""
    rank = _rank(num_samples, quantile)
    above = num_samples + 1 - rank
    low, high = (beta_quantile(share, above, rank) for share in (_TAIL, 1 - _TAIL))
    return FalseAlarms(above / (num_samples + 1), low, high, num_samples, of)


def _rank(num_samples: int, quantile: float) -> int:
    return min(num_samples, max(1, math.ceil(quantile * (num_samples + 1) - _SLACK)))
