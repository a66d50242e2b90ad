"""The matrices of a patch: for each tensor, the rows and columns that have an entry in the patch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.update.encodings.chunks import chunks
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.entropy.octaves import Ints
from fleetune.protocols.update.products import MAX_PRODUCTS, Product, Steps, sum_of

_NARROW = 4  # a matrix with this many rows or columns, or fewer, is written as entries
_BUNDLE = 64  # approximate number of entries that share one size class
# largest number of columns for each entry of a bundle: each bundle takes time for every column
_BUNDLE_COLUMNS = 8
_BUNDLE_UNKNOWN = 256  # entries of a bundle if the rows are unknown

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Scattered:
    """Places of a patch's entries that fill only a part of their matrix.

    Attributes:
        places: place of each entry in its tensor, ascending, shape (n,).
        row_size: row size of the tensor.
        first_of_row: place in the tensor where each row of the matrix begins, ascending, shape (rows,).
        row, column: row and column of the matrix for each row and column of the tensor. The number is
            meaningless if the matrix lacks that row or column.
    """

    places: Numbers
    row_size: int
    first_of_row: Numbers
    row: Numbers
    column: Numbers


@dataclass(frozen=True)
class Tensor:
    """The entries of a patch that belong to one tensor.

    Attributes:
        start, stop: range of these entries in the patch.
        rows, columns: size of their matrix; 0 if they have no matrix.
        scattered: their places in the matrix; None if they fill it, row by row.
    """

    start: int
    stop: int
    rows: int = 0
    columns: int = 0
    scattered: Scattered | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def most_products(self) -> int:
        """Largest allowed number of products; more would have as many numbers as the tensor has entries."""
        if min(self.rows, self.columns) <= _NARROW:
            return 0
        return min(MAX_PRODUCTS, (self.size - 1) // (self.rows + self.columns))

    def bundles(self) -> Iterator[slice]:
        """Yield bundles: neighbouring entries that share one size class. In a matrix, a bundle is some whole
        rows.
        """
        if not self.rows:
            ends = list(range(_BUNDLE_UNKNOWN, self.size, _BUNDLE_UNKNOWN))
        else:
            rows = -(-max(_BUNDLE, self.columns // _BUNDLE_COLUMNS) * self.rows // self.size)
            if self.scattered is None:
                ends = list(range(rows * self.columns, self.size, rows * self.columns))
            else:
                firsts = self.scattered.first_of_row[rows::rows]
                ends = np.searchsorted(self.scattered.places, firsts).tolist()
        for start, end in zip([0, *ends], [*ends, self.size], strict=True):
            yield slice(start, end)

    def columns_of(self, part: slice) -> Ints:
        """Return the matrix column of each entry in `part`; 0 if there is no matrix."""
        if not self.columns:
            return np.zeros(part.stop - part.start, np.int64)
        if self.scattered is None:
            return np.arange(part.start, part.stop) % self.columns
        return self.scattered.column[self.scattered.places[part] % self.scattered.row_size]

    def cells_of(self, part: slice) -> Ints:
        """Return the matrix cell, counted row by row, of each entry in `part`."""
        if self.scattered is None:
            return np.arange(part.start, part.stop)
        rows = self.scattered.row[self.scattered.places[part] // self.scattered.row_size]
        return rows.astype(np.int64) * self.columns + self.columns_of(part)

    def part_of(self, cells: slice) -> slice:
        """Return the range of the tensor's entries in these whole rows of its matrix."""
        if self.scattered is None:
            return cells
        firsts = self.scattered.first_of_row[[cells.start // self.columns, cells.stop // self.columns - 1]]
        firsts += np.array([0, self.scattered.row_size], np.int32)
        start, stop = np.searchsorted(self.scattered.places, firsts).tolist()
        return slice(start, stop)


def tensors_of(known: Known, count: int) -> Iterator[Tensor]:
    """Yield the tensors to which a patch of `count` entries belongs."""
    for start, stop, row_size in known.parts(count):
        yield _tensor(start, stop, row_size, None if known.places is None else known.places[start:stop])


def _tensor(start: int, stop: int, row_size: int, places: Numbers | None) -> Tensor:
    size = stop - start
    if row_size <= 1:
        return Tensor(start, stop)
    if places is None:
        fills_rows = size % row_size == 0
        return Tensor(start, stop, size // row_size, row_size) if fills_rows else Tensor(start, stop)
    has_row = np.zeros(int(places[-1]) // row_size + 1, np.bool_)
    has_column = np.zeros(row_size, np.bool_)
    for chunk in chunks(size):
        rows = places[chunk] // row_size
        has_row[rows] = True
        has_column[places[chunk] - rows * row_size] = True
    # same type as `places`, so that `searchsorted` does not copy these
    rows_there = np.flatnonzero(has_row).astype(np.int32)
    columns = int(np.count_nonzero(has_column))
    if size == rows_there.size * columns:
        return Tensor(start, stop, rows_there.size, columns)
    scattered = Scattered(places, row_size, rows_there * row_size, _numbered(has_row), _numbered(has_column))
    return Tensor(start, stop, rows_there.size, columns, scattered)


def _numbered(there: NDArray[np.bool_]) -> Numbers:
    """Number the marked rows or columns 0, 1, 2, ..."""
    return np.cumsum(there, dtype=np.int32) - 1


def changes_of(tensor: Tensor, products: list[Product]) -> Iterator[tuple[slice, Steps]]:
    """Yield the sum of the products in parts: a range of the tensor's entries, and their changes in steps."""
    for cells, steps in sum_of(products, tensor.rows, tensor.columns):
        part = tensor.part_of(cells)
        yield part, steps if tensor.scattered is None else steps[tensor.cells_of(part) - cells.start]
