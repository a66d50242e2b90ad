"""Assembles the body of a payload: MessagePack that contains arrays, then compressed.

The bytes of an array are written directly to their position, so that a body needs little more memory than its
length.
"""

import secrets
from collections.abc import Iterator, Sequence
from io import BytesIO

import numpy as np
import zstandard
from msgspec.msgpack import Ext

from fleetune.protocols.update.arrays import Array, iter_pieces, num_array_bytes, write_array
from fleetune.protocols.update.elements import PLACE

# a part of the body: bytes, or an array that becomes bytes when it is written
Data = bytes | memoryview | Array
_PIECE = 2**20  # bytes that are compressed at a time


class BodyWriter:
    """Holds the data of arrays while the message around them is encoded."""

    def __init__(self) -> None:
        self._mark = secrets.token_bytes(12)  # random, so that no message can contain it
        self._held: list[Data] = []

    def hold(self, name: str, shape: list[int], data: Data) -> tuple[str, list[int], Ext]:
        """Store the data of an array, and return the array's [name, shape, placeholder] for the message."""
        return name, shape, self.hold_bytes(data)

    def hold_bytes(self, data: Data) -> Ext:
        """Store bytes, and return their placeholder for the message."""
        self._held.append(data)
        return Ext(PLACE, self._mark + (len(self._held) - 1).to_bytes(4, "big"))

    def parts(self, around: bytes) -> list[Data]:
        """Return the parts of the body in order: the encoded message, with arrays' data instead of
        placeholders.
        """
        parts, whole, at = list[Data](), memoryview(around), 0
        for index, data in enumerate(self._held):
            mark = bytes([0xD8, PLACE]) + self._mark + index.to_bytes(4, "big")
            place = around.index(mark, at)
            parts += [whole[at:place], _head(num_bytes(data)), data]
            at = place + len(mark)
        return [*parts, whole[at:]]


def num_bytes(data: Data) -> int:
    """Return the number of bytes of a part."""
    return len(data) if isinstance(data, bytes | memoryview) else num_array_bytes(data)


def joined(parts: Sequence[Data]) -> bytearray:
    """Return the parts one after the other, uncompressed."""
    body = bytearray(sum(map(num_bytes, parts)))
    at = 0
    with memoryview(body) as whole:
        for part in parts:
            _write(part, whole[at : at + num_bytes(part)])
            at += num_bytes(part)
    return body


def compressed(parts: Sequence[Data], level: int, blank: int) -> BytesIO:
    """Return a zstd frame of all parts, compressed in one call, after `blank` zero bytes."""
    body = joined(parts)
    packed = zstandard.ZstdCompressor(level=level).compress(body)
    del body  # free up to a whole model before the next lines copy the compressed bytes
    packet = BytesIO(bytes(blank))
    packet.seek(blank)
    packet.write(packed)
    return packet


def streamed(
    parts: Sequence[Data], level: int, blank: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> BytesIO:
    """Return a zstd frame of all parts, compressed one part at a time, after `blank` zero bytes."""
    packet = BytesIO(bytes(blank))
    packet.seek(blank)
    for piece in frame_pieces(parts, level, dictionary):
        packet.write(piece)
    return packet


def frame_pieces(
    parts: Sequence[Data], level: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a zstd frame of all parts; only a megabyte of an array is copied at a time."""
    made = zstandard.ZstdCompressor(level=level, dict_data=dictionary)
    compressor = made.compressobj(size=sum(map(num_bytes, parts)))
    for part in parts:
        pieces = iter_pieces(part) if isinstance(part, np.ndarray) else _slices(memoryview(part))
        for piece in pieces:
            yield compressor.compress(piece)
    yield compressor.flush()


def _slices(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))


def _write(part: Data, out: memoryview) -> None:
    if isinstance(part, bytes | memoryview):
        out[:] = part
    else:
        write_array(part, out)


def _head(length: int) -> bytes:
    """Return the MessagePack header of `length` bytes of binary data."""
    for code, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4)):
        if length < 1 << 8 * width:
            return bytes([code]) + length.to_bytes(width, "big")
    raise ValueError(f"an array of {length} bytes is too long; MessagePack allows less than 4 GiB")
