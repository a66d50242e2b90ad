"""Bytes that `lowrank` writes for a tensor: no change, outer products, entries, or both."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import chunks
from fleetune.protocols.update.encodings.lowrank_choice import cheapest
from fleetune.protocols.update.encodings.lowrank_contexts import BundleSizes, BusyColumns, BusyLines, sizes_of
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder, intervals_of
from fleetune.protocols.update.entropy.small_integers import MOST_TURNS, TURN, IntegerReader, IntegerWriter
from fleetune.protocols.update.entropy.symbols import Interval, Symbols, symbols_in_order, write_symbols
from fleetune.protocols.update.products.outer_products import MAX_OCTAVES, MAX_PRODUCTS, Product, Steps

_AT_ONCE = 1 << 15  # approximate number of integers that are coded together
_ENTRIES, _PRODUCTS, _KINDS = 1, 2, 4  # 0: no change; 3: products, then entries for the remainder

Parts = Iterator[tuple[slice, Steps]]  # (range of entries in the patch, their changes in steps)


@dataclass
class _Batches:
    """Integers that wait until enough are there to be coded together."""

    integers: list[Ints] = field(default_factory=list)
    squares: list[Ints] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def symbols(self, writer: IntegerWriter) -> list[Symbols]:
        if not self.sizes:
            return []
        numbers, squares = np.concatenate(self.integers), np.concatenate(self.squares)
        return writer.symbols(numbers, squares, self.sizes, self.turns)


@dataclass
class TensorWriter:
    """Writes tensor after tensor. Symbols wait until enough are there to be coded together.

    Attributes:
        out: range encoder that receives the symbols.
    """

    out: RangeEncoder
    _of_products: IntegerWriter = field(init=False)
    _of_entries: IntegerWriter = field(init=False)
    _sizes: BundleSizes = field(init=False, default_factory=BundleSizes)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerWriter(self.out), IntegerWriter(self.out)
        self._start()

    def _start(self) -> None:
        self._turn, self._waiting = 0, 0
        self._others = list[tuple[int, int, int, int]]()
        self._products, self._entries = _Batches(), _Batches()

    def write(self, tensor: Tensor, steps: FlatArray) -> Parts:
        """Write the changes of one tensor; return the changes that a reader will decode.

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
        """Write all waiting symbols."""
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
        """Reserve the place of the next `size` integers; the caller appends the integers to `batches`."""
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
    """Groups of bundles that are coded together. Groups save time; their limited size saves memory."""
    portion = list[slice]()
    for bundle in bundles:
        if portion and bundle.stop - portion[0].start > _AT_ONCE:
            yield portion
            portion = []
        portion.append(bundle)
    if portion:
        yield portion


@dataclass
class TensorReader:
    """Reads what `TensorWriter` wrote.

    Attributes:
        data: range decoder that supplies the symbols.
    """

    data: RangeDecoder
    _of_products: IntegerReader = field(init=False)
    _of_entries: IntegerReader = field(init=False)
    _sizes: BundleSizes = field(init=False, default_factory=BundleSizes)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerReader(self.data), IntegerReader(self.data)

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
            raise PacketCorrupt(f"{number} products of a tensor that has {tensor.most_products} at most")
        busy_rows, busy_columns = BusyLines(tensor.rows), BusyLines(tensor.columns)
        products = []
        for _ in range(number):
            octaves = self.data.read_even(MAX_OCTAVES + 1)
            left = self._of_products.read(busy_rows.expected(octaves))
            busy_rows.add(left)
            right = self._of_products.read(busy_columns.expected(octaves))
            busy_columns.add(right)
            if not left.any() or not right.any():
                raise PacketCorrupt("an outer product that is 0")
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
