"""Encodes and decodes the values of patches: [name of the encoding, [number of values], data].

Values of the encoding `raw` have the form of any other float32 array, so that their bytes stay those of
earlier versions. An encoding sees only the entries that a patch selects; this module restricts the reference
model and the residual to these entries. If an encoding writes the values, the payload's masks are compressed
too: [CODED_MASK, shape, data], see `protocols.update.masks`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, PacketTooLarge
from fleetune.protocols.finite import all_finite
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.arrays import (
    CODED_MASK,
    FLOAT32,
    Array,
    Arrays,
    WireArray,
)
from fleetune.protocols.update.body import Body
from fleetune.protocols.update.elements import Head, without_arrays
from fleetune.protocols.update.encodings.chunks import chunks, difference, part_of, wanted_of
from fleetune.protocols.update.encodings.encoding import Encoding, Known
from fleetune.protocols.update.masks.coded_mask import read_mask, write_mask
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.patch import Patch, patches_in, values_of_one
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Where, num_selected, where
from fleetune.protocols.update.shared_payload_cache import DecodeCache, EncodeCache, PayloadContent


@dataclass
class PatchWriter:
    """Encodes the values of one payload's patches.

    Attributes:
        encoding: the encoding of all patches.
        spec: the model.
        key: key of random draws; each patch uses a child of it.
        reference: the reference model; None for none. A patch with an entry outside the reference is sent
            without differences.
        residual: residual of earlier payloads (error feedback), shape (spec.size,); None for none.
        written: cache of encoded patches, for writers without a residual; None for no cache.
        measures: True computes `compression_error`.
        mask_time: time that the device needs to code a mask; None to ignore time.
        next_residual: the residual for the next payload; None for none. Where patches overlap, the last one
            counts.
        encoded: True if an encoding other than `raw` wrote a patch.
    """

    encoding: Encoding
    spec: ModelSpec
    key: Key
    reference: ReferenceModel | None = None
    residual: FlatArray | None = None
    written: EncodeCache | None = None
    measures: bool = False
    mask_time: CodingTime | None = None
    next_residual: FlatArray | None = field(default=None, init=False)
    encoded: bool = field(default=False, init=False)
    _count: int = field(default=0, init=False)
    # masks that were written, by their compressed bytes
    _masks: dict[bytes, MaskArray] = field(default_factory=dict, init=False)
    # sum of squares of all changes, and of those that were not sent
    _wanted: float = field(default=0.0, init=False)
    _left: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.next_residual = self.residual

    @property
    def sends_all(self) -> bool:
        """True if the reader decodes exactly the values of the patches."""
        return self.encoding.lossless and self.residual is None

    @property
    def compression_error(self) -> float | None:
        """Norm of the new residual, divided by the norm of all changes with the earlier residual; None if not
        measured.
        """
        if not self.measures:
            return None
        return min(1.0, math.sqrt(self._left / self._wanted)) if self._wanted else 0.0

    @property
    def reference_digest(self) -> str | UnsetType:
        """Digest of the reference model; UNSET if there is none."""
        return UNSET if self.reference is None else self.reference.digest

    def write(self, patch: Patch) -> WireArray:
        """Encode the values of the payload's next patch."""
        entries, key, written = where(patch.selection, self.spec), self.key.child(self._count), self.written
        self._count += 1
        if written is None:
            framed = self._write(patch, entries, key)
        else:
            around = f"{self.encoding.name} {vars(self.encoding)} {self.reference_digest} {key}"
            framed = written.found(around, entries, patch.values, lambda: self._write(patch, entries, key))
        self.encoded |= framed[0] != FLOAT32
        return framed

    def write_mask(self, mask: MaskArray) -> WireArray | None:
        """Compress an array of booleans; None if the array is sent as a bitmap."""
        if self.encoding.name == encodings.RAW:
            return None
        data = write_mask(mask, self.spec, self.reference, self.mask_time)
        if data is None:
            return None
        self._masks[data] = mask
        return CODED_MASK, list(mask.shape), data

    def content(self, message: object) -> PayloadContent | None:
        """Return the written content for a reader in the same process; None if the reader would gain nothing.

        Args:
            message: the message with the patches and masks.

        Returns:
            The content. Values are included only if the reader would decode exactly these values.
        """
        values = values_of_one(message) if self.sends_all else None
        return None if values is None and not self._masks else PayloadContent(values, self._masks)

    def _write(self, patch: Patch, entries: Where, key: Key) -> WireArray:
        residual = None if self.residual is None else self.residual[entries]
        encoding = self.encoding
        beyond = not encoding.lossless and self._beyond_reference(entries)
        if beyond or not patch.values.size:
            encoding = encodings.find(encodings.RAW)
        encoded = encoding.encode(
            patch.values, _KnownOfPatch(self.spec, self.reference, entries), residual, key
        )
        if self.written is None:
            self._leave(entries, encoded.residual)
            if self.measures:
                self._measure(patch.values, entries, residual, encoded.residual)
        name = FLOAT32 if encoding.name == encodings.RAW else encoding.name
        return name, [patch.values.size], encoded.data

    def _beyond_reference(self, entries: Where) -> bool:
        """True if the reference model lacks one of these entries."""
        if self.reference is None:
            return False
        held = self.reference.held
        return not held[entries].all() if isinstance(entries, slice) else bool((entries > held).any())

    def _measure(
        self, values: FlatArray, entries: Where, waited: FlatArray | None, waits: FlatArray | None
    ) -> None:
        """Add a patch to the sums of `compression_error`; patches without a residual count too."""
        reference = None if self.reference is None else self.reference.values[entries]
        for chunk in chunks(values.size):
            wanted = wanted_of(values, waited, chunk)
            self._wanted += _square(difference(wanted, part_of(reference, chunk)))
            self._left += 0.0 if waits is None else _square(waits[chunk])

    def _leave(self, entries: Where, residual: FlatArray | None) -> None:
        """Store the new residual of these entries; None stands for zeros."""
        before = self.next_residual
        if residual is not None and residual.size == self.spec.size:
            self.next_residual = residual
        elif residual is not None or before is not None:
            if before is None:
                before = np.zeros(self.spec.size, np.float32)
            elif before is self.residual:
                before = before.copy()
            before[entries] = 0 if residual is None else residual
            self.next_residual = before


