"""A patch: some entries of the flat vector with their values; finding, applying, averaging many."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.compiled_sum import CompiledSums, compiled_sums
from fleetune.protocols.update.selection import Everything, Layers, Selection

_CHUNK = 2**15  # entries: what is made of so many stays in a processor's cache


@dataclass(frozen=True)
class Patch:
    """Values for the selected entries, in the order of the flat vector.

    Attributes:
        selection: which entries.
        values: float32, shape (selection.count(spec),).
    """

    selection: Selection
    values: FlatArray

    @classmethod
    def of(cls, weights: FlatArray, selection: Selection, spec: ModelSpec) -> Self:
        """The selected entries of `weights`, shape (spec.size,)."""
        return cls(selection, weights[selection.mask(spec)])

    def check(self, spec: ModelSpec) -> None:
        """Raises PacketCorrupt when there is not one float32 for each selected entry."""
        if self.values.dtype != np.float32:
            raise PacketCorrupt(f"patch with values of type {self.values.dtype}; they must be float32")
        if self.values.shape != (self.selection.count(spec),):
            raise PacketCorrupt(
                f"patch with {self.values.size} values for {self.selection.count(spec)} selected entries"
            )

    def apply(self, weights: FlatArray, spec: ModelSpec) -> FlatArray:
        """A copy of `weights`, shape (spec.size,), with the selected entries overwritten."""
        patched = weights.copy()
        patched[self.selection.mask(spec)] = self.values
        return patched


def patches_in(value: Any) -> Iterator[Patch]:
    """Every patch in `value`, however deep in dicts, tuples, lists and dataclasses."""
    if isinstance(value, Patch):
        yield value
    elif isinstance(value, dict):
        yield from patches_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from patches_in(inner)
    elif is_dataclass(value):
        yield from patches_in([getattr(value, part.name) for part in fields(value)])


def values_of_one(value: Any) -> FlatArray | None:
    """Those of the one patch in `value`; None: there is none, or more than one."""
    found = list(patches_in(value))
    return found[0].values if len(found) == 1 else None


NOTHING = Patch(Layers(()), np.empty(0, dtype=np.float32))  # of any model


class CoveredMean:
    """The weighted mean of each entry over the patches that hold it, taken in one by one.

    Sums are float64 in the order of `add`: the same patches in the same order give the same bits. While all
    of them have been `Everything`, one number tells what every parameter weighs.

    Attributes:
        sums: weight * value, summed entry by entry, shape (spec.size,).
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.sums = np.zeros(spec.size)
        self._alike = 0.0
        self._apart: NDArray[np.float64] | None = None
        self._compiled = compiled_sums(spec.size)

    @property
    def weights(self) -> NDArray[np.float64]:
        """Summed over the patches that hold an entry, shape (spec.size,)."""
        if self._apart is None:
            self._apart = np.where(Everything().mask(self._spec), self._alike, 0.0)
        return self._apart

    def add(self, patch: Patch, weight: float) -> None:
        """Take one patch in; `weight` is at least 0 (usually the device's number of samples)."""
        compiled = self._compiled if patch.values.dtype == np.float32 else None
        if isinstance(patch.selection, Everything) and self._apart is None:
            self._alike += weight
            self._add_all(patch.values, weight, compiled)
            return
        mask, start = patch.selection.mask(self._spec), 0
        if compiled is not None:
            compiled.add_selected(self.sums, self.weights, mask, patch.values, weight)
            return
        for place in range(0, mask.size, _CHUNK):
            inside = mask[place : place + _CHUNK]
            stop = start + int(np.count_nonzero(inside))
            sums, weights = self.sums[place : place + _CHUNK], self.weights[place : place + _CHUNK]
            where = slice(None) if stop - start == inside.size else np.flatnonzero(inside)
            sums[where] += weight * patch.values[start:stop].astype(np.float64)
            weights[where] += weight
            start = stop

    def _add_all(self, values: FlatArray, weight: float, compiled: CompiledSums | None) -> None:
        if compiled is not None:
            compiled.add_all(self.sums[: values.size], values, weight)
            return
        for place in range(0, values.size, _CHUNK):  # parameters stand before the running statistics
            part = slice(place, min(place + _CHUNK, values.size))
            self.sums[part] += weight * values[part].astype(np.float64)

    def over(self, previous: FlatArray) -> FlatArray:
        """The means; entries that nobody sent are those of `previous`, shape (spec.size,)."""
        merged = previous.copy()
        for place in range(0, merged.size, _CHUNK):
            part = slice(place, min(place + _CHUNK, merged.size))
            weights = self._weights_of(part)
            np.divide(self.sums[part], weights, out=merged[part], where=weights > 0, casting="same_kind")
        return merged

    def _weights_of(self, part: slice) -> NDArray[np.float64]:
        if self._apart is not None:
            return self._apart[part]
        places = np.arange(part.start, part.stop)
        return np.where(places < self._spec.num_parameters, self._alike, 0.0)
