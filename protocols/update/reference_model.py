"""The reference model: values that both sides of a transfer hold; payloads contain differences to it."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.update.arrays import bytes_of
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.update.selection import where

_FEW = 256
_BITS = 2**16  # a multiple of 8
_FEWEST, _ROOM = 2, 2**24  # smallest number of models in a cache, and bytes of all cached models


@dataclass(frozen=True)
class ReferenceModel:
    """Values that both sides of a transfer hold.

    Attributes:
        values: shape (spec.size,), read-only; 0 at entries that the sides do not hold.
        held: True at entries that both sides hold, same shape.
    """

    values: FlatArray
    held: MaskArray

    @classmethod
    def of_task(cls, task: Any, spec: ModelSpec) -> Self:
        """Return a reference model with the values of a task's patches, and none elsewhere.

        Later patches overwrite earlier ones.
        """
        # most tasks have all entries, so zeros would be allocated only to be replaced
        patches = list(patches_in(task))
        whole = patches[-1] if patches and patches[-1].has_all(spec) else None
        return cls.nothing(spec).after(task, spec) if whole is None else cls.whole(whole.values)

    @classmethod
    def nothing(cls, spec: ModelSpec) -> Self:
        """Return a reference model without any entry, for sides that have no values in common."""
        return cls(_repeated(np.float32(0), spec.size), _repeated(np.False_, spec.size))

    @classmethod
    def whole(cls, values: FlatArray) -> Self:
        """Return a reference model with all entries: `values`, shape (spec.size,)."""
        return cls(values, _repeated(np.True_, values.size))

    def after(self, task: Any, spec: ModelSpec) -> Self:
        """Return the reference model after a task has arrived; later patches overwrite earlier ones."""
        patches = list(patches_in(task))
        if patches and patches[-1].has_all(spec):
            return self.whole(patches[-1].values)
        values, held = self.values.copy(), self.held
        for patch in patches:
            entries = where(patch.selection, spec)
            values[entries] = patch.values
            if not held[entries].all():
                held = held.copy()
                held[entries] = True
        return type(self)(values, held)

    @cached_property
    def digest(self) -> str:
        """Digest of 32 hex digits, with which the sides check that they hold the same values."""
        found = hashlib.blake2b(bytes_of(self.values.astype("<f4", copy=False)), digest_size=16)
        for start in range(0, self.held.size, _BITS):  # in blocks, because numpy copies what it packs
            found.update(np.packbits(self.held[start : start + _BITS]).data)
        return found.hexdigest()


def _repeated(value: np.generic, size: int) -> NDArray[Any]:
    """Return a read-only array with `size` times the same value, in the memory of one."""
    return np.broadcast_to(value, (size,))


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
