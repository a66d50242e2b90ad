"""Encoding `lossless`: every bit of every value, as the difference of its bit pattern to the reference's.

Bit patterns of float32 numbers of one sign are in the order of the numbers. So a small step of training is a
small difference of integers. In each chunk, entries are sorted by the number of bytes that their difference
takes. The leading bytes are unevenly distributed and are compressed. The bytes after them are noise and are
stored uncompressed.

This takes 3 to 10 % less than zstd on byte planes of the differences, where both kinds of bytes share zstd's
tables (`benchmarks/encodings.py`). An ideal coder that also knows an entry's tensor and the exponent of its
reference would gain another 1 % (LeNet-5 and cnn-kapc, conditional entropies). Bytes: docs/wire.md, *Chunks
and streams*.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.arrays import shuffled
from fleetune.protocols.update.encodings.chunks import (
    Bytes,
    Chunked,
    Reader,
    chunks,
    new_compressor,
    part_of,
    stream_of,
    tag_of,
    wanted_of,
    written_so_far,
)
from fleetune.protocols.update.encodings.encoding import Encoded, EncodingCost, Known

_BELOW_SIGN = 0x7FFFFFFF


class Lossless(Chunked):
    """Sends values unchanged; an earlier residual is added to them, and none remains.

    Without a reference, differences are taken to 0: then exponents compress, but sign and mantissa do not.
    """

    name = "lossless"
    leak = None
    cost = EncodingCost(bytes_per_value=4 * 0.46, encode_ns=20, decode_ns=16)
    lossless = True

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        compressor, out = new_compressor(), written_so_far(tag_of(known))
        for chunk in chunks(values.size):
            zigzag = _zigzag(wanted_of(values, residual, chunk), part_of(known.reference, chunk))
            out.writelines(_written(zigzag, compressor))
        return Encoded(out.getvalue())

    def read_chunk(
        self, reader: Reader, known: Known, chunk: slice, reference: FlatArray | None
    ) -> FlatArray:
        return _values(_read(reader, chunk.stop - chunk.start), reference)


def _ordered(values: FlatArray) -> NDArray[np.int32]:
    """Return integers in the order of the values: neighbouring float32 numbers differ by 1, 0.0 is 0, -0.0 is
    -1.
    """
    bits = values.view(np.int32)
    return bits ^ ((bits >> 31) & _BELOW_SIGN)


def _zigzag(values: FlatArray, reference: FlatArray | None) -> NDArray[np.uint32]:
    """Return zigzag-coded steps from reference to values, modulo 2^32: 0, -1, 1, -2, ... become 0, 1, 2, 3,
    ...
    """
    steps = _ordered(values)
    if reference is not None:
        steps -= _ordered(reference)
    sign = steps >> 31
    steps <<= 1
    steps ^= sign
    return steps.view(np.uint32)


def _values(zigzag: NDArray[np.uint32], reference: FlatArray | None) -> FlatArray:
    """Return values from zigzag-coded steps. Overwrites `zigzag`."""
    sign = (zigzag & 1).view(np.int32)
    np.negative(sign, out=sign)
    zigzag >>= 1
    steps = zigzag.view(np.int32)
    steps ^= sign
    if reference is not None:
        steps += _ordered(reference)
    return _ordered(steps.view(np.float32)).view(np.float32)


def _written(zigzag: NDArray[np.uint32], compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """Return the bytes of a chunk: classes (2 bits each, low bits first), leading bytes by class, other
    bytes.
    """
    classes: Bytes = (zigzag > 0).view(np.uint8) + (zigzag > 0xFF)
    classes += zigzag > 0xFFFF
    one, two, three = _starts(classes)
    low, second, third, high = _planes(zigzag[np.argsort(classes, kind="stable")])
    parts = stream_of(_packed(classes), compressor)
    for leading in (low[one:two], second[two:three], third[three:], high[three:]):
        parts += stream_of(leading, compressor)
    return [*parts, low[two:].tobytes(), second[three:].tobytes()]


def _read(reader: Reader, count: int) -> NDArray[np.uint32]:
    classes = _unpacked(reader.stream(-(-count // 4)))[:count]
    one, two, three = _starts(classes)
    planes = np.zeros((count, 4), np.uint8)
    for plane, start, stop in ((0, one, two), (1, two, three), (2, three, count), (3, three, count)):
        planes[start:stop, plane] = reader.stream(stop - start)
    planes[two:, 0] = reader.plane(count - two)
    planes[three:, 1] = reader.plane(count - three)
    zigzag = np.empty(count, np.uint32)
    zigzag[np.argsort(classes, kind="stable")] = planes.view("<u4").ravel()
    return zigzag


def _starts(classes: Bytes) -> tuple[int, int, int]:
    """Return where classes 1, 2 and 3 start among the entries sorted by class."""
    counts = np.cumsum(np.bincount(classes, minlength=4))
    return int(counts[0]), int(counts[1]), int(counts[2])


def _planes(numbers: NDArray[np.uint32]) -> Bytes:
    return np.frombuffer(shuffled(numbers.astype("<u4", copy=False)), np.uint8).reshape(4, -1)


def _packed(classes: Bytes) -> Bytes:
    padded = np.zeros((-(-classes.size // 4), 4), np.uint8)
    padded.reshape(-1)[: classes.size] = classes
    packed = np.zeros(len(padded), np.uint8)
    for place in range(4):
        packed |= np.left_shift(padded[:, place], 2 * place)
    return packed


def _unpacked(packed: Bytes) -> Bytes:
    classes = np.empty((packed.size, 4), np.uint8)
    for place in range(4):
        np.bitwise_and(packed >> (2 * place), 3, out=classes[:, place])
    return classes.reshape(-1)
