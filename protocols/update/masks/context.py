"""What is expected of each flag of a block, from those already known: near it, in its row, in its column.

A block is put in order by what both sides hold (the magnitude of the base; see `coded_mask.py`): masks are
mostly magnitudes above or below something, so that in this order they are long runs with a blurred edge. The
order is walked through from coarse to fine: every 2^k-th flag, then those half way between, and so on, so
that each flag has known ones on both sides, and the edge is found like a number by halving.

What is near gives a chance. Rows (neurons), columns (what feeds them) and kinds of place then shift its log
odds by what they had beyond expectation so far. All sums are whole numbers.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.flag_levels import CHANCES, MOST, TOTAL
from fleetune.protocols.update.entropy.quarter_octaves import Ints, quarter_octaves

FIRST = 16  # so many flags and fewer are known of by what came before the block alone
_NEAR = ((32, 16), (4, 8), (1, 4))  # known flags on each side; how many the wider estimate counts as
_FAR = _NEAR[0][0]
_BELIEVED_AXIS, _BELIEVED_KIND = 16, 32  # 16 for each flag as expected that counts as seen before
_NEAR_KINDS, _SHIFT_KINDS, _NEIGHBOUR_KINDS = 28, 7, 3
_KINDS = _NEAR_KINDS * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_PLACES_OF_ODDS = quarter_octaves(np.arange(1, TOTAL + 1))
_LEVELS = np.zeros(TOTAL, np.int64)  # of a chance out of TOTAL
_LEVELS[1:] = np.clip(_PLACES_OF_ODDS[:-1] - _PLACES_OF_ODDS[:-1][::-1], -MOST, MOST)
_LEVELS[0] = -MOST
# Sums of levels and shifts stay within this: a shift is at most 168 for as many flags as are coded.
_BOUND = 1 << 10
_SUMS = np.arange(-_BOUND, _BOUND + 1)
_HELD = np.minimum(np.maximum(_SUMS, -MOST), MOST)
_CHANCES = CHANCES[_HELD + MOST].astype(np.float64)  # of a sum held within -MOST to MOST
_KIND_OF_NEAR = np.clip((_SUMS >> 1) + _NEAR_KINDS // 2, 0, _NEAR_KINDS - 1) * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_KIND_OF_SHIFT = np.clip((_SUMS + 2 >> 2) + _SHIFT_KINDS // 2, 0, _SHIFT_KINDS - 1) * _NEIGHBOUR_KINDS
_HIT_BITS = 30  # a batch expects less than 2^30 in all

# levels of the flags of a batch, and which of the order they are -> the flags
CodeBatch = Callable[[Ints, slice], MaskArray]


class _Counts:
    """How many flags there were, how many True, how many so expected, of each kind of place, each column and
    each row. They lie one after the other, so that a batch is counted in one go.

    Attributes:
        shifts: quarter octaves by which the odds of each are above what was expected.
    """

    def __init__(self) -> None:
        self._seen, self._hits, self._expected = np.zeros((3, _KINDS), np.int64)
        self._believed = np.full(_KINDS, _BELIEVED_KIND)
        self.shifts = np.zeros(_KINDS, np.int64)

    def begin_anew(self, first: int, size: int) -> None:
        """Keep what is counted before place `first`; there are `size` places from now on."""
        self._seen = _kept(self._seen, first, size)
        self._hits = _kept(self._hits, first, size)
        self._expected = _kept(self._expected, first, size)
        self._believed = _kept(self._believed, first, size, _BELIEVED_AXIS)
        self.shifts = _kept(self.shifts, first, size)

    def add(self, members: Sequence[Ints], levels: Sequence[Ints], flags: MaskArray) -> None:
        """Flags that count in k places each, where `levels` were expected; all of shape (n,)."""
        places, size = np.concatenate(members), self._seen.size
        weights = np.empty((len(levels), flags.size))
        for weight, level in zip(weights, levels, strict=True):
            weight[:] = _CHANCES[level + _BOUND]
        weights += flags * float(1 << _HIT_BITS)
        both = np.bincount(places, weights.ravel(), size).astype(np.int64)  # below 2^53: exact
        self._seen += np.bincount(places, minlength=size)
        self._hits += both >> _HIT_BITS
        self._expected += both & (1 << _HIT_BITS) - 1
        changed = places if places.size < size else slice(None)
        self.shifts[changed] = self._shifts(changed)

    def _shifts(self, places: Ints | slice) -> Ints:
        seen, hits, believed = 16 * self._seen[places], 16 * self._hits[places], self._believed[places]
        expected = self._expected[places] >> 12
        counts = np.empty((4, seen.size))
        counts[0], counts[1], counts[2], counts[3] = hits, expected, seen - hits, seen - expected
        counts += believed
        more, less, fewer, rest = quarter_octaves(counts)
        shifts: Ints = more - less - fewer + rest
        return shifts


def _kept(array: Ints, first: int, size: int, new: int = 0) -> NDArray[np.int64]:
    """What stands before `first`, and `new` from there on; shape (size,)."""
    kept = np.full(size, new, np.int64)
    kept[:first] = array[:first]
    return kept


class Walk:
    """Walks through the blocks of one mask."""

    def __init__(self) -> None:
        self._counts = _Counts()
        self._first_row = _KINDS  # behind the columns
        self._seen = self._hits = 0

    def start_tensor(self, num_columns: int) -> None:
        self._first_row = _KINDS + num_columns
        self._counts.begin_anew(_KINDS, self._first_row)

    def block(self, rows: Ints, columns: Ints, code: CodeBatch) -> MaskArray:
        """The flags of a block of the tensor, in its order.

        Args:
            rows: in the block, of each flag, shape (n,).
            columns: in the tensor, same shape.
            code: writes or reads the flags of a batch.
        """
        self._counts.begin_anew(self._first_row, self._first_row + int(rows.max()) + 1)
        axes = np.empty((2, rows.size), np.int32)
        axes[0], axes[1] = columns + _KINDS, rows + self._first_row
        size, stride = rows.size, 1
        while size > FIRST * stride:
            stride *= 2
        flags = np.zeros(size, np.bool_)
        flags[::stride] = self._coarsest(axes[:, ::stride], slice(0, size, stride), code)
        while stride > 1:
            stride //= 2
            batch = slice(stride, size, 2 * stride)
            flags[batch] = self._finer(axes[:, batch], flags[:: 2 * stride], batch, code)
        self._seen += size
        self._hits += int(np.count_nonzero(flags))
        return flags

    def _coarsest(self, axes: Ints, batch: slice, code: CodeBatch) -> MaskArray:
        """The first flags of a block, of which no others are known."""
        known = np.array([self._hits + 1, self._seen - self._hits + 1])
        level = _HELD[int(np.subtract(*quarter_octaves(known))) + _BOUND]
        levels = np.full(axes.shape[1], level)
        flags = code(levels, batch)
        self._counts.add((*axes,), (levels, levels), flags)
        return flags

    def _finer(self, axes: Ints, known: MaskArray, batch: slice, code: CodeBatch) -> MaskArray:
        """The flags of a batch between known ones; their columns and rows: shape (2, n)."""
        near, neighbours = _near(known, axes.shape[1])
        by_axis = self._counts.shifts[axes]
        both = by_axis[0] + by_axis[1]
        expected = _HELD[near + both + _BOUND]
        kinds = _KIND_OF_NEAR[near + _BOUND] + _KIND_OF_SHIFT[both + _BOUND] + neighbours
        levels = _HELD[expected + self._counts.shifts[kinds] + _BOUND]
        flags = code(levels, batch)
        by_axis += near
        self._counts.add((kinds, *axes), (expected, by_axis[1], by_axis[0]), flags)
        return flags


def _near(known: MaskArray, size: int) -> tuple[Ints, Ints]:
    """The level that the known flags near each new one make likely, and how many of its neighbours are True.

    The nearest are believed first, the farther ones where these are few.
    """
    # Up to each place between them, and beyond. Floats are exact here: quotients below 2^16, by at most 80,
    # are farther from the next whole number than they are rounded.
    seen = np.arange(-_FAR, known.size + _FAR + 1, dtype=np.float32)
    np.clip(seen, 0, known.size, out=seen)
    hits = np.zeros_like(seen)
    np.cumsum(known, out=hits[_FAR + 1 : _FAR + 1 + known.size])
    hits[_FAR + 1 + known.size :] = num_hits = hits[_FAR + known.size]
    chance = np.full(size, (2 * int(num_hits) + 1) * TOTAL // (2 * known.size + 2), np.float32)
    inside = hits
    for reach, believed in _NEAR:
        ahead, behind = _FAR + 1 + reach, _FAR + 1 - reach
        inside = hits[ahead : ahead + size] - hits[behind : behind + size]
        among = seen[ahead : ahead + size] - seen[behind : behind + size]
        chance = np.floor((inside * TOTAL + believed * chance) / (among + believed))
    return _LEVELS[chance.astype(np.int64)], inside.astype(np.int64)
