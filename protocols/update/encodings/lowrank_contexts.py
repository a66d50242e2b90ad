"""Predictions that `lowrank` uses to code integers, from those before in the row, column or bundle."""

from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder
from fleetune.protocols.update.entropy.symbols import Interval

_SIZES = 25  # size classes of bundles: 0 if all entries are 0, else octaves of the mean square, from 2^-8 on
_SIZE_COUNTS = 8  # weight of an observed size class; the likeliest class starts with a count of 16
_MOST_SQUARES = 1 << 50
_BELIEVED = 2  # prior of each column: this many entries with the mean square of all


@dataclass
class BusyLines:
    """Sizes of the integers of each row, or each column, in the products so far, relative to all.

    Attributes:
        size: number of rows or columns.
    """

    size: int
    _squares: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._squares = np.zeros(self.size, np.int64)

    def expected(self, octaves: int) -> Ints:
        """4 log2 of the expected squares of a factor, for a product with a norm of about 2^octaves."""
        return 8 * octaves - quarter_octaves(np.array([self.size])) + _line_levels(self._squares)

    def add(self, factor: Ints) -> None:
        """Count a factor that was written or read, shape (size,)."""
        self._squares += np.square(factor, dtype=np.int64)

    def passed(self, octaves: Ints, factors: Ints) -> Ints:
        """4 log2 of the expected squares of several products' factors, each predicted from those before.

        All factors are then counted, as by `add`.

        Args:
            octaves: octaves of each product, shape (products,).
            factors: factors of the products, shape (products, size).

        Returns:
            Shape (products, size).
        """
        squares = np.square(factors, dtype=np.int64)
        before = np.cumsum(squares, axis=0) - squares + self._squares
        self._squares += squares.sum(axis=0)
        return 8 * octaves[:, None] - quarter_octaves(np.array([self.size])) + _line_levels(before)


def _line_levels(squares: Ints) -> Ints:
    """4 log2 of each line's mean square relative to all lines, shape (..., lines).

    The mean of all lines is a prior with a weight of one fifth.
    """
    size, total = squares.shape[-1], squares.sum(axis=-1, keepdims=True)
    own, most = np.minimum(squares, _MOST_SQUARES // (4 * size)), np.clip(total, 1, _MOST_SQUARES)
    levels = quarter_octaves(4 * size * own + most) - quarter_octaves(5 * most)
    return np.where(total > 0, levels, 0)


@dataclass
class BusyColumns:
    """Sizes of the entries of each column so far, relative to all.

    Attributes:
        size: number of columns, at least 1.
    """

    size: int
    _squares: Ints = field(init=False)
    _seen: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._squares, self._seen = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)

    def expected(self, size: int, columns: Ints) -> Ints:
        """4 log2 of the expected squares of a bundle's entries, same shape as `columns`. `size`: its size
        class.
        """
        return PER_OCTAVE * (size - 9) + _column_levels(self._squares, self._seen)[columns]

    def add(self, columns: Ints, entries: Ints) -> None:
        """Count entries that were written or read, with their columns, shapes (k,)."""
        squares = np.square(entries, dtype=np.float64)  # exact: whole numbers below 2^53
        self._squares += np.bincount(columns, squares, self.size).astype(np.int64)
        self._seen += np.bincount(columns, minlength=self.size)

    def passed(self, sizes: Ints, bundle: Ints, columns: Ints, entries: Ints) -> Ints:
        """4 log2 of the expected squares of several bundles' entries, each bundle predicted from those
        before.

        All entries are then counted, as by `add`.

        Args:
            sizes: size class of each bundle, shape (bundles,).
            bundle: bundle of each entry, shape (n,); no bundle of size class 0 occurs.
            columns: column of each entry, same shape.
            entries: the entries, same shape.

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
    """4 log2 of each column's mean square relative to all columns; shapes (..., columns)."""
    total, most_seen = squares.sum(axis=-1, keepdims=True), seen.sum(axis=-1, keepdims=True)
    own, most = (
        np.minimum(squares, _MOST_SQUARES // np.maximum(most_seen, 1)),
        np.clip(total, 1, _MOST_SQUARES),
    )
    levels = quarter_octaves(own * most_seen + _BELIEVED * most) - quarter_octaves(most)
    return np.where(total > 0, levels - quarter_octaves(seen + _BELIEVED), 0)


def sizes_of(entries: Ints, starts: Ints) -> Ints:
    """Size class of each bundle: octaves of its mean square from 2^-8, plus 1; 0 if all its entries are 0.

    Args:
        entries: entries of all bundles, shape (n,), n at least 1.
        starts: start of each bundle, ascending from 0, shape (bundles,).
    """
    total = np.add.reduceat(np.square(entries, dtype=np.int64), starts)
    count = np.diff(starts, append=entries.size)
    octaves = (quarter_octaves(np.maximum(total, 1)) - quarter_octaves(count)) // PER_OCTAVE
    return np.where(total > 0, np.clip(octaves + 9, 1, _SIZES - 1), 0)


class BundleSizes:
    """Counts of each size class after each size class of the bundle before."""

    def __init__(self) -> None:
        near = [max(1, 16 >> abs(away)) for away in range(1 - _SIZES, _SIZES)]
        self._counts = [near[_SIZES - 1 - one : 2 * _SIZES - 1 - one] for one in range(_SIZES)]
        self.start()

    def start(self) -> None:
        """Begin a tensor: its first bundle follows class 0."""
        self._before = 0

    def interval(self, size: int) -> Interval:
        """Start, size and total of the symbol for the size class of the next bundle."""
        counts = self._counts[self._before]
        found = sum(counts[:size]), counts[size], sum(counts)
        self._add(size)
        return found

    def read(self, data: RangeDecoder) -> int:
        """Size class of the next bundle. Raises PacketCorrupt, PacketTruncated."""
        size = data.read_counted(self._counts[self._before])
        self._add(size)
        return size

    def _add(self, size: int) -> None:
        self._counts[self._before][size] += _SIZE_COUNTS
        self._before = size
