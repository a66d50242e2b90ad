"""What is expected of each flag of a block, from those already known: near it, in its row, in its column.

A block is put in order by what both sides hold (the magnitude of the base; see `coded_mask.py`): masks are
mostly magnitudes above or below something, so that in this order they are long runs with a blurred edge. The
order is walked through from coarse to fine: every 2^k-th flag, then those half way between, and so on, so
that each flag has known ones on both sides, and the edge is found like a number by halving.

What is near gives a chance. Rows (neurons), columns (what feeds them) and kinds of place then shift its log
odds by what they had beyond expectation so far. All sums are whole numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.flag_levels import CHANCES, MOST, TOTAL
from fleetune.protocols.update.entropy.quarter_octaves import Ints, quarter_octaves

FIRST = 16  # so many flags and fewer are known of by what came before the block alone
_NEAR = ((32, 16), (4, 8), (1, 4))  # known flags on each side; how many the wider estimate counts as
_FAR = _NEAR[0][0]
_BELIEVED_AXIS, _BELIEVED_KIND = 1, 2  # so many flags as expected count as seen before
_NEAR_KINDS, _SHIFT_KINDS, _NEIGHBOUR_KINDS = 28, 7, 3
_PLACES_OF_ODDS = quarter_octaves(np.arange(1, TOTAL + 1))
_LEVELS = np.zeros(TOTAL, np.int8)  # of a chance out of TOTAL
_LEVELS[1:] = np.clip(_PLACES_OF_ODDS[:-1] - _PLACES_OF_ODDS[:-1][::-1], -MOST, MOST)
_LEVELS[0] = -MOST

# levels of the flags of a batch, and which of the order they are -> the flags
CodeBatch = Callable[[Ints, slice], MaskArray]


class Beyond:
    """Of each row, column or kind: how many flags there were, how many True, how many so expected."""

    def __init__(self, size: int, believed: int) -> None:
        self._believed = 16 * believed
        self._seen, self._hits, self._expected = np.zeros((3, size), np.int64)

    def shift(self) -> Ints:
        """Quarter octaves by which the odds are above what was expected, shape (size,)."""
        seen, hits, expected = 16 * self._seen, 16 * self._hits, self._expected >> 12
        counts = np.stack([hits, expected, seen - hits, seen - expected])
        more, less, fewer, rest = quarter_octaves(counts + self._believed)
        shift: Ints = more - less - fewer + rest
        return shift

    def add(self, members: Ints, flags: MaskArray, levels: Ints) -> None:
        """Flags of these members, of which `levels` were expected."""
        size = self._seen.size
        self._seen += np.bincount(members, minlength=size)
        self._hits += np.bincount(members[flags], minlength=size)
        chances = CHANCES[np.clip(levels, -MOST, MOST) + MOST]
        self._expected += np.bincount(members, chances, size).astype(np.int64)  # below 2^53: exact


@dataclass(frozen=True)
class _Here:
    """A batch: which of the order, and of each flag its row, its column, what is near."""

    batch: slice
    rows: Ints
    columns: Ints
    near: Ints
    neighbours: Ints


class Walk:
    """Walks through the blocks of one mask."""

    def __init__(self) -> None:
        self._kinds = Beyond(_NEAR_KINDS * _SHIFT_KINDS * _NEIGHBOUR_KINDS, _BELIEVED_KIND)
        self._columns = Beyond(1, _BELIEVED_AXIS)
        self._seen = self._hits = 0

    def start_tensor(self, num_columns: int) -> None:
        self._columns = Beyond(num_columns, _BELIEVED_AXIS)

    def block(self, rows: Ints, columns: Ints, code: CodeBatch) -> MaskArray:
        """The flags of a block of the tensor, in its order.

        Args:
            rows: in the block, of each flag, shape (n,).
            columns: in the tensor, same shape.
            code: writes or reads the flags of a batch.
        """
        size, stride = rows.size, 1
        while size > FIRST * stride:
            stride *= 2
        flags, of_rows = np.zeros(size, np.bool_), Beyond(int(rows.max()) + 1, _BELIEVED_AXIS)
        batch = slice(0, size, stride)
        known = np.array([self._hits + 1, self._seen - self._hits + 1])
        level = np.clip(int(np.subtract(*quarter_octaves(known))), -MOST, MOST)
        near = np.full(rows[batch].size, level)
        flags[batch] = code(near, batch)
        of_rows.add(rows[batch], flags[batch], near)
        self._columns.add(columns[batch], flags[batch], near)
        while stride > 1:
            stride //= 2
            batch = slice(stride, size, 2 * stride)
            near, neighbours = _near(flags[:: 2 * stride], rows[batch].size)
            here = _Here(batch, rows[batch], columns[batch], near, neighbours)
            flags[batch] = self._finer(here, of_rows, code)
        self._seen += size
        self._hits += int(np.count_nonzero(flags))
        return flags

    def _finer(self, here: _Here, of_rows: Beyond, code: CodeBatch) -> MaskArray:
        """The flags of a batch between known ones."""
        by_row, by_column = of_rows.shift()[here.rows], self._columns.shift()[here.columns]
        expected = np.clip(here.near + by_row + by_column, -MOST, MOST)
        kinds = _kinds(here.near, by_row + by_column, here.neighbours)
        levels = np.clip(expected + self._kinds.shift()[kinds], -MOST, MOST)
        flags = code(levels, here.batch)
        self._kinds.add(kinds, flags, expected)
        of_rows.add(here.rows, flags, here.near + by_column)
        self._columns.add(here.columns, flags, here.near + by_row)
        return flags


def _near(known: MaskArray, size: int) -> tuple[Ints, Ints]:
    """The level that the known flags near each new one make likely, and how many of its neighbours are True.

    The nearest are believed first, the farther ones where these are few.
    """
    seen = np.clip(np.arange(-_FAR, known.size + _FAR + 1), 0, known.size)  # up to each place between them
    hits = np.concatenate([[0], np.cumsum(known)])[seen]
    num_hits = int(hits[-1])
    chance = np.full(size, (2 * num_hits + 1) * TOTAL // (2 * known.size + 2))
    inside = hits
    for reach, believed in _NEAR:
        ahead, behind = _FAR + 1 + reach, _FAR + 1 - reach
        inside = hits[ahead : ahead + size] - hits[behind : behind + size]
        among = seen[ahead : ahead + size] - seen[behind : behind + size]
        chance = (inside * TOTAL + believed * chance) // (among + believed)
    return _LEVELS[chance].astype(np.int64), inside


def _kinds(near: Ints, shift: Ints, neighbours: Ints) -> Ints:
    """Places that are alike: the level of what is near, what rows and columns say, and the neighbours."""
    level = np.clip((near >> 1) + _NEAR_KINDS // 2, 0, _NEAR_KINDS - 1)
    beyond = np.clip((shift + 2 >> 2) + _SHIFT_KINDS // 2, 0, _SHIFT_KINDS - 1)
    kinds: Ints = (level * _SHIFT_KINDS + beyond) * _NEIGHBOUR_KINDS + neighbours
    return kinds
