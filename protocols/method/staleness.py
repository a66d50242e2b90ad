"""What a stale update weighs: it was planned on a model that has been replaced since."""

import numpy as np

from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch


def blend_with(patch: Patch, weights: FlatArray, factor: float, spec: ModelSpec) -> Patch:
    """The patch at factor * value + (1 - factor) * weights, entry by entry.

    In an average of patches this gives 1 - factor of the patch's weight to the present model, so that a
    stale update counts for less even when nothing else arrived with it.

    Args:
        patch: of a stale update.
        weights: of the present model, shape (spec.size,).
        factor: in [0, 1].
        spec: of both.
    """
    present = weights[patch.selection.mask(spec)]
    share = np.float32(factor)
    return Patch(patch.selection, share * patch.values + (np.float32(1) - share) * present)
