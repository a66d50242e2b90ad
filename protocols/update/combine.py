"""Combining: weighted updates become one vector. A method says what it does with it, not how it is made."""

from collections.abc import Callable
from typing import Protocol

from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.covered_mean import CoveredMean
from fleetune.protocols.update.patch import Patch


class Combination(Protocol):
    """Combines patches that are added one by one, so that a round never holds all its updates."""

    def add(self, patch: Patch, weight: float) -> None:
        """Take one patch in; `weight` is at least 0 (usually the device's number of samples)."""
        ...

    def over(self, previous: FlatArray) -> FlatArray:
        """The combined vector, shape (spec.size,). Entries that no patch holds are those of `previous`.

        The last call on a combination: it may reuse its memory.
        """
        ...


Combine = Callable[[ModelSpec], Combination]
"""Makes an empty combination for a model. The default is the weighted mean, `CoveredMean`."""

MEAN: Combine = CoveredMean
