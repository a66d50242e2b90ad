"""The bytes that `lowrank` writes for a tensor: no change, outer products, entries, or both.

Integers are predicted from earlier integers of their row, column or bundle.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import chunks
from fleetune.protocols.update.encodings.lowrank_choice import cheapest
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.entropy.octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import (
    Interval,
    RangeDecoder,
    RangeEncoder,
    Symbols,
    intervals_of,
    symbols_in_order,
    write_symbols,
)
from fleetune.protocols.update.entropy.small_integers import MOST_TURNS, TURN, IntegerReader, IntegerWriter
from fleetune.protocols.update.products import MAX_OCTAVES, MAX_PRODUCTS, Product, Steps

_SIZES = 25  # size classes of bundles: 0 if all entries are 0, else octaves of the mean square, from 2^-8 on
_SIZE_COUNTS = 8  # weight of an observed size class; the likeliest class starts with a count of 16
_MOST_SQUARES = 1 << 50
_BELIEVED = 2  # prior of each column: this many entries with the mean square of all


class BusyLines:
    """Predicts the size of a factor's integers, row by row or column by column, from the products so far.

    Attributes:
        size: number of rows or columns.
    """

    def __init__(self, size: int) -> None:
        self.size, self._squares = size, np.zeros(size, np.int64)

    def expected(self, octaves: int) -> Ints:
        """Return 4 log2 of the expected squares of a factor, for a product with a norm of about 2^octaves."""
        return 8 * octaves - quarter_octaves(np.array([self.size])) + _line_levels(self._squares)

    def add(self, factor: Ints) -> None:
        """Count a factor that was written or read, shape (size,)."""
        self._squares += np.square(factor, dtype=np.int64)

    def passed(self, octaves: Ints, factors: Ints) -> Ints:
        """Return 4 log2 of the expected squares of several products' factors, each predicted from earlier
        ones.

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
    """Return 4 log2 of each line's mean square relative to all lines, shape (..., lines).

    The mean of all lines is a prior with a weight of one fifth.
    """
    size, total = squares.shape[-1], squares.sum(axis=-1, keepdims=True)
    own, most = np.minimum(squares, _MOST_SQUARES // (4 * size)), np.clip(total, 1, _MOST_SQUARES)
    levels = quarter_octaves(4 * size * own + most) - quarter_octaves(5 * most)
    return np.where(total > 0, levels, 0)


class BusyColumns:
    """Predicts the size of the entries of each column from the entries so far.

    Attributes:
        size: number of columns, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size, self._squares, self._seen = size, np.zeros(size, np.int64), np.zeros(size, np.int64)

    def expected(self, size: int, columns: Ints) -> Ints:
        """Return 4 log2 of the expected squares of a bundle's entries, same shape as `columns`.

        `size` is the size class of the bundle.
        """
        return PER_OCTAVE * (size - 9) + _column_levels(self._squares, self._seen)[columns]

    def add(self, columns: Ints, entries: Ints) -> None:
        """Count entries that were written or read, with their columns, shapes (k,)."""
        squares = np.square(entries, dtype=np.float64)  # exact: whole numbers below 2^53
        self._squares += np.bincount(columns, squares, self.size).astype(np.int64)
        self._seen += np.bincount(columns, minlength=self.size)

    def passed(self, sizes: Ints, bundle: Ints, columns: Ints, entries: Ints) -> Ints:
        """Return 4 log2 of the expected squares of several bundles' entries, each predicted from earlier
        bundles.

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
    """Return 4 log2 of each column's mean square relative to all columns; shapes (..., columns)."""
    total, most_seen = squares.sum(axis=-1, keepdims=True), seen.sum(axis=-1, keepdims=True)
    own = np.minimum(squares, _MOST_SQUARES // np.maximum(most_seen, 1))
    most = np.clip(total, 1, _MOST_SQUARES)
    levels = quarter_octaves(own * most_seen + _BELIEVED * most) - quarter_octaves(most)
    return np.where(total > 0, levels - quarter_octaves(seen + _BELIEVED), 0)


def sizes_of(entries: Ints, starts: Ints) -> Ints:
    """Return each bundle's size class: octaves of its mean square from 2^-8, plus 1; 0 if all entries are 0.

    Args:
        entries: entries of all bundles, shape (n,), n at least 1.
        starts: start of each bundle, ascending from 0, shape (bundles,).
    """
    total = np.add.reduceat(np.square(entries, dtype=np.int64), starts)
    count = np.diff(starts, append=entries.size)
    octaves = (quarter_octaves(np.maximum(total, 1)) - quarter_octaves(count)) // PER_OCTAVE
    return np.where(total > 0, np.clip(octaves + 9, 1, _SIZES - 1), 0)


class BundleSizes:
    """Predicts the size class of a bundle from that of the bundle before."""

    def __init__(self) -> None:
        near = [max(1, 16 >> abs(away)) for away in range(1 - _SIZES, _SIZES)]
        self._counts = [near[_SIZES - 1 - one : 2 * _SIZES - 1 - one] for one in range(_SIZES)]
        self.start()

    def start(self) -> None:
        """Begin a tensor: its first bundle follows class 0."""
        self._before = 0

    def interval(self, size: int) -> Interval:
        """Return start, size and total of the symbol for the size class of the next bundle."""
        counts = self._counts[self._before]
        found = sum(counts[:size]), counts[size], sum(counts)
        self._add(size)
        return found

    def read(self, data: RangeDecoder) -> int:
        """Return the size class of the next bundle, which stands for the mean square of its numbers.

        Raises PacketCorrupt, PacketTruncated.
        """
        size = data.read_counted(self._counts[self._before])
        self._add(size)
        return size

    def _add(self, size: int) -> None:
        self._counts[self._before][size] += _SIZE_COUNTS
        self._before = size


_AT_ONCE = 1 << 15  # approximate number of integers that are coded together
_ENTRIES, _PRODUCTS, _KINDS = 1, 2, 4  # 0: no change; 3: products, then entries for the remainder

Parts = Iterator[tuple[slice, Steps]]  # (range of entries in the patch, their changes in steps)


@dataclass
class _Batches:
    """Integers that are collected until there are enough to code them together."""

    integers: list[Ints] = field(default_factory=list)
    squares: list[Ints] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def symbols(self, writer: IntegerWriter) -> list[Symbols]:
        if not self.sizes:
            return []
        numbers, squares = np.concatenate(self.integers), np.concatenate(self.squares)
        return writer.symbols(numbers, squares, self.sizes, self.turns)


class TensorWriter:
    """Writes tensor after tensor. Symbols are collected until there are enough to code them together.

    Attributes:
        out: range encoder that receives the symbols.
    """

    def __init__(self, out: RangeEncoder) -> None:
        self.out, self._sizes = out, BundleSizes()
        self._of_products, self._of_entries = IntegerWriter(out), IntegerWriter(out)
        self._start()

    def _start(self) -> None:
        self._turn, self._waiting = 0, 0
        self._others = list[tuple[int, int, int, int]]()
        self._products, self._entries = _Batches(), _Batches()

    def write(self, tensor: Tensor, steps: FlatArray) -> Parts:
        """Write the changes of one tensor, and return the changes that a reader will decode.

        Args:
            tensor: the tensor's place in the patch.
            steps: its changes in multiples of the quantisation step, finite, shape (size,).
        """
        products, entries = cheapest(tensor, steps)
        self._put((_PRODUCTS * bool(products) + _ENTRIES * (entries is not None), 1, _KINDS))
        parts = list[Parts]()
        if products:
            self._write_products(tensor, products)
            parts.append(changes_of(tensor, products))
        if entries is not None:
            self._write_entries(tensor, entries)
            parts.append((chunk, entries[chunk].astype(np.float64)) for chunk in chunks(tensor.size))
        return _of_patch(tensor, chain(*parts))

    def finish(self) -> None:
        """Write all collected symbols."""
        others = symbols_in_order(self._others)
        of_products, of_entries = self._products, self._entries
        write_symbols(
            self.out,
            [others, *of_products.symbols(self._of_products), *of_entries.symbols(self._of_entries)],
        )
        self._start()

    def _put(self, interval: Interval) -> None:
        """Add one single symbol."""
        self._others.append((self._turn * TURN, *interval))
        self._turn += 1
        if self._turn + 3 > MOST_TURNS or self._waiting > _AT_ONCE:  # a product takes three turns
            self.finish()

    def _put_batch(self, batches: _Batches, size: int) -> None:
        """Reserve the position of the next `size` integers; the caller appends the integers to `batches`."""
        batches.sizes.append(size)
        batches.turns.append(self._turn)
        self._turn += 1
        self._waiting += size

    def _write_products(self, tensor: Tensor, products: list[Product]) -> None:
        for interval in intervals_of(len(products) - 1, MAX_PRODUCTS.bit_length() + 1):
            self._put(interval)
        busy_rows, busy_columns = BusyLines(tensor.rows), BusyLines(tensor.columns)
        at_once = max(1, _AT_ONCE // (tensor.rows + tensor.columns))
        for start in range(0, len(products), at_once):
            some = products[start : start + at_once]
            octaves = np.array([one.octaves for one in some])
            left, right = np.stack([one.left for one in some]), np.stack([one.right for one in some])
            of_left, of_right = busy_rows.passed(octaves, left), busy_columns.passed(octaves, right)
            for number, one in enumerate(some):
                self._put((one.octaves, 1, MAX_OCTAVES + 1))
                self._put_batch(self._products, tensor.rows)
                self._put_batch(self._products, tensor.columns)
                self._products.integers += [one.left, one.right]
                self._products.squares += [of_left[number], of_right[number]]

    def _write_entries(self, tensor: Tensor, entries: Ints) -> None:
        busy = BusyColumns(max(1, tensor.columns))
        self._sizes.start()
        for bundles in _in_portions(tensor.bundles()):
            part = slice(bundles[0].start, bundles[-1].stop)
            starts = np.array([bundle.start for bundle in bundles]) - part.start
            here, lengths = entries[part], np.diff(starts, append=part.stop - part.start)
            sizes = sizes_of(here, starts)
            there, bundle = np.repeat(sizes > 0, lengths), np.repeat(np.arange(sizes.size), lengths)
            here, columns = here[there], tensor.columns_of(part)[there]
            expected, end = busy.passed(sizes, bundle[there], columns, here), 0
            for size, length in zip(sizes.tolist(), lengths.tolist(), strict=True):
                self._put(self._sizes.interval(size))
                if size:
                    self._put_batch(self._entries, length)
                    begin, end = end, end + length
                    self._entries.integers.append(here[begin:end])
                    self._entries.squares.append(expected[begin:end])


def _in_portions(bundles: Iterator[slice]) -> Iterator[list[slice]]:
    """Yield groups of bundles that are coded together. Groups save time; their limited size saves memory."""
    portion = list[slice]()
    for bundle in bundles:
        if portion and bundle.stop - portion[0].start > _AT_ONCE:
            yield portion
            portion = []
        portion.append(bundle)
    if portion:
        yield portion


class TensorReader:
    """Reads what `TensorWriter` wrote.

    Attributes:
        data: range decoder that supplies the symbols.
    """

    def __init__(self, data: RangeDecoder) -> None:
        self.data, self._sizes = data, BundleSizes()
        self._of_products, self._of_entries = IntegerReader(data), IntegerReader(data)

    def read(self, tensor: Tensor) -> Parts:
        """Read the changes of one tensor, part by part. Raises PacketCorrupt, PacketTruncated."""
        kind = self.data.read_even(_KINDS)
        if kind & _PRODUCTS:
            yield from _of_patch(tensor, changes_of(tensor, self._read_products(tensor)))
        if kind & _ENTRIES:
            yield from _of_patch(tensor, self._read_entries(tensor))

    def _read_products(self, tensor: Tensor) -> list[Product]:
        number = self.data.read_number(MAX_PRODUCTS.bit_length() + 1) + 1
        if number > tensor.most_products:
            raise PacketCorrupt(
                f"{number} outer products, but the tensor can have at most {tensor.most_products}"
            )
        busy_rows, busy_columns = BusyLines(tensor.rows), BusyLines(tensor.columns)
        products = []
        for _ in range(number):
            octaves = self.data.read_even(MAX_OCTAVES + 1)
            left = self._of_products.read(busy_rows.expected(octaves))
            busy_rows.add(left)
            right = self._of_products.read(busy_columns.expected(octaves))
            busy_columns.add(right)
            if not left.any() or not right.any():
                raise PacketCorrupt("an outer product has a factor of zeros")
            products.append(Product(octaves, left, right))
        return products

    def _read_entries(self, tensor: Tensor) -> Parts:
        busy = BusyColumns(max(1, tensor.columns))
        self._sizes.start()
        for bundle in tensor.bundles():
            size = self._sizes.read(self.data)
            if size:
                columns = tensor.columns_of(bundle)
                here = self._of_entries.read(busy.expected(size, columns))
                busy.add(columns, here)
                yield bundle, here.astype(np.float64)


def _of_patch(tensor: Tensor, parts: Parts) -> Parts:
    for part, steps in parts:
        yield slice(tensor.start + part.start, tensor.start + part.stop), steps
