"""The body of a payload as it is put together: MessagePack with arrays set in, then compressed.

An array's bytes are made where they go, not before, so that a body takes its own length and little else.
"""

import secrets
from collections.abc import Sequence
from io import BytesIO

import zstandard
from msgspec.msgpack import Ext

from fleetune.protocols.update.arrays import Array, num_array_bytes, write_array
from fleetune.protocols.update.elements import PLACE

Data = bytes | memoryview | Array  # of the body, as it is or, of an array, as it will be
_PIECE = 2**20  # bytes that are compressed at a time


class BodyWriter:
    """Holds the data of arrays while what is around them is encoded."""

    def __init__(self) -> None:
        self._mark = secrets.token_bytes(12)  # nobody can have put it into a message
        self._held: list[Data] = []

    def hold(self, name: str, shape: list[int], data: Data) -> tuple[str, list[int], Ext]:
        """An array as it travels, but for its data."""
        self._held.append(data)
        return name, shape, Ext(PLACE, self._mark + (len(self._held) - 1).to_bytes(4, "big"))

    def parts(self, around: bytes) -> list[Data]:
        """The body, part by part: what was encoded, with the data of each array in its place."""
        parts, whole, at = list[Data](), memoryview(around), 0
        for index, data in enumerate(self._held):
            mark = bytes([0xD8, PLACE]) + self._mark + index.to_bytes(4, "big")
            place = around.index(mark, at)
            parts += [whole[at:place], _head(num_bytes(data)), data]
            at = place + len(mark)
        return [*parts, whole[at:]]


def num_bytes(data: Data) -> int:
    """How long it is in the body."""
    return len(data) if isinstance(data, bytes | memoryview) else num_array_bytes(data)


def joined(parts: Sequence[Data]) -> bytearray:
    """All parts, as they are."""
    body = bytearray(sum(map(num_bytes, parts)))
    at = 0
    with memoryview(body) as whole:
        for part in parts:
            _write(part, whole[at : at + num_bytes(part)])
            at += num_bytes(part)
    return body


def compressed(parts: Sequence[Data], level: int, blank: int) -> BytesIO:
    """A zstd frame of all parts, made in one piece, behind `blank` zero bytes."""
    body = joined(parts)
    packed = zstandard.ZstdCompressor(level=level).compress(body)
    del body  # a whole model may be in it, and the next line makes a copy of what is packed
    packet = BytesIO(bytes(blank))
    packet.seek(blank)
    packet.write(packed)
    return packet


def streamed(
    parts: Sequence[Data], level: int, blank: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> BytesIO:
    """A zstd frame of all parts, one after another, behind `blank` zero bytes."""
    packet = BytesIO(bytes(blank))
    packet.seek(blank)
    made = zstandard.ZstdCompressor(level=level, dict_data=dictionary)
    compressor = made.compressobj(size=sum(map(num_bytes, parts)))
    for part in parts:
        if isinstance(part, bytes | memoryview):
            data = memoryview(part)
        else:
            data = memoryview(bytearray(num_bytes(part)))
            _write(part, data)
        for start in range(0, len(data), _PIECE):
            packet.write(compressor.compress(data[start : start + _PIECE]))
    packet.write(compressor.flush())
    return packet


def _write(part: Data, out: memoryview) -> None:
    if isinstance(part, bytes | memoryview):
        out[:] = part
    else:
        write_array(part, out)


def _head(length: int) -> bytes:
    """What stands before so many bytes in MessagePack."""
    for code, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4)):
        if length < 1 << 8 * width:
            return bytes([code]) + length.to_bytes(width, "big")
    raise ValueError(f"{length} bytes in one array; MessagePack has room for 4 GiB")
