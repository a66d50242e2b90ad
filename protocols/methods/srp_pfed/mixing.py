"""SRP-pFed's mixtures (section III-A): which weights are shared, which mixture is best, how updates are
merged.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.combine import Combination
from fleetune.protocols.update.covered_mean import CoveredMean

Aggregation = Literal["covered", "delta", "literal"]


def num_shared(rate: float, size: int) -> int:
    """How many of `size` entries are shared: rate * size, half up, within 1..size."""
    return min(size, max(1, math.floor(rate * size + 0.5)))


def shared_mask(weights: FlatArray, rate: float) -> MaskArray:
    """The `num_shared` entries of least magnitude (section III-A2); of equals the first ones."""
    magnitude, count = np.abs(weights), num_shared(rate, weights.size)
    threshold = np.partition(magnitude, count - 1)[count - 1]
    mask: MaskArray = magnitude < threshold
    equal = np.flatnonzero(magnitude == threshold)
    mask[equal[: count - np.count_nonzero(mask)]] = True
    return mask


def fuse(mask: MaskArray, shared: FlatArray, own: FlatArray) -> FlatArray:
    """Shared values where the mask is True, own ones elsewhere (eq. 5)."""
    return np.where(mask, shared, own)


def choose(losses: Sequence[float]) -> int | None:
    """Index of the least loss, the first of equals (eq. 8); None if none is finite."""
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    return min(finite, key=losses.__getitem__, default=None)


def merge(previous: FlatArray, combination: Combination, num_samples: float, how: Aggregation) -> FlatArray:
    """The next w_g from sum(n m w), sum(n m) and sum(n) over the updates; n are the training samples.

    covered: each entry is combined over the devices that sent it; an entry that no device sent stays.
    delta: previous + sum(n m (w - previous)) / sum(n), the form of the proof (eq. 16).
    literal: sum(n m w) / sum(n) (eq. 4), where entries shrink that not everybody sends.
    """
    if how == "covered" or not num_samples or not isinstance(combination, CoveredMean):
        return combination.over(previous)
    base = previous if how == "delta" else np.zeros_like(previous)
    return (base + (combination.sums - combination.weights * base) / num_samples).astype(previous.dtype)
