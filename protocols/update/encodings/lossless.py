"""Every bit of every value, as the difference of the bit patterns to those of the base.

Float32 numbers of one sign are in the order of their bit patterns, so that a small step of training is a
small difference of integers. Of a chunk, entries are sorted by how many bytes their difference takes; the
leading bytes, which are not all as likely, are compressed, and the bytes behind them, which are noise, are
stored. That is 3 to 10 % less than byte planes of the differences under zstd, whose tables would be shared
by bytes of both kinds (measured by `benchmarks/encodings.py`). Knowing an entry's tensor and the base's
exponent besides would gain another 1 % in an ideal coder (LeNet-5 and cnn-kapc, conditional entropies).
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.byte_planes import shuffled
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
    """The values as they are. Adds a residual where there is one, and leaves none.

    Without a base, the difference is to 0: sign and mantissa are noise, the exponents compress.
    """

    name = "lossless"
    cost = EncodingCost(bytes_per_value=4 * 0.46, encode_ns=20, decode_ns=16)
    lossless = True

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        compressor, out = new_compressor(), written_so_far(tag_of(known))
        for chunk in chunks(values.size):
            zigzag = _zigzag(wanted_of(values, residual, chunk), part_of(known.base, chunk))
            out.writelines(_written(zigzag, compressor))
        return Encoded(out.getvalue())

    def read_chunk(self, reader: Reader, known: Known, chunk: slice, base: FlatArray | None) -> FlatArray:
        return _values(_read(reader, chunk.stop - chunk.start), base)


def _ordered(values: FlatArray) -> NDArray[np.int32]:
    """Integers in the order of the values, neighbours one apart; 0.0 is 0, -0.0 is -1."""
    bits = values.view(np.int32)
    return bits ^ ((bits >> 31) & _BELOW_SIGN)


def _zigzag(values: FlatArray, base: FlatArray | None) -> NDArray[np.uint32]:
    """Steps from base to values modulo 2^32: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    steps = _ordered(values)
    if base is not None:
        steps -= _ordered(base)
    sign = steps >> 31
    steps <<= 1
    steps ^= sign
    return steps.view(np.uint32)


def _values(zigzag: NDArray[np.uint32], base: FlatArray | None) -> FlatArray:
    """The values back; `zigzag` is not needed any more."""
    sign = (zigzag & 1).view(np.int32)
    np.negative(sign, out=sign)
    zigzag >>= 1
    steps = zigzag.view(np.int32)
    steps ^= sign
    if base is not None:
        steps += _ordered(base)
    return _ordered(steps.view(np.float32)).view(np.float32)


def _written(zigzag: NDArray[np.uint32], compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """Classes (2 bits each, the first lowest), leading bytes by class, then the bytes behind them."""
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
    """Where classes 1, 2 and 3 begin when they are sorted."""
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