@dataclass(frozen=True)
class _Unread:
    """Encoded values that are not decoded yet: `count` values in `length` bytes from byte `start` of the
    body.

    The bytes start at byte `start` of the body.
    """

    name: str
    count: int
    length: int
    start: int


@dataclass
class PatchReader:
    """Decodes the arrays of one payload; masks and patch values follow once the rest of the message is known.

    Attributes:
        spec: the model; None if not known, and then encoded values cannot be decoded.
        arrays: reads plain arrays, and counts all arrays against the limits.
        body: function that opens the payload's body at its start. With encoded values, the body is
            decompressed twice: to read the message around them, and to decode them as a stream.
        decode_cache: cache of decoded patches; None for no cache.
    """

    spec: ModelSpec | None
    arrays: Arrays
    body: Callable[[], Body]
    decode_cache: DecodeCache | None = None
    _most_bytes: int | None = field(default=None, init=False)
    _lifted: list[Array | _Unread] = field(default_factory=list, init=False)
    _held: dict[int, tuple[Array, _Unread]] = field(default_factory=dict, init=False)
    _coded: dict[int, tuple[MaskArray, bytes]] = field(default_factory=dict, init=False)
    # those masks that the message refers to
    _masks: list[tuple[MaskArray, bytes]] = field(default_factory=list, init=False)

    def without_arrays(self, most: int | None, most_bytes: int | None) -> bytes:
        """Return the body with numbers instead of its arrays, which are held for `read`.

        Arguments and errors are those of `elements.without_arrays`.
        """
        self._most_bytes = most_bytes
        data, self._lifted = without_arrays(self.body(), self._lift, most=most, most_bytes=most_bytes)
        return data

    def _lift(self, head: Head, body: Body) -> Array | _Unread:
        if head.name in encodings.REGISTRY and len(head.shape) == 1:
            if self._most_bytes is not None and head.length > self._most_bytes:
                raise PacketTooLarge(
                    f"encoded values of {head.length} bytes; at most {self._most_bytes} are allowed"
                )
            written = _Unread(head.name, head.shape[0], head.length, body.at)
            body.skip(head.length)
            return written
        if head.name == CODED_MASK and self._may_be_mask(head.shape, head.length):
            self.arrays.take(math.prod(head.shape), math.prod(head.shape))
            blank = np.zeros(head.shape, np.bool_)
            self._coded[id(blank)] = blank, body.read(head.length)
            return blank
        return self.arrays.read(body, head.name, head.shape, head.length)

    def read(self, obj: Any) -> Array:
        """Return an array of the message; until `fill`, encoded values are empty and coded masks have no
        True.

        Raises:
            PacketCorrupt, PacketTooLarge, PacketNotFinite.
        """
        # `without_arrays` lets only our own extensions through
        if not (isinstance(obj, list) and obj and isinstance(obj[-1], Ext)):
            raise PacketCorrupt("an array is not [dtype, shape, data] in the shortest MessagePack form")
        found = self._lifted[int.from_bytes(obj[-1].data, "big")]
        if id(found) in self._coded:
            # only once, even if the message refers to it several times
            self._masks.append(self._coded.pop(id(found)))
        if not isinstance(found, _Unread):
            return self.arrays.checked(found)
        self.arrays.take(found.count, 4 * found.count)
        stand_in = np.empty(0, np.float32)
        self._held[id(stand_in)] = stand_in, found
        return stand_in

    def _may_be_mask(self, shape: list[int], length: int) -> bool:
        """True if a mask of this shape can have a code of `length` bytes; a code is never longer than a
        bitmap.
        """
        size = math.prod(shape)
        return self.spec is not None and 0 < size <= self.spec.size and 8 * length < size

    def fill(self, message: object, reference: ReferenceModel | None = None) -> None:
        """Decode masks and values of the patches in `message`, and check every patch against the model.

        Args:
            message: the message as read, with undecoded masks and values.
            reference: the values that both sides hold; None for none.

        Raises:
            PacketCorrupt, PacketNotFinite, or another PacketError of the encoding.
        """
        self._lifted = []
        if self.spec is not None:
            for blank, data in self._masks:
                blank.reshape(-1)[:] = self._mask(data, blank.size, self.spec, reference)
            waiting = [patch for patch in patches_in(message) if id(patch.values) in self._held]
            waiting.sort(key=lambda patch: self._held[id(patch.values)][1].start)
            body = self.body()
            for patch in waiting:
                _, written = self._held.pop(id(patch.values))
                self._fill(patch, written, body, self.spec, reference)
            for patch in patches_in(message):
                patch.check(self.spec)
        if self._held:
            raise PacketCorrupt("the payload has encoded values that belong to no patch of a known model")

    def _mask(self, data: bytes, size: int, spec: ModelSpec, reference: ReferenceModel | None) -> MaskArray:
        read = partial(read_mask, data, size, spec, reference)
        return read() if self.decode_cache is None else self.decode_cache.found_mask(data, size, read)

    def _fill(
        self, patch: Patch, written: _Unread, body: Body, spec: ModelSpec, reference: ReferenceModel | None
    ) -> None:
        count, entries = written.count, where(patch.selection, spec)
        if count != num_selected(entries):
            raise PacketCorrupt(f"patch has {count} values for {num_selected(entries)} selected entries")
        encoding, known = encodings.find(written.name), _KnownOfPatch(spec, reference, entries)
        body.skip(written.start - body.at)
        if self.decode_cache is not None:
            data = body.read(written.length)
            about = f"{written.name} {None if reference is None else reference.digest}"
            read = partial(encoding.decode, data, count, known)
            values = self.decode_cache.found(about, data, entries, read)
        else:
            values = encoding.decode_from(body, written.length, count, known)
        if self.arrays.finite and not all_finite(values):
            raise PacketNotFinite("patch holds NaN or infinite values")
        # the patch is frozen, but it was just created and nothing else refers to it
        object.__setattr__(patch, "values", values)


