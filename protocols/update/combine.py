"""Combines weighted updates into one vector. The method decides what it does with the vector."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

_CHUNK = 2**15  # entries handled at a time; temporary arrays fit into a processor's cache
_MOST_COUNTED = 2**32 - 1

Weights = NDArray[np.float64] | NDArray[np.uint32]


class Combination(Protocol):
    """Combines patches that are added one by one, so that a round never holds all its updates in memory."""

    def add(self, patch: Patch, weight: float) -> None:
        """Add one patch. `weight` is at least 0, usually the device's number of samples."""
        ...

    def over(self, previous: FlatArray) -> FlatArray:
        """Return the combined vector, shape (spec.size,); entries that no patch holds come from `previous`.

        This must be the last call on a combination, because it may reuse the combination's memory.
        """
        ...


class CoveredMean:
    """The weighted mean of each entry over the patches that contain it; takes the memory of two to three
    models.

    Sums are float64 in the order of `add`, so the same patches in the same order give the same bits. Two
    shortcuts save memory. While all patches select `Everything`, one number is the summed weight of every
    parameter. While all weights are whole numbers, such as numbers of samples, each entry's summed weight
    takes four bytes.

    Attributes:
        sums: sum of weight * value for each entry, shape (spec.size,).
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.sums = np.zeros(spec.size)
        self._total = 0.0  # sum of all weights
        self._apart: Weights | None = None

    @property
    def weights(self) -> Weights:
        """Sum of the weights of the patches that contain each entry, shape (spec.size,)."""
        return self._alike(np.float64) if self._apart is None else self._apart

    def _alike(self, kind: type[np.float64] | type[np.uint32]) -> Weights:
        return np.where(Everything().mask(self._spec), kind(self._total), kind(0))

    def add(self, patch: Patch, weight: float) -> None:
        """Add a patch. `weight` is at least 0, usually the device's number of samples."""
        if isinstance(patch.selection, Everything) and self._apart is None:
            self._total += weight
            for place in range(0, patch.values.size, _CHUNK):  # parameters come before the running statistics
                part = slice(place, min(place + _CHUNK, patch.values.size))
                self.sums[part] += weight * patch.values[part].astype(np.float64)
            return
        weights, mask = self._weights_for(weight), patch.selection.mask(self._spec)
        self._total += weight
        start, one = 0, weights.dtype.type(weight)
        for place in range(0, mask.size, _CHUNK):
            inside = mask[place : place + _CHUNK]
            stop = start + int(np.count_nonzero(inside))
            sums, weighing = self.sums[place : place + _CHUNK], weights[place : place + _CHUNK]
            where = slice(None) if stop - start == inside.size else np.flatnonzero(inside)
            sums[where] += weight * patch.values[start:stop].astype(np.float64)
            weighing[where] += one
            start = stop

    def _weights_for(self, weight: float) -> Weights:
        """Return the entries' summed weights in a type that can add one more weight as exactly as float64."""
        counted = float(weight).is_integer() and self._total + weight <= _MOST_COUNTED
        if self._apart is None:
            counted = counted and float(self._total).is_integer()
            self._apart = self._alike(np.uint32 if counted else np.float64)
        elif not counted and self._apart.dtype != np.float64:
            self._apart = self._apart.astype(np.float64)
        return self._apart

    def over(self, previous: FlatArray) -> FlatArray:
        """Return the means, shape (spec.size,); entries that no patch contains come from `previous`.

        The means overwrite the sums, so this must be the last call.
        """
        sums, self.sums = self.sums, np.empty(0)
        means: NDArray[Any] = sums.view(previous.dtype)
        # a chunk is never written before the sums that are still to be read
        for place in range(0, previous.size, _CHUNK):
            part = slice(place, min(place + _CHUNK, previous.size))
            weights, mean = self._weights_of(part), previous[part].copy()
            np.divide(sums[part], weights, out=mean, where=weights > 0, casting="same_kind")
            means[part] = mean
        del means
        sums.resize(-(-previous.nbytes // sums.itemsize), refcheck=False)  # shrinking does not move the array
        return sums.view(previous.dtype)[: previous.size]

    def _weights_of(self, part: slice) -> Weights:
        if self._apart is not None:
            return self._apart[part]
        places = np.arange(part.start, part.stop)
        return np.where(places < self._spec.num_parameters, float(self._total), 0.0)


Combine = Callable[[ModelSpec], Combination]
"""A function that makes an empty combination for a model. The default is the weighted mean, `CoveredMean`."""

MEAN: Combine = CoveredMean
