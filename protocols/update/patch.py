"""A patch: some entries of the flat vector with their values; finding, applying, averaging many."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.compiled_sum import compiled_sum
from fleetune.protocols.update.selection import Layers, Selection

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

    Sums are float64 in the order of `add`: the same patches in the same order give the same bits.

    Attributes:
        sums: weight * value, summed entry by entry, shape (spec.size,).
        weights: summed over the patches that hold an entry, same shape.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.sums = np.zeros(spec.size)
        self.weights = np.zeros(spec.size)
        self._compiled = compiled_sum(spec.size)

    def add(self, patch: Patch, weight: float) -> None:
        """Take one patch in; `weight` is at least 0 (usually the device's number of samples)."""
        mask, start = patch.selection.mask(self._spec), 0
        if self._compiled is not None and patch.values.dtype == np.float32:
            self._compiled(self.sums, self.weights, mask, patch.values, weight)
            return
        for place in range(0, mask.size, _CHUNK):
            inside = mask[place : place + _CHUNK]
            stop = start + int(np.count_nonzero(inside))
            sums, weights = self.sums[place : place + _CHUNK], self.weights[place : place + _CHUNK]
            where = slice(None) if stop - start == inside.size else np.flatnonzero(inside)
            sums[where] += weight * patch.values[start:stop].astype(np.float64)
            weights[where] += weight
            start = stop

    def over(self, previous: FlatArray) -> FlatArray:
        """The means; entries that nobody sent are those of `previous`, shape (spec.size,)."""
        covered = self.weights > 0
        merged = previous.copy()
        merged[covered] = (self.sums[covered] / self.weights[covered]).astype(previous.dtype)
        return merged
