"""Encodes dataclasses with arrays and patches, and decodes them: payloads on the wire and states on disk.

Layout, little endian: magic `FLTN`, version (1 byte), 3 zero bytes, model hash (8 bytes), length of the
uncompressed body (8 bytes), BLAKE2b-64 of the compressed body (8 bytes), then the body as one zstd frame.

The body is MessagePack. An array is [dtype, shape, data], with booleans as a bitmap and the bytes of numbers
shuffled (`protocols.update.arrays`). An encoding may write the values of a patch instead
(`protocols.update.patch_values`). In a state on disk, an array may be replaced by the name under which it is
stored elsewhere (see `encode`).

Version 4 is the compact frame of updates (`protocols.update.compact_frame`). Version 3 is the state that a
simulation keeps in memory: the same header with a CRC-32, an uncompressed body, and numbers in memory order.
Version 5 is a state on disk: its checksum stands after the body instead of in the header, so that a large
state is written piece by piece. Versions 3 and 5 are never sent, and the wire rejects them.

Decoding trusts no length or type in the data. Every length is checked before memory is allocated, msgspec
checks types against the dataclass, and patches are checked against the model. Pickle is never used.
"""

import hashlib
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from fleetune.protocols.errors import (
    PacketCorrupt,
    PacketError,
    PacketForeign,
    PacketTooLarge,
    PacketTruncated,
    PacketVersion,
    other_format,
)
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.one_line import flat
from fleetune.protocols.update import compact_frame, encodings
from fleetune.protocols.update.arrays import AS_IT_LIES, Array, Arrays, bytes_of, dtype_name
from fleetune.protocols.update.body import Body, Source
from fleetune.protocols.update.body_writer import (
    BodyWriter,
    Data,
    compressed,
    frame_pieces,
    num_bytes,
    streamed,
)
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.update.patch_values import PatchReader, PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import DecodeCache

VERSION = 1
_PLAIN_VERSION, _OWN_VERSION = 3, 5
ZSTD_LEVEL = 3
_OWN_ZSTD_LEVEL = 1  # for own states: on shuffled float32 it gives as few bytes as level 3, in half the time
MODELS_PER_PAYLOAD = 3
MAX_ELEMENTS = 20_000  # limit for a task or an update, which contain little more than names of layers
MAX_SMALL_BYTES = 2**24
MAX_PLAIN_BYTES = 2**18  # limit for all but arrays, on top of what compression explains
MAX_SHRINKING = 100  # largest accepted compression ratio; graphs of operators reach 40

MAGIC = b"FLTN"
_HEADER = struct.Struct("<4sB3x8sQ8s")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 8
_PIECE_BYTES = 2**20

_ready: set[Any] = set()
_making_ready = threading.Lock()

FRAME_BYTES = 150  # approximate size of a payload without values and masks

M = TypeVar("M")