class _KnownOfPatch(Known):
    """Facts about a patch's entries that both sides know; large arrays are computed only on request."""

    _spec: ModelSpec
    _entries: Where

    def __init__(self, spec: ModelSpec, reference: ReferenceModel | None, entries: Where) -> None:
        rows = tuple(
            tensor.size // tensor.shape[0] if tensor.shape and tensor.size else 1 for tensor in spec.tensors
        )
        values = None if reference is None else reference.values[entries]
        copied = values is not None and not isinstance(entries, slice)
        self.__dict__.update(reference=values, row_sizes=rows, spare=copied, _spec=spec, _entries=entries)

    @cached_property
    def tensors(self) -> NDArray[np.int16]:
        return np.repeat(np.arange(len(self._sizes), dtype=np.int16), self._sizes)

    @cached_property
    def places(self) -> NDArray[np.int32] | None:
        if sum(self._sizes) == self._spec.size:
            return None
        inside = _by_tensor(self._spec, self._entries)
        return np.concatenate([np.flatnonzero(selected).astype(np.int32) for selected in inside])

    @cached_property
    def _sizes(self) -> list[int]:
        if not isinstance(self._entries, slice):
            return [int(np.count_nonzero(selected)) for selected in _by_tensor(self._spec, self._entries)]
        ends = np.cumsum([tensor.size for tensor in self._spec.tensors])
        reached = np.clip([0, *ends], self._entries.start, self._entries.stop)
        return [int(size) for size in np.diff(reached)]

    def beginnings(self, chunk: slice) -> list[int]:
        starts = np.unique(np.cumsum(self._sizes))
        return [int(start) - chunk.start for start in starts if chunk.start < start < chunk.stop]


def _square(numbers: FlatArray) -> float:
    return float(np.square(numbers, dtype=np.float64).sum())


def _by_tensor(spec: ModelSpec, entries: Where) -> Iterator[MaskArray]:
    """Yield a mask of the selected entries of each tensor."""
    start = 0
    for tensor in spec.tensors:
        stop = start + tensor.size
        if isinstance(entries, slice):
            selected = np.zeros(tensor.size, np.bool_)
            selected[max(0, entries.start - start) : max(0, entries.stop - start)] = True
            yield selected
        else:
            yield entries[start:stop]
        start = stop
