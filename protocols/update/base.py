"""What both sides of a transfer hold: values are written as differences to it."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.update.patch import patches_in

_FEW = 256
_FEWEST, _ROOM = 4, 2**24  # models, and bytes, that a process remembers


@dataclass(frozen=True)
class Base:
    """Values that both sides hold.

    Attributes:
        values: 0 at entries that they do not hold, shape (spec.size,).
        held: which they do, same shape.
    """

    values: FlatArray
    held: MaskArray

    @classmethod
    def of_task(cls, task: Any, spec: ModelSpec) -> Self:
        """All that the patches of a task bring, the later over the earlier."""
        return cls.nothing(spec).after(task, spec)

    @classmethod
    def nothing(cls, spec: ModelSpec) -> Self:
        """Of sides that hold nothing in common."""
        return cls(np.zeros(spec.size, np.float32), np.zeros(spec.size, np.bool_))

    @classmethod
    def whole(cls, values: FlatArray) -> Self:
        """Of sides that hold all of these, shape (spec.size,)."""
        return cls(values, np.ones(values.size, np.bool_))

    def after(self, task: Any, spec: ModelSpec) -> Self:
        """What both hold when a task has brought its patches, the later over the earlier."""
        values, held = self.values.copy(), self.held.copy()
        for patch in patches_in(task):
            mask = patch.selection.mask(spec)
            values[mask] = patch.values
            held |= mask
        return type(self)(values, held)

    @cached_property
    def digest(self) -> str:
        """By which both sides know that they hold the same, 32 hex digits."""
        found = hashlib.blake2b(self.values.astype("<f4").tobytes(), digest_size=16)
        found.update(np.packbits(self.held).tobytes())
        return found.hexdigest()


def num_remembered(spec: ModelSpec) -> int:
    """How many bases of a model a process remembers: of small models more, in the same room."""
    return max(_FEWEST, _ROOM // (5 * max(1, spec.size)))  # float32, and whether it is held


@dataclass
class KnownBases:
    """The latest bases that were met: one that is met again need not be digested again, which takes ten times
    as long as to see that it is the same.

    Attributes:
        most: are remembered.
    """

    most: int = _FEWEST
    _latest: list[tuple[bytes, Base]] = field(default_factory=list, init=False)

    def known(self, base: Base) -> Base:
        """The one with the same content, or this one, which nobody changes any more."""
        few = base.values[:_FEW].tobytes()  # most that differ do so here
        for begins, one in self._latest:
            if begins == few and _is_same(one, base):
                return one
        self._latest = [(few, base), *self._latest[: self.most - 1]]
        return base


def _is_same(one: Base, other: Base) -> bool:
    return same_bits(one.values, other.values) and same_bits(one.held, other.held)


def same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays with one axis are the same to the last bit."""
    if one is other or one.dtype != other.dtype or one.shape != other.shape:
        return one is other
    bits = f"u{one.itemsize}"
    few = slice(_FEW)  # most that differ do so here
    return bool((one[few].view(bits) == other[few].view(bits)).all()) and np.array_equal(
        one.view(bits), other.view(bits)
    )