class Blob:
    """Long bytes in a message that is encoded: they are written as bytes, without a copy of the message."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def payload_limit(spec: ModelSpec) -> int:
    """Return the size of the largest payload accepted from the wire, in bytes: a few whole models.

    The limit holds for the compressed and for the uncompressed payload.
    """
    return MODELS_PER_PAYLOAD * 4 * spec.size + 1_048_576


def estimate_bytes(num_values: int, encoding: str = encodings.RAW) -> int:
    """Return the approximate bytes of a payload with `num_values` values; `FRAME_BYTES` without values."""
    return FRAME_BYTES + encodings.find(encoding).size(num_values)


def estimate_bitmap_bytes(num_selected: int, num_entries: int) -> int:
    """Return the approximate bytes of a compressed bitmap whose set bits are scattered at random."""
    share = num_selected / max(1, num_entries)
    if not 0 < share < 1:
        return 0
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return round(
        num_entries / 8 * math.pow(entropy, 0.77)
    )  # fitted to measurements; within 4 % from 60,000 to 1,200,000 entries


def encode(
    message: object,
    spec: ModelSpec,
    *,
    keep: Callable[[Array], bytes | None] = lambda _: None,
    writer: PatchWriter | None = None,
    compact: bool = False,
    own: bool = False,
    plain: bool = False,
) -> bytes:
    """Encode `message`, a frozen dataclass, struct or array, for a reader with the same model.

    Args:
        message: the object to encode.
        spec: the model.
        keep: function called with every array. It returns the name under which the caller stores the array
            elsewhere, and only this name is written; or None to write the array itself.
        writer: writes the values of patches, and masks; None writes plain arrays, like the encoding `raw`.
        compact: True uses the compact frame.
        own: True for a state on this machine's own disk: twice as fast, but other bytes than a payload.
        plain: True for a state in memory: neither compressed nor shuffled, so faster still but larger.
    """
    if own:
        return b"".join(_own_pieces(message, spec, plain=plain))
    parts = _parts(message, keep, writer)
    if compact:
        return compact_frame.framed(parts, spec.hash)
    # Compressing at once or as a stream gives different bytes. Raw payloads keep the bytes of earlier
    # versions.
    frame_of = streamed if writer is not None and writer.encoded else compressed
    packet = frame_of(parts, ZSTD_LEVEL, _HEADER.size)
    with packet.getbuffer() as whole:
        checksum = _checksum(whole[_HEADER.size :])
        length = sum(map(num_bytes, parts))
        _HEADER.pack_into(whole, 0, MAGIC, VERSION, bytes.fromhex(spec.hash), length, checksum)
    return packet.getvalue()


def encode_own(message: object, spec: ModelSpec, *, plain: bool = False) -> bytes | Iterator[bytes]:
    """Encode a state for this machine's own disk, as `encode` does with `own`.

    Returns:
        The bytes of a small state. The bytes of a large one come in pieces of about a megabyte, so that they
        are never in memory together.
    """
    pieces = _own_pieces(message, spec, plain=plain)
    first = next(pieces)
    second = next(pieces, None)
    return first if second is None else chain((first, second), pieces)


def _own_pieces(message: object, spec: ModelSpec, *, plain: bool) -> Iterator[bytes]:
    if plain:
        return iter((b"".join(plain_pieces(message, spec)),))
    return _own(_parts(message), spec)


def _own(parts: Sequence[Data], spec: ModelSpec) -> Iterator[bytes]:
    length, checksum = sum(map(num_bytes, parts)), hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    waiting = bytearray(_HEADER.pack(MAGIC, _OWN_VERSION, bytes.fromhex(spec.hash), length, b""))
    for packed in frame_pieces(parts, _OWN_ZSTD_LEVEL):
        checksum.update(packed)
        waiting += packed
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting + checksum.digest())


def _parts(
    message: object,
    keep: Callable[[Array], bytes | None] = lambda _: None,
    writer: PatchWriter | None = None,
    *,
    plain: bool = False,
) -> list[Data]:
    """Return the parts of the body of a message; for the arguments see `encode`."""
    patches = {} if writer is None else {id(patch.values): patch for patch in patches_in(message)}
    body = BodyWriter()

    def write(value: Any) -> Any:
        if isinstance(value, Blob):
            return body.hold_bytes(value.data)
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        if writer is not None and id(value) in patches:
            return body.hold(*writer.write(patches[id(value)]))
        if writer is not None and value.dtype == bool and (coded := writer.write_mask(value)):
            return body.hold(*coded)
        if (name := keep(value)) is not None:
            return name
        if plain and value.dtype != bool:
            return body.hold(AS_IT_LIES + dtype_name(value), list(value.shape), bytes_of(value))
        return body.hold(dtype_name(value), list(value.shape), value)

    around = msgspec.msgpack.Encoder(enc_hook=write, order="deterministic").encode(message)
    return body.parts(around)


def plain_pieces(message: object, spec: ModelSpec) -> list[bytes | memoryview]:
    """Encode a state as `encode` does with `plain`; return its bytes in pieces, without copies of arrays."""
    parts = _parts(message, plain=True)
    body = [np.packbits(part).data if isinstance(part, np.ndarray) else part for part in parts]
    checksum, length = 0, 0
    for part in body:
        checksum, length = zlib.crc32(part, checksum), length + len(part)
    made = checksum.to_bytes(_CHECKSUM_BYTES, "little")
    return [_HEADER.pack(MAGIC, _PLAIN_VERSION, bytes.fromhex(spec.hash), length, made), *body]


def decode(
    data: bytes,
    kind: type[M],
    spec: ModelSpec | None,
    *,
    limit: int | None = None,
    elements: int = MAX_ELEMENTS,
    finite: bool = True,
    stored_array: Callable[[bytes], Array] | None = None,
    reference: ReferenceModel | Callable[[M], ReferenceModel | None] | None = None,
    verified: bool = False,
    decode_cache: DecodeCache | None = None,
) -> M:
    """Decode what `encode` made, and return it as a `kind`.

    Args:
        data: the encoded bytes.
        kind: the expected dataclass.
        spec: the model of both sides; None if not known yet (an enrolment contains it).
        limit: largest number of bytes of the uncompressed body; None for no limit (own state on disk).
        elements: largest number of elements if there is a limit, see `protocols.update.elements`.
        finite: True rejects NaN and infinite numbers in arrays.
        stored_array: returns the array that is stored under a name that `keep` gave; None if there are none.
        reference: the reference model with which patches were written, or a function that returns it (or
            raises) for the message whose patches are not decoded yet; None for none.
        verified: True if the caller has just checked the digest of all of `data`, as a transfer does; the
            header's checksum is then skipped.
        decode_cache: cache of decoded patches, for readers of the same payload in one process; None for no
            cache.

    Raises:
        PacketTruncated, PacketVersion, PacketTooLarge, PacketCorrupt, PacketNotFinite, PacketForeign.
    """
    if limit is not None and spec is None:  # without a model its size sets no limit
        limit = min(limit, MAX_SMALL_BYTES + MAX_SHRINKING * len(data))
    return _read(
        _opened(data, spec, limit, verified),
        kind,
        spec,
        limit=limit,
        elements=elements,
        finite=finite,
        stored_array=stored_array,
        reference=reference,
        decode_cache=decode_cache,
        packed_bytes=len(data),
    )


def decode_from(source: Source, kind: type[M], spec: ModelSpec) -> M:
    """Decode what `plain_pieces` made from a source, without all of its bytes in memory.

    Raises:
        PacketTruncated, PacketVersion, PacketCorrupt, PacketNotFinite, PacketForeign.
    """
    head = source.read(_HEADER.size)
    check_model(head, spec)
    _, version, _, num_bytes, checksum = _HEADER.unpack(head)
    if version != _PLAIN_VERSION:
        raise PacketVersion(other_format("the state", version, str(_PLAIN_VERSION), "start the run anew"))
    checked = _Checked(source)
    message = _read(compact_frame.Opened(checked, num_bytes, plain=True), kind, spec)
    if checked.found.to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise PacketTruncated("the checksum differs: the state is damaged")
    return message


class _Checked:
    """A source that computes the CRC-32 of all bytes that are read."""

    def __init__(self, source: Source) -> None:
        self._source, self.found = source, 0

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self.found = zlib.crc32(data, self.found)
        return data


def _read(
    opened: compact_frame.Opened,
    kind: type[M],
    spec: ModelSpec | None,
    *,
    limit: int | None = None,
    elements: int = MAX_ELEMENTS,
    finite: bool = True,
    stored_array: Callable[[bytes], Array] | None = None,
    reference: ReferenceModel | Callable[[M], ReferenceModel | None] | None = None,
    decode_cache: DecodeCache | None = None,
    packed_bytes: int = 0,
) -> M:
    """Decode an opened payload or state; for the arguments see `decode`."""
    largest = None if limit is None or spec is None else spec.size
    arrays = Arrays(finite, largest, left=limit, plain=opened.plain)
    unpacked = partial(
        Body, opened.packed, opened.num_bytes, plain=opened.plain, dictionary=opened.dictionary
    )
    reader = PatchReader(spec, arrays, unpacked, decode_cache)
    if limit is None:
        small, most = None, None
    else:
        small, most = min(limit, MAX_PLAIN_BYTES + MAX_SHRINKING * packed_bytes), elements
    body = reader.without_arrays(most, small)

    def read(expected: type, obj: Any) -> Any:
        if (get_origin(expected) or expected) is np.ndarray:
            if stored_array is not None and isinstance(obj, bytes):
                return stored_array(obj)
            return reader.read(obj)
        raise PacketCorrupt(f"cannot read a {expected}")

    _make_ready(kind)
    try:
        message = msgspec.msgpack.decode(body, type=kind, dec_hook=read)
    except PacketError:
        raise
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as problem:
        raise PacketCorrupt(f"{getattr(kind, '__name__', kind)}: {flat(problem)}") from None
    reader.fill(message, reference(message) if callable(reference) else reference)
    return message


def _make_ready(kind: Any) -> None:
    """Let msgspec inspect a dataclass once, under a lock.

    msgspec 0.22 crashes if two threads inspect the same dataclass at the same time.
    """
    if kind not in _ready:
        with _making_ready:
            msgspec.msgpack.Decoder(kind)
            _ready.add(kind)


def is_plain(head: bytes) -> bool:
    """True if a state that begins with these `HEADER_BYTES` bytes is in the plain form."""
    return head[:5] == MAGIC + bytes([_PLAIN_VERSION])


def unpacked_bytes(data: bytes) -> int:
    """Return the length of an uncompressed body from the header of an enrolment, task or bundle.

    The result is 0 if there is no header.
    """
    return 0 if len(data) < _HEADER.size else int(_HEADER.unpack_from(data)[3])


def check_model(data: bytes, spec: ModelSpec) -> None:
    """Check that encoded data belong to this model. Raises PacketForeign, PacketTruncated."""
    if compact_frame.is_compact(data):
        model = compact_frame.model_of(data)
    elif len(data) < _HEADER.size:
        raise PacketTruncated(f"payload of {len(data)} bytes, shorter than its header of {_HEADER.size}")
    else:
        _, _, model, _, _ = _HEADER.unpack_from(data)
    if model.hex() != spec.hash:
        raise PacketForeign(
            f"payload for model {model.hex()}; this run's model is {spec.hash} ({flat(spec.name)})"
        )


def _opened(data: bytes, spec: ModelSpec | None, limit: int | None, verified: bool) -> compact_frame.Opened:
    is_compact = compact_frame.is_compact(data)
    opened = compact_frame.opened(data) if is_compact else _unframed(data, own=limit is None)
    if spec is not None:
        check_model(data, spec)
    if limit is not None and max(opened.num_bytes, len(data)) > limit:
        longest = max(opened.num_bytes, len(data))
        raise PacketTooLarge(f"payload of {longest} bytes when unpacked; at most {limit} are allowed")
    if not verified and (compact_frame.is_damaged(data) if is_compact else _is_damaged(data)):
        raise PacketTruncated("the checksum differs: the payload is damaged or cut short")
    return opened


def _unframed(data: bytes, *, own: bool) -> compact_frame.Opened:
    if len(data) < _HEADER.size:
        raise PacketTruncated(f"payload of {len(data)} bytes, shorter than its header of {_HEADER.size}")
    magic, version, _, num_bytes, _ = _HEADER.unpack_from(data)
    if own and magic == MAGIC and version == _PLAIN_VERSION:
        packed = memoryview(data)[_HEADER.size :]
        if len(packed) != num_bytes:
            raise PacketTruncated(f"state of {len(packed)} bytes; its header says {num_bytes}")
        return compact_frame.Opened(packed, num_bytes, plain=True)
    if own and magic == MAGIC and version == _OWN_VERSION:
        return compact_frame.Opened(memoryview(data)[_HEADER.size : -_CHECKSUM_BYTES], num_bytes)
    if magic != MAGIC:
        raise PacketVersion(f"the payload begins with {magic!r}: it is not a payload of fleetune")
    if version != VERSION:
        readable = f"{VERSION} or {compact_frame.VERSION}"
        remedy = "use the version of fleetune that wrote it"
        raise PacketVersion(other_format("the payload", version, readable, remedy))
    return compact_frame.Opened(memoryview(data)[_HEADER.size :], num_bytes)


def _is_damaged(data: bytes) -> bool:
    _, version, _, _, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if version == _OWN_VERSION:
        body, checksum = body[:-_CHECKSUM_BYTES], bytes(body[-_CHECKSUM_BYTES:])
    made = _crc if version == _PLAIN_VERSION else _checksum
    return bool(checksum != made(body))


def _crc(body: memoryview) -> bytes:
    return zlib.crc32(body).to_bytes(8, "little")


def _checksum(packed: memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()
