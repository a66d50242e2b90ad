"""SRP-pFed's mixtures (section III-A): choice of the shared weights, choice of the best mixture, and
merging.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.combine import Combination, CoveredMean

Aggregation = Literal["covered", "delta", "literal"]


def num_shared(rate: float, size: int) -> int:
    """Number of shared entries among `size`: rate * size, half rounded up, within 1..size."""
    return min(size, max(1, math.floor(rate * size + 0.5)))


def shared_mask(weights: FlatArray, rate: float) -> MaskArray:
    """Mark the `num_shared` entries of least magnitude (section III-A2). Ties go to the first entry."""
    magnitude, count = np.abs(weights), num_shared(rate, weights.size)
    threshold = np.partition(magnitude, count - 1)[count - 1]
    mask: MaskArray = magnitude < threshold
    equal = np.flatnonzero(magnitude == threshold)
    mask[equal[: count - np.count_nonzero(mask)]] = True
    return mask


def fuse(mask: MaskArray, shared: FlatArray, own: FlatArray) -> FlatArray:
    """Mixture of a model: shared values where the mask is True, own values elsewhere (eq. 5)."""
    return np.where(mask, shared, own)


def choose(losses: Sequence[float]) -> int | None:
    """Index of the least loss (eq. 8), the first among ties; None if no loss is finite."""
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    return min(finite, key=losses.__getitem__, default=None)


def merge(previous: FlatArray, combination: Combination, num_samples: float, how: Aggregation) -> FlatArray:
    """The next w_g from the sums over the updates.

    Args:
        previous: w_g of the present round, shape (spec.size,).
        combination: sum(n m w) and sum(n m), with n training samples, mask m and weights w of each update.
        num_samples: sum(n).
        how: `covered` averages each entry over the devices that sent it; an entry that no device sent stays.
            `delta` is previous + sum(n m (w - previous)) / sum(n), the form of the proof (eq. 16). `literal`
            is sum(n m w) / sum(n) (eq. 4), which shrinks entries that only some devices send.
    """
    if how == "covered" or not num_samples or not isinstance(combination, CoveredMean):
        return combination.over(previous)
    base = previous if how == "delta" else np.zeros_like(previous)
    return (base + (combination.sums - combination.weights * base) / num_samples).astype(previous.dtype)
