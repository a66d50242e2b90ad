"""What many peers are sent alike is encoded once; in one program what was written need not be read."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.arrays import WireArray
from fleetune.protocols.update.base import same_bits


@dataclass
class Written:
    """What was written of late, for patches that several peers are sent alike and hold alike.

    Attributes:
        most: of the latest are remembered.
    """

    most: int = 4
    _latest: OrderedDict[bytes, WireArray] = field(default_factory=OrderedDict, init=False)
    _last: "tuple[MaskArray, FlatArray, bytes] | None" = field(default=None, init=False)

    def found(
        self, around: str, mask: MaskArray, values: FlatArray, write: Callable[[], WireArray]
    ) -> WireArray:
        """What was written of this, or is now.

        Args:
            around: what decides how, beside the following.
            mask: the patch's entries, shape (spec.size,).
            values: theirs.
            write: writes it.
        """
        digest = hashlib.blake2b(around.encode() + self._content(mask, values), digest_size=16).digest()
        if digest not in self._latest:
            self._latest[digest] = write()
        self._latest.move_to_end(digest)
        while len(self._latest) > self.most:
            self._latest.popitem(last=False)
        return self._latest[digest]

    def _content(self, mask: MaskArray, values: FlatArray) -> bytes:
        """A digest of both; of the same once more without digesting them."""
        last = self._last
        if last is not None and same_bits(last[1], values) and same_bits(last[0], mask):
            return last[2]
        found = hashlib.blake2b(np.packbits(mask).data, digest_size=16)
        found.update(np.ascontiguousarray(values).data)
        self._last = mask, values.copy(), found.digest()  # a copy: the caller may change its own
        return self._last[2]


@dataclass(frozen=True)
class Told:
    """What a payload says, by who wrote it in this process or in one that it began.

    Attributes:
        values: of its one patch, where its reader gets these very ones; None: it finds out, or there is not
            one.
        masks: in it that are coded, by their codes.
    """

    values: FlatArray | None = None
    masks: Mapping[bytes, MaskArray] = field(default_factory=dict)


@dataclass
class ReadBefore:
    """What was read last of what an encoding wrote, for readers that are sent the same in turn.

    Attributes:
        told: of the payload that is read next; None: nobody tells.
    """

    told: Told | None = None
    _last: "tuple[str, bytes, MaskArray, FlatArray] | None" = field(default=None, init=False)

    def found(self, about: str, data: bytes, mask: MaskArray, read: Callable[[], FlatArray]) -> FlatArray:
        """The values, the caller's own to change.

        Args:
            about: what decides how they are read, beside the following.
            data: as they came.
            mask: their entries, shape (spec.size,).
            read: reads them.
        """
        told = None if self.told is None else self.told.values
        if told is not None and told.size == np.count_nonzero(mask):
            return told.copy()
        last = self._last
        if last is None or (about, data) != last[:2] or not same_bits(last[2], mask):
            self._last = last = about, data, mask, read()
        return last[3].copy()

    def found_mask(self, data: bytes, size: int, read: Callable[[], MaskArray]) -> MaskArray:
        """Its flags, shape (size,), not to be changed.

        Args:
            data: its code.
            size: how many flags it has.
            read: reads them.
        """
        told = None if self.told is None else self.told.masks.get(data)
        return read() if told is None or told.size != size else told.ravel()
