"""Prediction of each boolean of a block, from known booleans nearby, in its row and in its column.

The booleans of a block are sorted by the magnitude of the reference, which both sides hold (see
`coded_mask.py`). Most masks mark the magnitudes above or below a threshold. So in this order they are long
runs with a blurred edge. The booleans are visited from coarse to fine: every 2^k-th boolean, then those half
way between, and so on. So each boolean has known booleans on both sides, and the edge is found as in a binary
search.

Nearby booleans give a first probability. The log odds are then shifted for the boolean's row (neuron), its
column (input) and its kind of place: by how many more True booleans these had so far than predicted. All sums
are whole numbers. Bytes: docs/wire.md, *Masks*, *Predicted*.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.boolean_levels import CHANCES, MOST, TOTAL
from fleetune.protocols.update.entropy.quarter_octaves import Ints, quarter_octaves

FIRST = 16  # a block's first booleans, at most this many, are predicted from earlier blocks only
_NEAR = ((32, 16), (4, 8), (1, 4))  # (known booleans on each side, weight of the estimate from a wider range)
_FAR = _NEAR[0][0]
# weight of the prediction, in 1/16 booleans, for rows and columns, and for kinds
_BELIEVED_AXIS, _BELIEVED_KIND = 16, 32
_NEAR_KINDS, _SHIFT_KINDS, _NEIGHBOUR_KINDS = 28, 7, 3
_KINDS = _NEAR_KINDS * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_PLACES_OF_ODDS = quarter_octaves(np.arange(1, TOTAL + 1))
_LEVELS = np.zeros(TOTAL, np.int64)  # level of a probability out of TOTAL
_LEVELS[1:] = np.clip(_PLACES_OF_ODDS[:-1] - _PLACES_OF_ODDS[:-1][::-1], -MOST, MOST)
_LEVELS[0] = -MOST
# Sums of levels and shifts stay within this bound: a shift is at most 168 for the largest mask that is coded.
_BOUND = 1 << 10
_SUMS = np.arange(-_BOUND, _BOUND + 1)
_HELD = np.minimum(np.maximum(_SUMS, -MOST), MOST)
_CHANCES = CHANCES[_HELD + MOST].astype(np.float64)  # probabilities of sums, clipped to -MOST to MOST
_KIND_OF_NEAR = np.clip((_SUMS >> 1) + _NEAR_KINDS // 2, 0, _NEAR_KINDS - 1) * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_KIND_OF_SHIFT = np.clip((_SUMS + 2 >> 2) + _SHIFT_KINDS // 2, 0, _SHIFT_KINDS - 1) * _NEIGHBOUR_KINDS
_HIT_BITS = 30  # the predicted probabilities of a batch sum up to less than 2^30

# (levels of the booleans of a batch, their range in the block's order) -> the booleans
CodeBatch = Callable[[Ints, slice], MaskArray]


class _Counts:
    """Counts of booleans, of True booleans, and of predicted True booleans, for each kind of place, column
    and row.

    All three lie one after the other in the same arrays, so that a batch is counted in one call.

    Attributes:
        shifts: observed odds of each relative to the predicted odds, in quarter octaves.
    """

    def __init__(self) -> None:
        self._seen, self._hits, self._expected = np.zeros((3, _KINDS), np.int64)
        self._believed = np.full(_KINDS, _BELIEVED_KIND)
        self.shifts = np.zeros(_KINDS, np.int64)

    def begin_anew(self, first: int, size: int) -> None:
        """Keep the counts before place `first`, and reset the others. There are `size` places from now on."""
        self._seen = _resized(self._seen, first, size)
        self._hits = _resized(self._hits, first, size)
        self._expected = _resized(self._expected, first, size)
        self._believed = _resized(self._believed, first, size, _BELIEVED_AXIS)
        self.shifts = _resized(self.shifts, first, size)

    def add(self, members: Sequence[Ints], levels: Sequence[Ints], booleans: MaskArray) -> None:
        """Count booleans in k places each, with the levels predicted there; shapes (n,)."""
        places, size = np.concatenate(members), self._seen.size
        weights = np.empty((len(levels), booleans.size))
        for weight, level in zip(weights, levels, strict=True):
            weight[:] = _CHANCES[level + _BOUND]
        weights += booleans * float(1 << _HIT_BITS)
        both = np.bincount(places, weights.ravel(), size).astype(np.int64)  # exact: below 2^53
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


def _resized(array: Ints, first: int, size: int, new: int = 0) -> NDArray[np.int64]:
    """Copy with the entries before `first`, and `new` in all others; shape (size,)."""
    resized = np.full(size, new, np.int64)
    resized[:first] = array[:first]
    return resized


class Walk:
    """Visits the blocks of one mask and codes their booleans."""

    def __init__(self) -> None:
        self._counts = _Counts()
        self._first_row = _KINDS  # rows are counted after the columns
        self._seen = self._hits = 0

    def start_tensor(self, num_columns: int) -> None:
        self._first_row = _KINDS + num_columns
        self._counts.begin_anew(_KINDS, self._first_row)

    def block(self, rows: Ints, columns: Ints, code: CodeBatch) -> MaskArray:
        """Code the booleans of a block of the tensor, and return them in the block's order.

        Args:
            rows: row of each boolean in the block, shape (n,).
            columns: column of each boolean in the tensor, same shape.
            code: function that writes or reads the booleans of a batch.
        """
        self._counts.begin_anew(self._first_row, self._first_row + int(rows.max()) + 1)
        axes = np.empty((2, rows.size), np.int32)
        axes[0], axes[1] = columns + _KINDS, rows + self._first_row
        size, stride = rows.size, 1
        while size > FIRST * stride:
            stride *= 2
        booleans = np.zeros(size, np.bool_)
        booleans[::stride] = self._coarsest(axes[:, ::stride], slice(0, size, stride), code)
        while stride > 1:
            stride //= 2
            batch = slice(stride, size, 2 * stride)
            booleans[batch] = self._finer(axes[:, batch], booleans[:: 2 * stride], batch, code)
        self._seen += size
        self._hits += int(np.count_nonzero(booleans))
        return booleans

    def _coarsest(self, axes: Ints, batch: slice, code: CodeBatch) -> MaskArray:
        """Code the first booleans of a block, which have no known neighbours."""
        known = np.array([self._hits + 1, self._seen - self._hits + 1])
        level = _HELD[int(np.subtract(*quarter_octaves(known))) + _BOUND]
        levels = np.full(axes.shape[1], level)
        booleans = code(levels, batch)
        self._counts.add((*axes,), (levels, levels), booleans)
        return booleans

    def _finer(self, axes: Ints, known: MaskArray, batch: slice, code: CodeBatch) -> MaskArray:
        """Code the booleans of a batch between known ones. `axes`: their columns and rows, shape (2, n)."""
        near, neighbours = _near(known, axes.shape[1])
        by_axis = self._counts.shifts[axes]
        both = by_axis[0] + by_axis[1]
        expected = _HELD[near + both + _BOUND]
        kinds = _KIND_OF_NEAR[near + _BOUND] + _KIND_OF_SHIFT[both + _BOUND] + neighbours
        levels = _HELD[expected + self._counts.shifts[kinds] + _BOUND]
        booleans = code(levels, batch)
        by_axis += near
        self._counts.add((kinds, *axes), (expected, by_axis[1], by_axis[0]), booleans)
        return booleans


def _near(known: MaskArray, size: int) -> tuple[Ints, Ints]:
    """Level that known booleans nearby give each new boolean, and how many of its two neighbours are True.

    The estimate starts with a wide range, and gives nearer booleans more weight.
    """
    # Number of True booleans up to each place, padded at both ends. Floats are exact here: quotients are
    # below 2^16 and have a divisor of at most 80. So they are farther from the next whole number than the
    # rounding error.
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
