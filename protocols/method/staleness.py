"""Reduced weight for a stale update: its task was planned on an older model."""

import numpy as np

from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch


def blend_with(patch: Patch, weights: FlatArray, factor: float, spec: ModelSpec) -> Patch:
    """Return the patch with values factor * value + (1 - factor) * weights, entry by entry.

    In an average, the present model thus gets the share 1 - factor of the patch's weight. A stale update
    counts for less even if no other update arrived.

    Args:
        patch: values of a stale update.
        weights: present model, shape (spec.size,).
        factor: share of the stale update's weight that remains, in [0, 1].
        spec: model that both belong to.
    """
    present = weights[patch.selection.mask(spec)]
    share = np.float32(factor)
    return Patch(patch.selection, share * patch.values + (np.float32(1) - share) * present)
