"""Writes differences to the reference as small integers, with one scale for each block.

A block holds at most 64 neighbouring entries of one tensor and one chunk. Its scale is its largest difference
divided by the largest integer. The scale is at least `floor` times the root mean square of all differences.
So a block of small differences gets no finer steps than other blocks, and its integers compress well.
Measured on updates of LeNet-5 and cnn-kapc (`benchmarks/encodings.py`): the floor saves 20 % (int8) and 30 %
(int4) of the bytes for a tenth more error. Blocks of 64 with the floor have fewer bytes and less error than
blocks of 256 without it.

Differences are rounded to the nearest integer. The residual keeps the rounding error for the next update.
Random rounding would also be right on average, but with more error in each update.
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
    with_reference,
    written_so_far,
)
from fleetune.protocols.update.encodings.encoding import Encoded, Known

BLOCK = 64

Integers = NDArray[np.int8]
Starts = NDArray[np.int64]


class Blockwise(Chunked):
    """Integers with one scale for each block. The residual keeps the rounding error.

    Attributes:
        floor: least scale of a block, in root mean squares of all differences; 0 for no least scale.
    """

    largest: ClassVar[int]  # the largest integer; the smallest is its negative
    lossless = False
    floor: float

    @abstractmethod
    def packed(self, integers: Integers) -> Bytes:
        """Pack integers into `num_bytes` bytes that compress well."""

    @abstractmethod
    def unpacked(self, data: Bytes, count: int) -> Integers:
        """Unpack the integers that `packed` wrote, shape (count,)."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return the number of bytes that `count` integers take before compression."""

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        compressor, out = new_compressor(), written_so_far(tag_of(known))
        least = self.floor * _root_mean_square(values, known, residual)
        left = np.empty(values.size, np.float32)
        for chunk in chunks(values.size):
            wanted, reference = wanted_of(values, residual, chunk), part_of(known.reference, chunk)
            differences, starts = difference(wanted, reference), _starts(known, chunk)
            scales = _scales(np.maximum.reduceat(np.abs(differences), starts), self.largest, least)
            spread = _spread(scales, starts, differences.size)
            integers = _nearest(differences, spread)
            out.writelines(stream_of((scales.view(np.uint32) >> 16).astype("<u2"), compressor))
            out.writelines(stream_of(self.packed(integers), compressor))
            left[chunk] = difference(wanted, _values(spread, integers, reference))
        return Encoded(out.getvalue(), left)

    def read_chunk(
        self, reader: Reader, known: Known, chunk: slice, reference: FlatArray | None
    ) -> FlatArray:
        length, starts = chunk.stop - chunk.start, _starts(known, chunk)
        halves = reader.stream(2 * starts.size).view("<u2")
        scales = (halves.astype(np.uint32) << 16).view(np.float32)
        integers = self.unpacked(reader.stream(self.num_bytes(length)), length)
        return _values(_spread(scales, starts, length), integers, reference)


def _starts(known: Known, chunk: slice) -> Starts:
    """Return the start of each block, counted from the start of the chunk."""
    bounds = [0, *known.beginnings(chunk), chunk.stop - chunk.start]
    return np.concatenate([np.arange(a, b, BLOCK) for a, b in pairwise(bounds)])


def _root_mean_square(values: FlatArray, known: Known, residual: FlatArray | None) -> float:
    """Return the root mean square of all differences to the reference."""
    total = 0.0
    for chunk in chunks(values.size):
        apart = difference(wanted_of(values, residual, chunk), part_of(known.reference, chunk))
        total += float(np.square(apart, dtype=np.float64).sum())
    return float(np.sqrt(total / max(1, values.size)))


def _scales(highest: FlatArray, largest: int, least: float) -> FlatArray:
    """Return each block's scale from its largest absolute difference: float32 with the low 16 bits 0."""
    scales: FlatArray = np.maximum(highest / np.float32(largest), np.float32(least))
    scales[highest == 0] = 0
    bits = scales.view(np.uint32)
    bits += 0xFFFF  # round up, so that no integer saturates
    bits &= 0xFFFF0000
    return scales


def _spread(scales: FlatArray, starts: Starts, length: int) -> FlatArray:
    """Return the scale of each entry, from the scales of the blocks."""
    return np.repeat(scales, np.diff(starts, append=length))


def _nearest(differences: FlatArray, scales: FlatArray) -> Integers:
    steps = np.divide(differences, scales, out=np.zeros_like(differences), where=scales > 0)
    return np.rint(steps, out=steps).astype(np.int8)


def _values(scales: FlatArray, integers: Integers, reference: FlatArray | None) -> FlatArray:
    """Return values from integers, scales and reference. Overwrites `scales`."""
    with np.errstate(over="ignore", invalid="ignore"):
        scales *= integers
    return with_reference(scales, reference)
