"""What `lowrank` writes of a tensor: nothing, its entries, or a few outer products."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.outer_products import (
    MAX_OCTAVES,
    MAX_PRODUCTS,
    Product,
    Steps,
    products_of,
    rounded_down,
    sum_of,
)
from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.entropy.small_integers import IntegerReader, IntegerWriter

_NOTHING, _ENTRIES, _PRODUCTS, _KINDS = 0, 1, 2, 3
_NARROW = 4  # rows or columns, up to which a matrix is written by its entries
_BUNDLE = 64  # entries, at least, whose size is said before them
_BUNDLE_UNKNOWN = 256  # where rows are not known
_BUNDLE_SQUARES = 25  # 0: all are 0; else octaves of the mean square, from 2^-8
_MOST_SQUARES = 1 << 50

Parts = Iterator[tuple[slice, Steps]]  # entries of the patch, and their changes in steps


@dataclass(frozen=True)
class Tensor:
    """The entries of a patch that are of one tensor.

    Attributes:
        start, stop: which entries of the patch these are.
        columns: of the matrix that they are, row by row; 0: they are none.
    """

    start: int
    stop: int
    columns: int

    @property
    def rows(self) -> int:
        return (self.stop - self.start) // self.columns if self.columns else 0

    @property
    def most_products(self) -> int:
        """With more, its products would be more numbers than it has itself."""
        if min(self.rows, self.columns) <= _NARROW:
            return 0
        return min(MAX_PRODUCTS, (self.rows * self.columns - 1) // (self.rows + self.columns))

    def bundles(self) -> Iterator[slice]:
        """Neighbours, from its first entry on, whose size is said together: whole rows where there are."""
        size = self.columns * -(-_BUNDLE // self.columns) if self.columns else _BUNDLE_UNKNOWN
        for start in range(0, self.stop - self.start, size):
            yield slice(start, min(start + size, self.stop - self.start))


def tensors_of(known: Known, count: int) -> Iterator[Tensor]:
    """The tensors of a patch of so many entries."""
    start = 0
    while start < count:
        number = known.tensors[start] if known.tensors.size else 0
        stop = int(np.searchsorted(known.tensors, number, "right")) if known.tensors.size else count
        row_size = known.row_sizes[number] if known.row_sizes else 0
        places = None if known.places is None else known.places[start:stop]
        yield Tensor(start, stop, _columns(stop - start, row_size, places))
        start = stop


def _columns(size: int, row_size: int, places: NDArray[np.int32] | None) -> int:
    """How many entries each row has, all of the same columns; 0: these are not the entries of a matrix."""
    if row_size <= 1:
        return 0
    if places is None:
        return row_size if size % row_size == 0 else 0
    columns = int(np.searchsorted(places, (places[0] // row_size + 1) * row_size))
    if size % columns:
        return 0
    grid = places.reshape(-1, columns)
    in_row = grid - grid[:, :1] // row_size * row_size
    return columns if (in_row == in_row[0]).all() else 0


@dataclass
class _Busy:
    """How large the integers of each row, or each column, have been so far, against all."""

    size: int
    _squares: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._squares = np.zeros(self.size, np.int64)

    def levels(self) -> Ints:
        """4 log2 of their mean squares over that of all, a fifth of which counts as seen, shape (size,)."""
        total = int(self._squares.sum())
        if not total:
            return np.zeros(self.size, np.int64)
        own = np.minimum(self._squares, _MOST_SQUARES // (4 * self.size))
        total = min(total, _MOST_SQUARES)
        return quarter_octaves(4 * self.size * own + total) - quarter_octaves(np.array([5 * total]))

    def add(self, integers: Ints) -> None:
        """Integers of rows of such, one after the other, shape (k * size,)."""
        self._squares += np.square(integers, dtype=np.int64).reshape(-1, self.size).sum(0)


def _expected(octaves: int, busy: _Busy) -> Ints:
    """Of a factor of a product whose norm is about 2^octaves."""
    return 8 * octaves - quarter_octaves(np.array([busy.size])) + busy.levels()


@dataclass
class TensorWriter:
    """Writes tensor after tensor.

    Attributes:
        out: where to.
    """

    out: RangeEncoder
    _of_products: IntegerWriter = field(init=False)
    _of_entries: IntegerWriter = field(init=False)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerWriter(self.out), IntegerWriter(self.out)

    def write(self, tensor: Tensor, steps: FlatArray) -> Parts:
        """Write one tensor's changes, in steps and finite, shape (stop - start,).

        Returns:
            What was written, as it will be read.
        """
        entries, products = rounded_down(steps), list[Product]()
        if tensor.most_products:
            products = products_of(steps.reshape(tensor.rows, tensor.columns), tensor.most_products)
        if products and _bits_of_products(products) < _bits(entries):
            self.out.write(_PRODUCTS, 1, _KINDS)
            self._write_products(tensor, products)
            return _moved(tensor, sum_of(products, tensor.rows, tensor.columns))
        if not entries.any():
            self.out.write(_NOTHING, 1, _KINDS)
            return iter(())
        self.out.write(_ENTRIES, 1, _KINDS)
        self._write_entries(tensor, entries)
        return iter([(slice(tensor.start, tensor.stop), entries.astype(np.float64))])

    def _write_products(self, tensor: Tensor, products: list[Product]) -> None:
        self.out.write_number(len(products) - 1, MAX_PRODUCTS.bit_length() + 1)
        busy_rows, busy_columns = _Busy(tensor.rows), _Busy(tensor.columns)
        for product in products:
            self.out.write(product.octaves, 1, MAX_OCTAVES + 1)
            for factor, busy in ((product.left, busy_rows), (product.right, busy_columns)):
                self._of_products.write(factor, _expected(product.octaves, busy))
                busy.add(factor)

    def _write_entries(self, tensor: Tensor, entries: Ints) -> None:
        busy_columns = _Busy(tensor.columns or 1)
        for bundle in tensor.bundles():
            here = entries[bundle]
            square = _square_of(here)
            self.out.write(square, 1, _BUNDLE_SQUARES)
            if square:
                self._of_entries.write(here, _of_bundle(square, here.size, busy_columns))
                busy_columns.add(here)


@dataclass
class TensorReader:
    """Reads what `TensorWriter` wrote.

    Attributes:
        data: where from.
    """

    data: RangeDecoder
    _of_products: IntegerReader = field(init=False)
    _of_entries: IntegerReader = field(init=False)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerReader(self.data), IntegerReader(self.data)

    def read(self, tensor: Tensor) -> Parts:
        """One tensor's changes. Raises PacketCorrupt, PacketTruncated."""
        kind = self.data.read_even(_KINDS)
        if kind == _PRODUCTS:
            products = self._read_products(tensor)
            yield from _moved(tensor, sum_of(products, tensor.rows, tensor.columns))
        elif kind == _ENTRIES:
            yield from self._read_entries(tensor)

    def _read_products(self, tensor: Tensor) -> list[Product]:
        number = self.data.read_number(MAX_PRODUCTS.bit_length() + 1) + 1
        if number > tensor.most_products:
            raise PacketCorrupt(f"{number} products of a tensor that has {tensor.most_products} at most")
        busy_rows, busy_columns = _Busy(tensor.rows), _Busy(tensor.columns)
        products = []
        for _ in range(number):
            octaves = self.data.read_even(MAX_OCTAVES + 1)
            left = self._of_products.read(_expected(octaves, busy_rows))
            busy_rows.add(left)
            right = self._of_products.read(_expected(octaves, busy_columns))
            busy_columns.add(right)
            if not left.any() or not right.any():
                raise PacketCorrupt("an outer product that is 0")
            products.append(Product(octaves, left, right))
        return products

    def _read_entries(self, tensor: Tensor) -> Parts:
        busy_columns = _Busy(tensor.columns or 1)
        for bundle in tensor.bundles():
            square = self.data.read_even(_BUNDLE_SQUARES)
            if square:
                here = self._of_entries.read(_of_bundle(square, bundle.stop - bundle.start, busy_columns))
                busy_columns.add(here)
                yield slice(tensor.start + bundle.start, tensor.start + bundle.stop), here.astype(np.float64)


def _moved(tensor: Tensor, parts: Parts) -> Parts:
    for part, steps in parts:
        yield slice(tensor.start + part.start, tensor.start + part.stop), steps


def _square_of(bundle: Ints) -> int:
    """Octaves of the mean square from 2^-8, plus 1; 0: there is none."""
    total = int(np.square(bundle, dtype=np.int64).sum())
    if not total:
        return 0
    level, size = quarter_octaves(np.array([total, bundle.size])).tolist()
    octaves: int = (level - size) // PER_OCTAVE
    return max(1, min(octaves + 9, _BUNDLE_SQUARES - 1))


def _of_bundle(square: int, size: int, busy_columns: _Busy) -> Ints:
    """What is expected of a bundle's entries."""
    return 4 * (square - 9) + np.resize(busy_columns.levels(), size)


def _bits_of_products(products: list[Product]) -> float:
    return sum(_bits(factor) for one in products for factor in (one.left, one.right))


def _bits(integers: Ints) -> float:
    """About what they take: their entropy, and 4 bits to tell how often each of them is there."""
    counts = np.unique(integers, return_counts=True)[1]
    entropy = float(-(counts * np.log2(counts / integers.size)).sum())
    return entropy + 4 * counts.size
