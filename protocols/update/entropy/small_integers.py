"""Integers of which most are small, entropy-coded by how large each is expected to be.

An integer is a chain of answers: is it 0, is it more than 1, than 2, and so on; then its sign. How likely an
answer is has been learned from those before it where about as much was expected. Whole numbers only, so that
every machine has the same chances. Bytes: docs/wire.md, `lowrank`.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.entropy.flag_levels import MOST
from fleetune.protocols.update.entropy.flags import read_flags, write_flags
from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

LARGEST = (1 << 14) - 1
_CHAIN = 15  # answers; what is larger is written as a number
_KINDS = 4  # of answers: the first three, and all others
_LEAST_SQUARE, _NUM_EXPECTED = -8, 24  # octaves of the mean square that tell integers apart
_BELIEVED = 8  # answers that what is expected at first counts for
# quarter octaves of the odds of "yes" at first, by the expected square: of Laplace's distribution
_NOT_ZERO = (-36, -36, -36, -28, -19, -13, -9, -5, -2, 1, 4, 6, 8, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
_MORE = (-16, -16, -16, -16, -16, -16, -16, -11, -7, -3, 0, 2, 5, 7, 9, 12, 14, 16, 18, 20, 22, 24, 24, 24)
_POWERS = (16384, 19484, 23170, 27554)  # 2^14 * 2^(k / 4)


def expected_level(square: Ints) -> Ints:
    """How integers are told apart, by 4 log2 of their expected squares; shape as given."""
    levels: Ints = np.clip((square // PER_OCTAVE) - _LEAST_SQUARE, 0, _NUM_EXPECTED - 1)
    return levels


@dataclass
class _Chances:
    """How often each kind of answer was yes, and how often no, by what was expected, in 1/64."""

    yes: Ints = field(init=False)
    no: Ints = field(init=False)

    def __post_init__(self) -> None:
        odds = np.array([_NOT_ZERO, *[_MORE] * (_KINDS - 1)])
        whole, quarters = odds // PER_OCTAVE, odds % PER_OCTAVE
        ratio = np.array(_POWERS)[quarters] << np.maximum(whole, 0) >> np.maximum(-whole, 0)
        self.yes = 64 * _BELIEVED * ratio // (ratio + _POWERS[0]) + 1
        self.no = 64 * _BELIEVED + 2 - self.yes

    def levels(self, kind: int, expected: Ints) -> Ints:
        """Of answers of one kind, by what was expected of each, shape (n,)."""
        levels: Ints = quarter_octaves(self.yes[kind]) - quarter_octaves(self.no[kind])
        return np.clip(levels, -MOST, MOST)[expected]

    def add(self, kind: int, expected: Ints, answers: NDArray[np.bool_]) -> None:
        self.yes[kind] += 64 * np.bincount(expected[answers], minlength=_NUM_EXPECTED)
        self.no[kind] += 64 * np.bincount(expected[~answers], minlength=_NUM_EXPECTED)


class IntegerWriter:
    """Writes batches of integers; what came before tells how likely the next are."""

    def __init__(self, out: RangeEncoder) -> None:
        self._out, self._chances = out, _Chances()

    def write(self, integers: Ints, square: Ints) -> None:
        """Write integers from -LARGEST to LARGEST.

        Args:
            integers: shape (n,).
            square: 4 log2 of their expected squares, same shape.
        """
        expected, sizes = expected_level(square), np.abs(integers)
        for answer in range(_CHAIN):
            yes = sizes > answer
            kind = min(answer, _KINDS - 1)
            write_flags(self._out, yes, self._chances.levels(kind, expected))
            self._chances.add(kind, expected, yes)
            sizes, expected = sizes[yes], expected[yes]
            if not sizes.size:
                break
        for size in sizes.tolist():
            self._out.write_number(size - _CHAIN, LARGEST.bit_length() + 1)
        negative = integers[integers != 0] < 0
        write_flags(self._out, negative, np.zeros(negative.size, np.int64))


class IntegerReader:
    """Reads what `IntegerWriter` wrote."""

    def __init__(self, data: RangeDecoder) -> None:
        self._data, self._chances = data, _Chances()

    def read(self, square: Ints) -> Ints:
        """So many integers, of these expected squares, int16. Raises PacketCorrupt, PacketTruncated."""
        expected = expected_level(square)
        integers, members = np.zeros(square.size, np.int64), np.arange(square.size)
        for answer in range(_CHAIN):
            kind = min(answer, _KINDS - 1)
            yes = read_flags(self._data, self._chances.levels(kind, expected))
            self._chances.add(kind, expected, yes)
            members, expected = members[yes], expected[yes]
            integers[members] += 1
            if not members.size:
                break
        larger = [self._data.read_number(LARGEST.bit_length() + 1) for _ in range(members.size)]
        integers[members] += np.array(larger, np.int64)
        if integers.max(initial=0) > LARGEST:
            raise PacketCorrupt("an integer beyond all that are written")
        nonzero = np.flatnonzero(integers)
        negative = read_flags(self._data, np.zeros(nonzero.size, np.int64))
        integers[nonzero[negative]] *= -1
        return integers.astype(np.int16)
