"""Median and trimmed mean of each entry over the devices that sent it (Yin et al., ICML 2018).

Every device counts alike: the number of samples is a claim, and a device that lies would raise it.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.combine.update_rows import UpdateRows
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch

COMPUTED_AT_ONCE = 2**18  # values; they fit into a processor's cache

Ranked = NDArray[np.float32]  # shape (entries, devices), ascending along the devices; inf: not sent
Counts = NDArray[np.intp]  # number of devices that sent each entry, at least 1


def medians(ranked: Ranked, counts: Counts) -> NDArray[np.float64]:
    """Return the median of each entry; of an even number, the mean of the middle two."""
    rows = slice(None) if _are_alike(counts) else np.arange(counts.size)
    middle = counts[:1] if isinstance(rows, slice) else counts
    lower, upper = ranked[rows, (middle - 1) // 2], ranked[rows, middle // 2]
    found: NDArray[np.float64] = (lower.astype(np.float64) + upper) / 2
    return found.reshape(-1)


def trimmed_means(ranked: Ranked, counts: Counts, share: float) -> NDArray[np.float64]:
    """Return the mean of each entry without the `num_cut` largest and the `num_cut` smallest values."""
    cut = np.minimum(np.ceil(share * counts - 1e-9).astype(np.intp), (counts - 1) // 2)
    if _are_alike(counts):
        means: NDArray[np.float64] = ranked[:, cut[0] : counts[0] - cut[0]].mean(axis=1, dtype=np.float64)
        return means
    ranks = np.arange(ranked.shape[1])
    kept = (ranks >= cut[:, None]) & (ranks < (counts - cut)[:, None])
    total: NDArray[np.float64] = np.where(kept, ranked, 0).sum(axis=1, dtype=np.float64)
    averaged: NDArray[np.float64] = total / (counts - 2 * cut)
    return averaged


def _are_alike(counts: Counts) -> bool:
    return bool((counts == counts[0]).all())


def num_cut(share: float, count: int) -> int:
    """Return how many of `count` updates may be hostile, if a share of them may be; always less than half."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


class RankedEntries:
    """Combines each entry by a statistic of its values in ascending order.

    Args:
        spec: the model.
        statistic: `medians`, or `trimmed_means` with its share.
        folder: where updates are stored that do not fit into memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        statistic: Callable[[Ranked, Counts], NDArray[np.float64]],
        folder: Path | None = None,
    ) -> None:
        self._rows, self._statistic = UpdateRows(spec, folder), statistic

    def add(self, patch: Patch, weight: float) -> None:
        """Add one patch; one of weight 0 does not count."""
        if weight > 0:
            self._rows.add(patch)

    def over(self, previous: FlatArray) -> FlatArray:
        """Return the statistic of each entry; entries that no patch holds come from `previous`."""
        combined, num_rows = previous.copy(), len(self._rows)
        for block in self._rows.blocks(absent=math.inf) if num_rows else ():
            step = max(1, COMPUTED_AT_ONCE // num_rows)
            for start in range(0, block.values.shape[1], step):
                ranked = np.sort(np.ascontiguousarray(block.values[:, start : start + step].T), axis=1)
                whole = slice(block.part.start + start, block.part.start + start + len(ranked))
                combined[whole] = self._of(ranked, previous[whole], is_full=block.is_full)
        self._rows.close()
        return combined

    def _of(self, ranked: Ranked, previous: FlatArray, *, is_full: bool) -> FlatArray | NDArray[np.float64]:
        if is_full:
            return self._statistic(ranked, np.full(len(ranked), ranked.shape[1]))
        counts = np.count_nonzero(ranked < math.inf, axis=1)
        sent, found = counts > 0, previous.copy()
        if sent.any():
            found[sent] = self._statistic(ranked[sent], counts[sent])
        return found
