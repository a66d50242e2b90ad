"""Differences to the base as small integers, each block of them with a scale of its own.

A block is at most 64 neighbours of one tensor and one chunk. Its scale is its largest difference over the
largest integer, but at least `floor` times the root mean square of all differences: a block of small ones
deserves no finer steps than the others, and its integers then compress. Measured on LeNet-5's and cnn-kapc's
updates, the floor takes off 20 % (int8) and 30 % (int4) of the bytes for a tenth more error, and blocks of
64 with it have fewer bytes and less error than blocks of 256 without (`benchmarks/encodings.py`).

Integers are the nearest ones: what that loses is in the residual, and comes along the next time, which
random rounding would achieve with more error each time.
"""

from abc import abstractmethod
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import (
    Bytes,
    Chunked,
    Reader,
    chunks,
    difference,
    new_compressor,
    part_of,
    stream_of,
    tag_of,
    wanted_of,
    with_base,
    written_so_far,
)
from fleetune.protocols.update.encodings.encoding import Encoded, Known

BLOCK = 64

Integers = NDArray[np.int8]
Starts = NDArray[np.int64]


class Blockwise(Chunked):
    """Integers with a scale a block. What they lose is left in the residual.

    Attributes:
        floor: of a block's scale, in root mean squares of all differences; 0: none.
    """

    largest: ClassVar[int]  # of the integers, and of their opposites
    lossless = False
    floor: float

    @abstractmethod
    def packed(self, integers: Integers) -> Bytes:
        """Bytes that compress well, `num_bytes` of them."""

    @abstractmethod
    def unpacked(self, data: Bytes, count: int) -> Integers:
        """What `packed` was given, shape (count,)."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Of so many integers, not compressed."""

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        compressor, out = new_compressor(), written_so_far(tag_of(known))
        least = self.floor * _root_mean_square(values, known, residual)
        left = np.empty(values.size, np.float32)
        for chunk in chunks(values.size):
            wanted, base = wanted_of(values, residual, chunk), part_of(known.base, chunk)
            differences, starts = difference(wanted, base), _starts(known, chunk)
            scales = _scales(np.maximum.reduceat(np.abs(differences), starts), self.largest, least)
            spread = _spread(scales, starts, differences.size)
            integers = _nearest(differences, spread)
            out.writelines(stream_of((scales.view(np.uint32) >> 16).astype("<u2"), compressor))
            out.writelines(stream_of(self.packed(integers), compressor))
            left[chunk] = difference(wanted, _values(spread, integers, base))
        return Encoded(out.getvalue(), left)

    def read_chunk(self, reader: Reader, known: Known, chunk: slice, base: FlatArray | None) -> FlatArray:
        length, starts = chunk.stop - chunk.start, _starts(known, chunk)
        halves = reader.stream(2 * starts.size).view("<u2")
        scales = (halves.astype(np.uint32) << 16).view(np.float32)
        integers = self.unpacked(reader.stream(self.num_bytes(length)), length)
        return _values(_spread(scales, starts, length), integers, base)


def _starts(known: Known, chunk: slice) -> Starts:
    """Where each block of a chunk begins, counted from the chunk's own beginning."""
    bounds = [0, *known.beginnings(chunk), chunk.stop - chunk.start]
    return np.concatenate([np.arange(a, b, BLOCK) for a, b in pairwise(bounds)])


def _root_mean_square(values: FlatArray, known: Known, residual: FlatArray | None) -> float:
    """Of all differences."""
    total = 0.0
    for chunk in chunks(values.size):
        apart = difference(wanted_of(values, residual, chunk), part_of(known.base, chunk))
        total += float(np.square(apart, dtype=np.float64).sum())
    return float(np.sqrt(total / max(1, values.size)))


def _scales(highest: FlatArray, largest: int, least: float) -> FlatArray:
    """Of blocks with this highest absolute difference: float32 of which the low 16 bits are 0."""
    scales: FlatArray = np.maximum(highest / np.float32(largest), np.float32(least))
    scales[highest == 0] = 0
    bits = scales.view(np.uint32)
    bits += 0xFFFF  # upwards: nothing saturates
    bits &= 0xFFFF0000
    return scales


def _spread(scales: FlatArray, starts: Starts, length: int) -> FlatArray:
    """Each entry's scale."""
    return np.repeat(scales, np.diff(starts, append=length))


def _nearest(differences: FlatArray, scales: FlatArray) -> Integers:
    steps = np.divide(differences, scales, out=np.zeros_like(differences), where=scales > 0)
    return np.rint(steps, out=steps).astype(np.int8)


def _values(scales: FlatArray, integers: Integers, base: FlatArray | None) -> FlatArray:
    """The values that come out; `scales` is not needed any more."""
    with np.errstate(over="ignore", invalid="ignore"):
        scales *= integers
    return with_base(scales, base)
