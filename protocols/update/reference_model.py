"""The reference model: values that both sides of a transfer hold; payloads contain differences to it."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.update.patch import patches_in

_FEW = 256
_FEWEST, _ROOM = 4, 2**24  # smallest number of models in a cache, and bytes of all cached models


@dataclass(frozen=True)
class ReferenceModel:
    """Values that both sides of a transfer hold.

    Attributes:
        values: shape (spec.size,); 0 at entries that the sides do not hold.
        held: True at entries that both sides hold, same shape.
    """

    values: FlatArray
    held: MaskArray

    @classmethod
    def of_task(cls, task: Any, spec: ModelSpec) -> Self:
        """Return a reference model with the values of a task's patches, and none elsewhere.

        Later patches overwrite earlier ones.
        """
        return cls.nothing(spec).after(task, spec)

    @classmethod
    def nothing(cls, spec: ModelSpec) -> Self:
        """Return a reference model without any entry, for sides that have no values in common."""
        return cls(np.zeros(spec.size, np.float32), np.zeros(spec.size, np.bool_))

    @classmethod
    def whole(cls, values: FlatArray) -> Self:
        """Return a reference model with all entries: `values`, shape (spec.size,)."""
        return cls(values, np.ones(values.size, np.bool_))

    def after(self, task: Any, spec: ModelSpec) -> Self:
        """Return the reference model after a task has arrived; later patches overwrite earlier ones."""
        values, held = self.values.copy(), self.held.copy()
        for patch in patches_in(task):
            mask = patch.selection.mask(spec)
            values[mask] = patch.values
            held |= mask
        return type(self)(values, held)

    @cached_property
    def digest(self) -> str:
        """Digest of 32 hex digits, with which the sides check that they hold the same values."""
        found = hashlib.blake2b(self.values.astype("<f4").tobytes(), digest_size=16)
        found.update(np.packbits(self.held).tobytes())
        return found.hexdigest()


def num_remembered(spec: ModelSpec) -> int:
    """Return how many reference models a process caches; the same memory holds more small models."""
    return max(_FEWEST, _ROOM // (5 * max(1, spec.size)))  # a float32 and a boolean for each entry


@dataclass
class ReferenceModelCache:
    """Caches recent reference models, because comparing two is ten times faster than computing a digest
    again.

    Attributes:
        most: largest number of cached models.
    """

    most: int = _FEWEST
    _latest: list[tuple[bytes, ReferenceModel]] = field(default_factory=list, init=False)

    def known(self, reference: ReferenceModel) -> ReferenceModel:
        """Return the cached model with the same content.

        Without one, `reference` is cached and returned; it must not change afterwards.
        """
        few = reference.values[:_FEW].tobytes()  # different models usually differ in their first entries
        for begins, one in self._latest:
            if begins == few and _is_same(one, reference):
                return one
        self._latest = [(few, reference), *self._latest[: self.most - 1]]
        return reference


def _is_same(one: ReferenceModel, other: ReferenceModel) -> bool:
    return same_bits(one.values, other.values) and same_bits(one.held, other.held)


def same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """True if two one-dimensional arrays have the same type, shape and bits."""
    if one is other or one.dtype != other.dtype or one.shape != other.shape:
        return one is other
    bits = f"u{one.itemsize}"
    few = slice(_FEW)  # different arrays usually differ in their first entries
    return bool((one[few].view(bits) == other[few].view(bits)).all()) and np.array_equal(
        one.view(bits), other.view(bits)
    )
