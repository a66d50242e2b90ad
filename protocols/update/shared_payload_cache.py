"""Caches for payloads that many peers share: a patch is encoded once, and decoded once in a process."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import ref

import numpy as np

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.arrays import WireArray
from fleetune.protocols.update.reference_model import same_bits
from fleetune.protocols.update.selection import Where, num_selected


@dataclass
class EncodeCache:
    """Caches recently encoded patches, for tasks to several devices with the same reference model.

    Attributes:
        most: largest number of cached patches.
    """

    most: int = 4
    _latest: OrderedDict[bytes, WireArray] = field(default_factory=OrderedDict, init=False)
    _last: "tuple[Where, ref[FlatArray], bytes] | None" = field(default=None, init=False)

    def forget(self) -> None:
        """Drop all cached patches."""
        self._latest.clear()
        self._last = None

    def found(
        self, context: str, entries: Where, values: FlatArray, write: Callable[[], WireArray]
    ) -> WireArray:
        """Return the encoded form of a patch, from the cache or from `write`.

        Args:
            context: all else that determines the bytes: encoding, settings, reference model, key.
            entries: the patch's entries in the model.
            values: the values of these entries.
            write: encodes the patch.
        """
        digest = hashlib.blake2b(context.encode() + self._content(entries, values), digest_size=16).digest()
        if digest not in self._latest:
            self._latest[digest] = write()
        self._latest.move_to_end(digest)
        while len(self._latest) > self.most:
            self._latest.popitem(last=False)
        return self._latest[digest]

    def _content(self, entries: Where, values: FlatArray) -> bytes:
        """Return a digest of entries and values; the last digest is reused if they are unchanged."""
        last = self._last
        if last is not None and last[1]() is values and _are_same(last[0], entries):
            return last[2]
        chosen = repr(entries).encode() if isinstance(entries, slice) else np.packbits(entries).data
        found = hashlib.blake2b(chosen, digest_size=16)
        found.update(np.ascontiguousarray(values).data)
        digest = found.digest()
        # tasks are read-only, so the same array still has the same values
        self._last = None if values.flags.writeable else (entries, ref(values), digest)
        return digest


def _are_same(one: Where, other: Where) -> bool:
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return same_bits(one, other)


@dataclass(frozen=True)
class PayloadContent:
    """The content of a payload, handed from its writer to a reader in the same process or in a worker.

    Attributes:
        values: values of the payload's only patch, if the reader decodes exactly these; otherwise None.
        masks: the payload's compressed masks, by their bytes.
    """

    values: FlatArray | None = None
    masks: Mapping[bytes, MaskArray] = field(default_factory=dict)


@dataclass
class DecodeCache:
    """Caches the last decoded patch, for readers in one process that receive the same payload in turn.

    Attributes:
        content: content of the next payload, if its writer is in this process; otherwise None.
    """

    content: PayloadContent | None = None
    _last: "tuple[str, bytes, Where, FlatArray] | None" = field(default=None, init=False)

    def found(self, context: str, data: bytes, entries: Where, read: Callable[[], FlatArray]) -> FlatArray:
        """Return the decoded values of a patch. The caller may change the array.

        Args:
            context: all else that determines the values: encoding and reference model.
            data: the encoded bytes.
            entries: the patch's entries in the model.
            read: decodes the bytes.
        """
        content = None if self.content is None else self.content.values
        if content is not None and content.size == num_selected(entries):
            return content.copy()
        last = self._last
        if last is None or (context, data) != last[:2] or not _are_same(last[2], entries):
            self._last = last = context, data, entries, read()
        return last[3].copy()

    def found_mask(self, data: bytes, size: int, read: Callable[[], MaskArray]) -> MaskArray:
        """Return a decoded mask, shape (size,). The caller must not change it.

        Args:
            data: the encoded bytes.
            size: number of booleans.
            read: decodes the bytes.
        """
        content = None if self.content is None else self.content.masks.get(data)
        return read() if content is None or content.size != size else content.ravel()
