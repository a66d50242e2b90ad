"""Differences to the reference as float16, scaled so that a chunk's largest exceeds 2^14."""

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import (
    Chunked,
    Reader,
    chunks,
    difference,
    new_compressor,
    part_of,
    stream_of,
    tag_of,
    wanted_of,
    with_reference,
    written_so_far,
)
from fleetune.protocols.update.encodings.encoding import Encoded, EncodingCost, Known

_LEAST_SHIFT, _MOST_SHIFT = -113, 126  # for these shifts, 2^shift and 2^-shift are normal float32 numbers


class Float16(Chunked):
    """11 bits of each difference. The residual keeps the rounding error.

    The power of two fits float16's narrow range to each chunk, so nothing overflows. Differences below 2^-29
    of the largest keep fewer bits. Differences below about 2^-31 of it become 0.
    """

    name = "fp16"
    cost = EncodingCost(4 * 0.32, encode_ns=15, decode_ns=10, held_bytes=8, relative_error=0.0002)
    lossless = False

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        compressor, out = new_compressor(), written_so_far(tag_of(known))
        left = np.empty(values.size, np.float32)
        for chunk in chunks(values.size):
            wanted, reference = wanted_of(values, residual, chunk), part_of(known.reference, chunk)
            halves, shift = _halves(difference(wanted, reference))
            out.writelines(_written(halves, shift, compressor))
            left[chunk] = difference(wanted, with_reference(_scaled(halves, shift), reference))
        return Encoded(out.getvalue(), left)

    def read_chunk(
        self, reader: Reader, known: Known, chunk: slice, reference: FlatArray | None
    ) -> FlatArray:
        halves, shift = _read(reader, chunk.stop - chunk.start)
        return with_reference(_scaled(halves, shift), reference)


def _halves(differences: FlatArray) -> tuple[NDArray[np.uint16], int]:
    """Bits of 2^shift times the differences as float16, with 0 for the tiniest, and the shift."""
    _, exponent = np.frexp(np.abs(differences).max())
    shift = int(np.clip(15 - exponent, _LEAST_SHIFT, _MOST_SHIFT))
    halves = (differences * np.float32(2.0**shift)).astype(np.float16).view(np.uint16)
    halves[halves & 0x7F00 == 0] = 0
    return halves, shift


def _scaled(halves: NDArray[np.uint16], shift: int) -> FlatArray:
    with np.errstate(over="ignore", invalid="ignore"):
        return halves.view(np.float16).astype(np.float32) * np.float32(2.0**-shift)


def _written(halves: NDArray[np.uint16], shift: int, compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """The shift (1 byte, signed), the high bytes, and the low bytes of numbers whose high byte is not 0."""
    high = (halves >> 8).astype(np.uint8)
    low = halves[high != 0].astype(np.uint8)
    return [
        shift.to_bytes(1, "little", signed=True),
        *stream_of(high, compressor),
        *stream_of(low, compressor),
    ]


def _read(reader: Reader, count: int) -> tuple[NDArray[np.uint16], int]:
    shift = int.from_bytes(reader.take(1), "little", signed=True)
    if not _LEAST_SHIFT <= shift <= _MOST_SHIFT:
        raise PacketCorrupt(f"float16 values scaled by 2^{shift}; {_LEAST_SHIFT} to {_MOST_SHIFT} are known")
    high = reader.stream(count)
    halves = high.astype(np.uint16)
    halves <<= 8
    filled = np.flatnonzero(high)
    halves[filled] |= reader.stream(filled.size)
    return halves, shift
