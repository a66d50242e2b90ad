"""The frame of a payload in its brief form, version 2 (docs/wire.md): for updates on thin uplinks.

Magic `FLTN`, version (1 byte), form (1 byte: 0, the body as it is; 1, the body as one zstd frame, which says
how long it is), model hash (8 bytes), BLAKE2b-32 of all that follows (4 bytes), then the body: that of
version 1, written by `protocols.brief`.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zstandard

from fleetune.protocols import brief
from fleetune.protocols.errors import PacketCorrupt, PacketTruncated
from fleetune.protocols.update.body_writer import Data, joined, num_bytes, streamed

MAGIC = b"FLTN"
VERSION = 2
HEADER = struct.Struct("<4sBB8s4s")
ZSTD_LEVEL = 3
_AS_IT_IS, _ZSTD = 0, 1


class Opened(NamedTuple):
    """What is behind a payload's header.

    Attributes:
        packed: the body, compressed unless it is `plain`.
        num_bytes: of the body.
        plain: it is not compressed.
        brief: `protocols.brief` wrote it.
    """

    packed: memoryview
    num_bytes: int
    plain: bool = False
    brief: bool = False


def briefly(around: bytes) -> bytes | None:
    """MessagePack, as `protocols.brief` writes the same; None: it cannot."""
    try:
        return brief.write(msgspec.msgpack.decode(around))
    except ValueError:  # a method's update has keys that are no text
        return None


def at_length(body: bytes) -> bytes:
    """MessagePack again. Raises PacketCorrupt."""
    return msgspec.msgpack.encode(brief.read(body))


def framed(parts: Sequence[Data], model_hash: str) -> bytes:
    """A body behind its header, in the shorter of its forms."""
    packed, form = streamed(parts, ZSTD_LEVEL, 0).getvalue(), _ZSTD
    if len(packed) >= sum(map(num_bytes, parts)):
        packed, form = bytes(joined(parts)), _AS_IT_IS
    model = bytes.fromhex(model_hash)
    return HEADER.pack(MAGIC, VERSION, form, model, _checksum(packed)) + packed


def is_brief(data: bytes) -> bool:
    """Whether this is such a payload, or the beginning of one."""
    return data[:5] == MAGIC + bytes([VERSION])


def model_of(data: bytes) -> bytes:
    """The hash of the model that it is for. Raises PacketTruncated."""
    if len(data) < HEADER.size:
        raise PacketTruncated(f"{len(data)} bytes; a header alone takes {HEADER.size}")
    return bytes(HEADER.unpack_from(data)[3])


def opened(data: bytes) -> Opened:
    """Raises PacketTruncated, PacketCorrupt."""
    if len(data) < HEADER.size:
        raise PacketTruncated(f"{len(data)} bytes; a header alone takes {HEADER.size}")
    form, packed = HEADER.unpack_from(data)[2], memoryview(data)[HEADER.size :]
    if form == _AS_IT_IS:
        return Opened(packed, len(packed), plain=True, brief=True)
    if form != _ZSTD:
        raise PacketCorrupt(f"brief payload of form {form}")
    try:
        length = zstandard.get_frame_parameters(packed).content_size
    except zstandard.ZstdError as problem:
        raise PacketCorrupt(f"body does not unpack: {problem}") from None
    if length == zstandard.CONTENTSIZE_UNKNOWN:
        raise PacketCorrupt("the compressed body does not say how long it is")
    return Opened(packed, length, brief=True)


def is_damaged(data: bytes) -> bool:
    """Whether the checksum differs."""
    return bool(HEADER.unpack_from(data)[4] != _checksum(memoryview(data)[HEADER.size :]))


def _checksum(packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=4).digest()
