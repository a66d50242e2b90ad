"""Encoding `peaks`: changes by the peaks of their random sums; noisy in one update, right in the mean of
many.

All changes are added up with random signs and rotated (`random_sums.py`). The resulting sums look like draws
of one normal distribution, whatever changed. Of each group of 2^g sums, the place and the sign of the largest
magnitude are sent: g + 1 bits. The reader gives all peaks one height and rotates them back. The mean over
seeds is the true change, so the device keeps no residual.

A bit is worth most if it stands for many sums. Let m(n) be the mean height of the peak among n normal
numbers. The squared error of one update is the square of the change times entries / (groups m(2^g)^2). So a
bit is worth m^2 / (g + 1). That is 0.64 for a sign alone, which `sketch` and EDEN below one bit send
(Vargaftik et al. 2022, arXiv:2108.08842), and 1.09 for g = 10. No code exceeds 2 ln 2 = 1.39, by the
rate-distortion function of normal numbers at few bits.

The mean is right for the same reason as in EDEN. Rotation and signs are drawn anew for each update. The scale
is the one for which the decoded change is unbiased.

Bytes: docs/wire.md, `peaks`.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import (
    AS_THEY_ARE,
    LARGEST,
    check_length,
    difference,
    part_of,
    read_whole,
    wanted_of,
    whole,
)
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.random_sums import added_up, entries_of, new_seed, rotate

_NOTHING, _GROUPS_OF = 1, 2  # values of the first byte; from 2 on it is g + 2
_HEAD_BYTES = 5  # first byte, seed and scale
_FRAME_BYTES = 16  # the head, and the frame of the payload's compression, which does not shrink random bits
_LARGEST_GROUP_LOG = 10  # larger groups gain 3 % at most, and need four times as many sums
_HEIGHTS = (0.798, 1.128, 1.465, 1.778, 2.076, 2.346, 2.595, 2.828, 3.046, 3.254, 3.453)
"""m(2^g): mean of the largest magnitude among 2^g standard normal numbers, from 4 million draws."""
_FEWEST_BITS = 128  # least bits of an update: with fewer, the head would be the larger part
_LARGE = 1 << 18  # entries


@dataclass(frozen=True)
class Peaks(Encoding):
    """Writes places and signs of the largest random sums of differences to the reference.

    Attributes:
        bits: bits for each entry, above 0 and at most 1.
    """

    bits: float = 0.02

    name = "peaks"
    leak = "it sends the places of the largest sums, which follow from the device's data"
    lossless = False
    on_average = True

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 1:
            raise SettingError(f"encoding peaks: bits = {self.bits} must be above 0 and at most 1")

    @property
    def cost(self) -> EncodingCost:
        log = _LARGEST_GROUP_LOG
        return EncodingCost(
            bytes_per_value=self.bits / 8,
            encode_ns=22,
            decode_ns=12,
            relative_error=math.sqrt((log + 1) / self.bits) / _HEIGHTS[log],
        )

    def size(self, num_values: int) -> int:
        return max(_FEWEST_BITS // 8, int(self.bits / 8 * num_values)) + _FRAME_BYTES if num_values else 0

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        reference = known.reference
        if reference is None or not values.size:
            return whole(values, residual)

        def changed(chunk: slice) -> FlatArray:
            return difference(wanted_of(values, residual, chunk), part_of(reference, chunk))

        seed, groups = new_seed(key), _fitting(values.size, self.bits)
        sums = added_up(changed, values.size, groups.num_sums, seed)
        square = float(np.square(sums).sum())
        rotate(sums)
        grouped = sums[: groups.count << groups.log].reshape(groups.count, -1)
        places = np.abs(grouped).argmax(1)
        peaks = grouped[np.arange(groups.count), places]
        scale = _upper_half(square / (float(np.abs(peaks).sum()) or 1.0))
        if scale == 0:
            return Encoded(bytes([_NOTHING]))
        largest = float(np.abs(reference).max()) + float(np.abs(values).max())
        if largest + float(scale) * groups.count >= float(LARGEST):
            return whole(values, residual)
        return Encoded(_written(groups.log, seed, scale, places, peaks > 0))

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        first = data[0] if data else -1
        if first == AS_THEY_ARE:
            return read_whole(data, count)
        if not _NOTHING <= first <= _GROUPS_OF + _LARGEST_GROUP_LOG:
            raise PacketCorrupt(f"peaks of {len(data)} bytes begin with {data[:1]!r}")
        if known.reference is None:
            raise PacketCorrupt("the peaks are differences to a reference model that this side does not have")
        values = known.start(count)
        if first == _NOTHING:
            check_length(data, 1)
            return values
        seed, sums = _read(data, first - _GROUPS_OF, count)
        with np.errstate(over="ignore", invalid="ignore"):
            for chunk, grouped in entries_of(sums, count, seed):
                values[chunk] += grouped
        return values


@dataclass(frozen=True)
class _Groups:
    """Groups of sums: `count` groups, each of 2^`log` sums."""

    count: int
    log: int

    @property
    def num_sums(self) -> int:
        """Number of sums: the smallest power of two that holds all groups."""
        return 1 << ((self.count << self.log) - 1).bit_length()


def _room(count: int) -> int:
    """Return the largest number of sums for `count` entries.

    It is at most one sum an entry; more would repeat sums. For large models it is a quarter, so that the sums
    take little memory compared with the entries.
    """
    return _power_below(count if count < _LARGE else max(_LARGE, count // 4))


def _power_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def _fitting(count: int, bits: float) -> _Groups:
    """Return the largest groups that fit into the allowed sums and the bits, in whole bytes."""
    num_bytes = -(-min(count, max(_FEWEST_BITS, round(count * bits))) // 8)
    for log in range(_LARGEST_GROUP_LOG, 0, -1):
        groups = _Groups(8 * num_bytes // (log + 1), log)
        if groups.count and groups.num_sums <= _room(count):
            return groups
    return _Groups(8 * num_bytes, 0)


def _upper_half(scale: float) -> np.float32:
    """Return the nearest finite float32 whose lower 16 bits are 0."""
    bits = int(np.float32(min(scale, float(LARGEST))).view(np.uint32))
    return np.uint32(min((bits + 0x8000) >> 16, 0x7F7F) << 16).view(np.float32)


def _written(
    log: int, seed: int, scale: np.float32, places: NDArray[np.intp], above: NDArray[np.bool_]
) -> bytes:
    numbers = (places << 1 | above).astype(np.uint16)
    bits = (numbers[:, None] >> np.arange(log, -1, -1, dtype=np.uint16)) & 1
    head = bytes([_GROUPS_OF + log]) + struct.pack("<Hf", seed, scale)
    return head[:3] + head[5:] + np.packbits(bits.astype(np.bool_)).tobytes()


def _read(data: bytes, log: int, count: int) -> tuple[int, FlatArray]:
    """Read the seed and the sums, shape (m,), m a power of two."""
    width = log + 1
    groups = _Groups(8 * (len(data) - _HEAD_BYTES) // width, log)
    if groups.count < 1 or len(data) != _HEAD_BYTES + -(-groups.count * width // 8):
        raise PacketCorrupt(f"peaks of {len(data)} bytes end in the middle of a group")
    if groups.num_sums > 2 * _power_below(count + 7):
        raise PacketCorrupt(f"peaks announce {groups.num_sums} sums, too many for {count} values")
    scale = np.frombuffer(b"\0\0" + data[3:_HEAD_BYTES], "<f4")[0]
    if not 0 < scale < math.inf:
        raise PacketCorrupt(f"peaks with the invalid scale {scale}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=_HEAD_BYTES), count=groups.count * width)
    numbers = bits.reshape(-1, width) @ (1 << np.arange(log, -1, -1, dtype=np.int32))
    sums = np.zeros(groups.num_sums, np.float32)
    sums[(np.arange(groups.count, dtype=np.int32) << log) + (numbers >> 1)] = (numbers & 1) * 2 - 1
    rotate(sums)  # exact: whole numbers below 2^24
    with np.errstate(over="ignore"):
        return int.from_bytes(data[1:3], "little"), sums * scale
