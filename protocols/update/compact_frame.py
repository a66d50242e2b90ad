"""The frame of a payload in compact form, version 4 (docs/wire.md): for updates on thin uplinks.

Magic `FLTN`, version (1 byte), model hash (8 bytes), BLAKE2b-32 of the compressed body (4 bytes), then the
body of version 1 as one zstd frame. The zstd dictionary consists of two example replies, so that the names of
fields take few bytes.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zstandard

from fleetune.protocols.errors import PacketCorrupt, PacketTruncated
from fleetune.protocols.update.body import Source
from fleetune.protocols.update.body_writer import Data, streamed

MAGIC = b"FLTN"
VERSION = 4
HEADER = struct.Struct("<4sB8s4s")
ZSTD_LEVEL = 3

# Replies as devices send them, the most usual last: zstd refers to what an update has in common with them.
# To change them takes another version of the frame (docs/wire.md).
_MEASURES = {
    "num_samples": 140,
    "num_test": 60,
    "train_loss": 0.25,
    "before": 0.5,
    "after": 1.0,
}


def _example(measures: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    start = {"device": "device-0", "round": 1, "attempt": 1, "leaving": False}
    base = "0123456789abcdef0123456789abcdef"
    return {**start, "measures": {**_MEASURES, **measures}, "update": update, "base": base}


EXAMPLES = (
    _example(
        {"personal": 0.5, "kept": 0.5, "scores": {"accuracy": 0.5}, "local_work": 0.5},
        {
            "patch": {
                "selection": {"type": "Entries", "active": ["?c", [61706], b""]},
                "values": ["lossless", [61706], b""],
            },
            "num_samples": 140,
            "loss": 0.5,
            "rate": 0.1,
        },
    ),
    _example(
        {"personal": None},
        {
            "patch": {"selection": {"type": "Everything"}, "values": ["sketch", [61706], b""]},
            "num_samples": 140,
        },
    ),
)
DICTIONARY = zstandard.ZstdCompressionDict(
    b"".join(map(msgspec.msgpack.encode, EXAMPLES)), dict_type=zstandard.DICT_TYPE_RAWCONTENT
)


class Opened(NamedTuple):
    """The body of a payload in compact form, found by reading the header.

    Attributes:
        packed: the body, compressed unless `plain` is True. A plain body may be read once, from a source.
        num_bytes: length of the uncompressed body.
        plain: True if the body is not compressed.
        dictionary: dictionary with which the body was compressed; None for none.
    """

    packed: memoryview | Source
    num_bytes: int
    plain: bool = False
    dictionary: zstandard.ZstdCompressionDict | None = None


def framed(parts: Sequence[Data], model_hash: str) -> bytes:
    """Return a payload: the header, and the compressed body after it."""
    packed = streamed(parts, ZSTD_LEVEL, 0, DICTIONARY).getvalue()
    return HEADER.pack(MAGIC, VERSION, bytes.fromhex(model_hash), _checksum(packed)) + packed


def is_compact(data: bytes) -> bool:
    """True if the data are a payload in compact form, or begin like one."""
    return data[:5] == MAGIC + bytes([VERSION])


def model_of(data: bytes) -> bytes:
    """Return the hash of the model to which a payload belongs. Raises PacketTruncated."""
    if len(data) < HEADER.size:
        raise PacketTruncated(f"payload of {len(data)} bytes, shorter than its header of {HEADER.size}")
    return bytes(HEADER.unpack_from(data)[2])


def opened(data: bytes) -> Opened:
    """Open the body of a payload in compact form. Raises PacketTruncated, PacketCorrupt."""
    model_of(data)
    packed = memoryview(data)[HEADER.size :]
    try:
        length = zstandard.get_frame_parameters(packed).content_size
    except zstandard.ZstdError as problem:
        raise PacketCorrupt(f"body does not unpack: {problem}") from None
    if length == zstandard.CONTENTSIZE_UNKNOWN:
        raise PacketCorrupt("the compressed body does not state its length")
    return Opened(packed, length, dictionary=DICTIONARY)


def is_damaged(data: bytes) -> bool:
    """True if the checksum does not match the body."""
    return bool(HEADER.unpack_from(data)[3] != _checksum(memoryview(data)[HEADER.size :]))


def _checksum(packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=4).digest()
