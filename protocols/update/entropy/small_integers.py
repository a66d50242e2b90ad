"""Entropy coding of integers that are mostly small, from a prediction of each integer's square.

An integer is written as a chain of answers: is its magnitude more than 0, more than 1, and so on; then its
sign. The probability of an answer is learned from earlier answers with a similar prediction. All arithmetic
uses whole numbers, so that every machine has the same probabilities. Bytes: docs/wire.md, `lowrank`,
*Numbers*.
"""

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.entropy.booleans import LEVELS, MOST, read_booleans, symbols_of
from fleetune.protocols.update.entropy.octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder, Symbols, write_symbols

LARGEST = (1 << 14) - 1
_CHAIN = 15  # answers at most; larger magnitudes are then written as a number
_KINDS = 4  # kinds of answers: the first, the second, the third, and all others
# least octave of the predicted mean square, and number of classes by octave
_LEAST_SQUARE, _NUM_EXPECTED = -8, 24
_BELIEVED = 8  # answers that the initial probabilities count for
# initial odds of "yes" in quarter octaves, by class, from Laplace's distribution
_NOT_ZERO = (-36, -36, -36, -28, -19, -13, -9, -5, -2, 1, 4, 6, 8, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
_MORE = (-16, -16, -16, -16, -16, -16, -16, -11, -7, -3, 0, 2, 5, 7, 9, 12, 14, 16, 18, 20, 22, 24, 24, 24)
_SLOTS = _CHAIN + 2  # order slots of a batch: the answers, the larger magnitudes, the signs
_LARGER, _SIGNS = _CHAIN, _CHAIN + 1
TURN, MOST_TURNS = _SLOTS * LEVELS, (1 << 16) // _SLOTS
_POWERS = (16384, 19484, 23170, 27554)  # 2^14 * 2^(k / 4)


def expected_level(square: Ints) -> Ints:
    """Return the class of each integer, from 4 log2 of its predicted square; same shape."""
    levels: Ints = np.clip((square // PER_OCTAVE) - _LEAST_SQUARE, 0, _NUM_EXPECTED - 1)
    return levels


class _Chances:
    """Counts of the answers yes and no, in units of 1/64, for each question and each class."""

    def __init__(self) -> None:
        odds = np.array([_NOT_ZERO, *[_MORE] * (_KINDS - 1)])
        whole, quarters = odds // PER_OCTAVE, odds % PER_OCTAVE
        ratio = np.array(_POWERS)[quarters] << np.maximum(whole, 0) >> np.maximum(-whole, 0)
        self.yes = 64 * _BELIEVED * ratio // (ratio + _POWERS[0]) + 1
        self.no = 64 * _BELIEVED + 2 - self.yes

    def levels(self, kind: int, expected: Ints) -> Ints:
        """Return the level of each answer to one question, from the class of its integer, shape (n,)."""
        yes, no = quarter_octaves(np.stack([self.yes[kind], self.no[kind]]))
        levels: Ints = np.minimum(np.maximum(yes - no, -MOST), MOST)[expected]
        return levels

    def of_batches(self, asked: Ints) -> Ints:
        """Return the levels of all answers of several batches, each predicted from earlier batches.

        All answers are then counted.

        Args:
            asked: number of integers that each question is asked about, by question, batch and class. The
                last row has the integers above the last question. Shape (questions + 1, batches, classes).

        Returns:
            Shape (questions, batches, classes).
        """
        yes, no = 64 * asked[1:], 64 * (asked[:-1] - asked[1:])
        levels = np.empty_like(yes)
        for kind in range(_KINDS):
            which = slice(kind, kind + 1 if kind < _KINDS - 1 else None)
            before = [_before(one[which], own[kind]) for one, own in ((yes, self.yes), (no, self.no))]
            levels[which] = quarter_octaves(before[0]) - quarter_octaves(before[1])
        return np.clip(levels, -MOST, MOST)

    def add(self, kind: int, expected: Ints, answers: NDArray[np.bool_]) -> None:
        self.yes[kind] += 64 * np.bincount(expected[answers], minlength=_NUM_EXPECTED)
        self.no[kind] += 64 * np.bincount(expected[~answers], minlength=_NUM_EXPECTED)


def _before(counts: Ints, total: Ints) -> Ints:
    """Return the counts before each question, batch by batch; update `total`, the counts so far, in place."""
    questions, batches, expected = counts.shape
    in_turn = counts.transpose(1, 0, 2).reshape(-1, expected)
    before = np.cumsum(in_turn, axis=0) - in_turn + total
    total += in_turn.sum(axis=0)
    return before.reshape(batches, questions, expected).transpose(1, 0, 2)


class IntegerWriter:
    """Writes batches of integers, each predicted from the batches before."""

    def __init__(self, out: RangeEncoder) -> None:
        self._out, self._chances = out, _Chances()

    def write(self, integers: Ints, square: Ints) -> None:
        """Write one batch of integers from -LARGEST to LARGEST.

        Args:
            integers: the batch, shape (n,).
            square: 4 log2 of their predicted squares, same shape.
        """
        write_symbols(self._out, self.symbols(integers, square, [integers.size], [0]))

    def symbols(self, integers: Ints, square: Ints, sizes: list[int], turns: list[int]) -> list[Symbols]:
        """Return the symbols of several batches, which is faster than writing one after the other.

        Args:
            integers: integers of all batches, shape (n,).
            square: 4 log2 of their predicted squares, same shape.
            sizes: number of integers in each batch.
            turns: position of each batch, ascending, from 0 and below `MOST_TURNS`. A batch's order values
                start at TURN times its position, so that other symbols fit in between.
        """
        batch = np.repeat(np.arange(len(sizes)), sizes)
        kind = batch * _NUM_EXPECTED + expected_level(square)
        turn, magnitudes = np.repeat(np.array(turns, np.int64), sizes), np.abs(integers)
        members = self._members(magnitudes)
        asked = np.stack(
            [np.bincount(kind[some], minlength=len(sizes) * _NUM_EXPECTED) for some in members]
        ).reshape(_CHAIN + 1, len(sizes), _NUM_EXPECTED)
        levels = self._chances.of_batches(asked).reshape(_CHAIN, -1)
        signed = members[1]
        booleans = [magnitudes[some] > answer for answer, some in enumerate(members[:_CHAIN])]
        boolean_levels = [levels[answer, kind[some]] for answer, some in enumerate(members[:_CHAIN])]
        slots = [turn[some] * _SLOTS + answer for answer, some in enumerate(members[:_CHAIN])]
        booleans.append(integers[signed] < 0)
        boolean_levels.append(np.zeros(signed.size, np.int64))
        slots.append(turn[signed] * _SLOTS + _SIGNS)
        slot = np.concatenate(slots).astype(np.uint16)
        larger = members[_CHAIN]
        return [
            _of_larger(magnitudes[larger], turn[larger]),
            *symbols_of(np.concatenate(booleans), np.concatenate(boolean_levels), slot),
        ]

    @staticmethod
    def _members(sizes: Ints) -> list[Ints]:
        """Return the indices of the integers that each question is asked about; last, those above the last
        question.
        """
        members: list[Ints] = [np.arange(sizes.size)]
        for answer in range(_CHAIN):
            members.append(members[-1][sizes[members[-1]] > answer])
        return members


def _of_larger(sizes: Ints, turns: Ints) -> Symbols:
    """Return symbols of magnitudes above the last question, as `RangeEncoder.write_number` writes them."""
    number = sizes.astype(np.int64) - _CHAIN
    length = np.frexp(number.astype(np.float64))[1].astype(np.int64)  # bit length
    below = np.int64(1) << np.maximum(length - 1, 0)
    of_length = np.stack([length, np.ones_like(length), np.full_like(length, LARGEST.bit_length() + 1)])
    of_bits = np.stack([number - below, np.ones_like(length), below])
    order = np.repeat(turns * TURN + _LARGER * LEVELS, 2)
    pairs = np.stack([of_length, of_bits], axis=-1).reshape(3, -1)
    there = np.stack([length >= 0, length > 1], axis=-1).reshape(-1)
    return Symbols(order[there], *pairs[:, there])


class IntegerReader:
    """Reads what `IntegerWriter` wrote."""

    def __init__(self, data: RangeDecoder) -> None:
        self._data, self._chances = data, _Chances()

    def read(self, square: Ints) -> Ints:
        """Read a batch of integers with these predicted squares, int16. Raises PacketCorrupt,
        PacketTruncated.
        """
        expected = expected_level(square)
        integers, members = np.zeros(square.size, np.int64), np.arange(square.size)
        for answer in range(_CHAIN):
            kind = min(answer, _KINDS - 1)
            yes = read_booleans(self._data, self._chances.levels(kind, expected))
            self._chances.add(kind, expected, yes)
            members, expected = members[yes], expected[yes]
            integers[members] += 1
            if not members.size:
                break
        larger = [self._data.read_number(LARGEST.bit_length() + 1) for _ in range(members.size)]
        integers[members] += np.array(larger, np.int64)
        if integers.max(initial=0) > LARGEST:
            raise PacketCorrupt(f"a decoded integer is above {LARGEST}")
        nonzero = np.flatnonzero(integers)
        negative = read_booleans(self._data, np.zeros(nonzero.size, np.int64))
        integers[nonzero[negative]] *= -1
        return integers.astype(np.int16)
