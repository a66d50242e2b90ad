"""A patch: some entries of the flat vector with their values."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.selection import Everything, Layers, Selection, where


@dataclass(frozen=True)
class Patch:
    """The values of the selected entries of the flat vector, in the order of that vector.

    Attributes:
        selection: the selected entries.
        values: float32, shape (selection.count(spec),).
    """

    selection: Selection
    values: FlatArray

    @classmethod
    def of(cls, weights: FlatArray, selection: Selection, spec: ModelSpec) -> Self:
        """Return a patch with the selected entries of `weights`, shape (spec.size,).

        If all parameters are selected, the patch shares their memory, and `weights` becomes read-only.
        """
        if isinstance(selection, Everything):
            weights.flags.writeable = False
            return cls(selection, weights[: spec.num_parameters])
        return cls(selection, weights[selection.mask(spec)])

    def has_all(self, spec: ModelSpec) -> bool:
        """True if the patch has every entry of the model, so that its values are the model."""
        return isinstance(self.selection, Everything) and self.values.shape == (spec.size,)

    def check(self, spec: ModelSpec) -> None:
        """Raise PacketCorrupt unless there is one float32 for each selected entry."""
        if self.values.dtype != np.float32:
            raise PacketCorrupt(f"patch with values of type {self.values.dtype}; they must be float32")
        if self.values.shape != (self.selection.count(spec),):
            raise PacketCorrupt(
                f"patch has {self.values.size} values for {self.selection.count(spec)} selected entries"
            )

    def apply(self, weights: FlatArray, spec: ModelSpec) -> FlatArray:
        """Return a copy of `weights`, shape (spec.size,), with the selected entries overwritten."""
        patched = weights.copy()
        patched[where(self.selection, spec)] = self.values
        return patched

    def over(self, weights: FlatArray, spec: ModelSpec) -> FlatArray:
        """Return what `apply` returns, read-only; it is the patch's own array if that has all entries."""
        patched = self.values if self.has_all(spec) else self.apply(weights, spec)
        patched.flags.writeable = False
        return patched


def patches_in(value: Any) -> Iterator[Patch]:
    """Yield every patch in `value`, at any depth of dicts, tuples, lists and dataclasses."""
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
    """Return the values of the only patch in `value`; None if there is none or more than one."""
    found = list(patches_in(value))
    return found[0].values if len(found) == 1 else None


NOTHING = Patch(Layers(()), np.empty(0, dtype=np.float32))  # an empty patch, valid for every model
