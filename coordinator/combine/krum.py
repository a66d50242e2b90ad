"""Multi-Krum (Blanchard et al., NeurIPS 2017): the mean of the updates that are nearest to their neighbours.

Of n updates with f hostile ones, an update's score is the sum of its squared distances to the n - f - 2
nearest others. The n - f updates of least score count, weighted as in the mean.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.combine.coordinate_rules import COMPUTED_AT_ONCE, num_cut
from fleetune.coordinator.combine.update_rows import UpdateRows
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch


class Krum:
    """Combines the updates that Multi-Krum keeps. It holds one number for each pair of updates.

    Args:
        spec: the model.
        base: the shared model, shape (spec.size,); an entry that a device did not send counts as unchanged.
        share: share of the updates that may be hostile.
        folder: where updates are stored that do not fit into memory.
    """

    def __init__(self, spec: ModelSpec, base: FlatArray, share: float, folder: Path | None = None) -> None:
        self._base, self._share, self._rows = base, share, UpdateRows(spec, folder)
        self._weights: list[float] = []

    def add(self, patch: Patch, weight: float) -> None:
        """Add one patch; one of weight 0 does not count."""
        if weight > 0:
            self._rows.add(patch)
            self._weights.append(weight)

    def over(self, previous: FlatArray) -> FlatArray:
        """Return the mean over the kept updates; entries that none of them holds come from `previous`."""
        combined = previous.copy()
        weights = np.array(self._weights)
        if weights.size:
            dropped = num_cut(self._share, weights.size)
            kept = nearest(self._distances(), dropped)
            weights = np.where(kept, weights, 0.0)
        for block in self._rows.blocks(absent=np.nan) if weights.size else ():
            sums = np.zeros(block.values.shape[1])
            total = np.zeros_like(sums)
            for weight, row in zip(weights, block.values, strict=True):
                if weight:
                    sent = ~np.isnan(row)
                    sums += np.where(sent, weight * row.astype(np.float64), 0.0)
                    total += weight * sent
            has_any = total > 0
            combined[block.part][has_any] = sums[has_any] / total[has_any]
        self._rows.close()
        return combined

    def _distances(self) -> NDArray[np.float64]:
        """Return the squared distance of each pair of updates, shape (updates, updates)."""
        products = np.zeros((len(self._rows), len(self._rows)))
        length = max(1, COMPUTED_AT_ONCE // len(self._rows))
        for block in self._rows.blocks(absent=np.nan):
            base = self._base[block.part]
            for start in range(0, base.size, length):
                part = slice(start, start + length)
                steps = block.values[:, part].astype(np.float64) - base[part]
                steps[np.isnan(steps)] = 0.0
                products += steps @ steps.T
        norms = np.diag(products)
        return np.maximum(norms[:, None] + norms[None, :] - 2 * products, 0.0)


def nearest(distances: NDArray[np.float64], num_hostile: int) -> NDArray[np.bool_]:
    """Mark the n - f updates of least Krum score; of equal ones, the first."""
    count = len(distances)
    others = np.sort(distances + np.diag(np.full(count, np.inf)), axis=1)
    scores = others[:, : max(1, count - num_hostile - 2)].sum(axis=1)
    kept = np.zeros(count, dtype=bool)
    kept[np.argsort(scores, kind="stable")[: count - num_hostile]] = True
    return kept
