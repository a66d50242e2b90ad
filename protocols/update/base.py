"""What both sides of a transfer hold: values are written as differences to it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.update.patch import patches_in


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
