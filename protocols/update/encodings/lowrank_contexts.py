"""What `lowrank` expects of integers, by those before them: of a row, of a column, of a bundle of entries."""

from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder
from fleetune.protocols.update.entropy.symbols import Interval

_SIZES = 25  # of bundles: 0: all are 0; else octaves of the mean square, from 2^-8
_SIZE_COUNTS = 8  # how much a size counts, against 16 for the likeliest at first
_MOST_SQUARES = 1 << 50
_BELIEVED = 2  # entries of the mean square that a column is thought to have had


@dataclass
class BusyLines:
    """How large the integers of each row, or each column, of products have been so far, against all.

    Attributes:
        size: how many rows or columns.
    """

    size: int
    _squares: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._squares = np.zeros(self.size, np.int64)

    def expected(self, octaves: int) -> Ints:
        """4 log2 of the squares expected of a factor of a product whose norm is about 2^octaves."""
        return 8 * octaves - quarter_octaves(np.array([self.size])) + _line_levels(self._squares)

    def add(self, factor: Ints) -> None:
        """What was read, shape (size,)."""
        self._squares += np.square(factor, dtype=np.int64)

    def passed(self, octaves: Ints, factors: Ints) -> Ints:
        """What is expected of the factors of several products, each by those before it; all are added.

        Args:
            octaves: of each product, shape (products,).
            factors: shape (products, size).

        Returns:
            Shape (products, size).
        """
        squares = np.square(factors, dtype=np.int64)
        before = np.cumsum(squares, axis=0) - squares + self._squares
        self._squares += squares.sum(axis=0)
        return 8 * octaves[:, None] - quarter_octaves(np.array([self.size])) + _line_levels(before)


def _line_levels(squares: Ints) -> Ints:
    """4 log2 of their mean squares over that of all, a fifth of which counts as seen; shape (..., lines)."""
    size, total = squares.shape[-1], squares.sum(axis=-1, keepdims=True)
    own, most = np.minimum(squares, _MOST_SQUARES // (4 * size)), np.clip(total, 1, _MOST_SQUARES)
    levels = quarter_octaves(4 * size * own + most) - quarter_octaves(5 * most)
    return np.where(total > 0, levels, 0)


@dataclass
class BusyColumns:
    """How large the entries of each column have been so far, against all.

    Attributes:
        size: how many columns, at least 1.
    """

    size: int
    _squares: Ints = field(init=False)
    _seen: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._squares, self._seen = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)

    def expected(self, size: int, columns: Ints) -> Ints:
        """4 log2 of the squares expected of the entries of a bundle of this size, shape as `columns`."""
        return PER_OCTAVE * (size - 9) + _column_levels(self._squares, self._seen)[columns]

    def add(self, columns: Ints, entries: Ints) -> None:
        """What was read of these columns, shapes (k,)."""
        squares = np.square(entries, dtype=np.float64)  # whole numbers below 2^53 are exact
        self._squares += np.bincount(columns, squares, self.size).astype(np.int64)
        self._seen += np.bincount(columns, minlength=self.size)

    def passed(self, sizes: Ints, bundle: Ints, columns: Ints, entries: Ints) -> Ints:
        """What is expected of the entries of several bundles, each by those before it; all are added.

        Args:
            sizes: of the bundles, shape (bundles,).
            bundle: the number of each entry's, shape (n,); none is of a bundle of size 0.
            columns: of each entry, same shape.
            entries: same shape.

        Returns:
            Shape (n,).
        """
        cells, shape = bundle * self.size + columns, (sizes.size, self.size)
        squares = np.bincount(cells, np.square(entries, dtype=np.float64), sizes.size * self.size)
        squares, seen = squares.astype(np.int64).reshape(shape), np.bincount(cells, minlength=squares.size)
        seen = seen.reshape(shape)
        before = [
            np.cumsum(own, axis=0) - own + of_all
            for own, of_all in ((squares, self._squares), (seen, self._seen))
        ]
        self._squares += squares.sum(axis=0)
        self._seen += seen.sum(axis=0)
        levels: Ints = PER_OCTAVE * (sizes[bundle] - 9) + _column_levels(*before).reshape(-1)[cells]
        return levels


def _column_levels(squares: Ints, seen: Ints) -> Ints:
    """4 log2 of their mean squares over that of all; shapes (..., columns)."""
    total, most_seen = squares.sum(axis=-1, keepdims=True), seen.sum(axis=-1, keepdims=True)
    own, most = (
        np.minimum(squares, _MOST_SQUARES // np.maximum(most_seen, 1)),
        np.clip(total, 1, _MOST_SQUARES),
    )
    levels = quarter_octaves(own * most_seen + _BELIEVED * most) - quarter_octaves(most)
    return np.where(total > 0, levels - quarter_octaves(seen + _BELIEVED), 0)


def sizes_of(entries: Ints, starts: Ints) -> Ints:
    """Octaves of the mean square of bundles from 2^-8, plus 1; 0: there is none.

    Args:
        entries: of all bundles, shape (n,), n at least 1.
        starts: where each bundle begins, ascending from 0, shape (bundles,).
    """
    total = np.add.reduceat(np.square(entries, dtype=np.int64), starts)
    count = np.diff(starts, append=entries.size)
    octaves = (quarter_octaves(np.maximum(total, 1)) - quarter_octaves(count)) // PER_OCTAVE
    return np.where(total > 0, np.clip(octaves + 9, 1, _SIZES - 1), 0)


class BundleSizes:
    """How often each size came behind one like that of the bundle before."""

    def __init__(self) -> None:
        near = [max(1, 16 >> abs(away)) for away in range(1 - _SIZES, _SIZES)]
        self._counts = [near[_SIZES - 1 - one : 2 * _SIZES - 1 - one] for one in range(_SIZES)]
        self.start()

    def start(self) -> None:
        """Of a tensor."""
        self._before = 0

    def interval(self, size: int) -> Interval:
        """Start, size and total of the symbol that tells the size of the next bundle."""
        counts = self._counts[self._before]
        found = sum(counts[:size]), counts[size], sum(counts)
        self._add(size)
        return found

    def read(self, data: RangeDecoder) -> int:
        """The size of the next bundle. Raises PacketCorrupt, PacketTruncated."""
        size = data.read_counted(self._counts[self._before])
        self._add(size)
        return size

    def _add(self, size: int) -> None:
        self._counts[self._before][size] += _SIZE_COUNTS
        self._before = size
