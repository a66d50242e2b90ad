"""What `lowrank` expects of integers, by those before them: of a row, of a column, of a bundle of entries."""

from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

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
        return 8 * octaves - quarter_octaves(np.array([self.size])) + self._levels()

    def add(self, factor: Ints) -> None:
        """What was read, shape (size,)."""
        self._squares += np.square(factor, dtype=np.int64)

    def _levels(self) -> Ints:
        """4 log2 of their mean squares over that of all, a fifth of which counts as seen."""
        total = int(self._squares.sum())
        if not total:
            return np.zeros(self.size, np.int64)
        own = np.minimum(self._squares, _MOST_SQUARES // (4 * self.size))
        total = min(total, _MOST_SQUARES)
        return quarter_octaves(4 * self.size * own + total) - quarter_octaves(np.array([5 * total]))


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
        return PER_OCTAVE * (size - 9) + self._levels()[columns]

    def add(self, columns: Ints, entries: Ints) -> None:
        """What was read of these columns, shapes (k,)."""
        squares = np.square(entries, dtype=np.float64)  # whole numbers below 2^53 are exact
        self._squares += np.bincount(columns, squares, self.size).astype(np.int64)
        self._seen += np.bincount(columns, minlength=self.size)

    def _levels(self) -> Ints:
        total, seen = int(self._squares.sum()), int(self._seen.sum())
        if not total:
            return np.zeros(self.size, np.int64)
        own, total = np.minimum(self._squares, _MOST_SQUARES // seen), min(total, _MOST_SQUARES)
        mean = quarter_octaves(np.array([total]))
        return (
            quarter_octaves(own * seen + _BELIEVED * total) - mean - quarter_octaves(self._seen + _BELIEVED)
        )


def size_of(bundle: Ints) -> int:
    """Octaves of the mean square from 2^-8, plus 1; 0: there is none."""
    total = int(np.square(bundle, dtype=np.int64).sum())
    if not total:
        return 0
    level, count = quarter_octaves(np.array([total, bundle.size])).tolist()
    octaves: int = (level - count) // PER_OCTAVE
    return max(1, min(octaves + 9, _SIZES - 1))


class BundleSizes:
    """How often each size came behind one like that of the bundle before."""

    def __init__(self) -> None:
        near = [max(1, 16 >> abs(away)) for away in range(1 - _SIZES, _SIZES)]
        self._counts = [near[_SIZES - 1 - one : 2 * _SIZES - 1 - one] for one in range(_SIZES)]
        self.start()

    def start(self) -> None:
        """Of a tensor."""
        self._before = 0

    def write(self, out: RangeEncoder, size: int) -> None:
        """The size of the next bundle."""
        out.write_counted(size, self._counts[self._before])
        self._add(size)

    def read(self, data: RangeDecoder) -> int:
        """What `write` wrote. Raises PacketCorrupt, PacketTruncated."""
        size = data.read_counted(self._counts[self._before])
        self._add(size)
        return size

    def _add(self, size: int) -> None:
        self._counts[self._before][size] += _SIZE_COUNTS
        self._before = size
