"""What `lowrank` writes of a tensor: nothing, a few outer products, its entries, or both."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.lowrank_choice import cheapest
from fleetune.protocols.update.encodings.lowrank_contexts import BundleSizes, BusyColumns, BusyLines, sizes_of
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.encodings.outer_products import MAX_OCTAVES, MAX_PRODUCTS, Product, Steps
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.entropy.small_integers import MOST_BATCHES, IntegerReader, IntegerWriter

_AT_ONCE = 1 << 15  # integers that are put together, about
_ENTRIES, _PRODUCTS, _KINDS = 1, 2, 4  # 0: nothing changed; 3: products, and entries of what they leave

Parts = Iterator[tuple[slice, Steps]]  # entries of the patch, and their changes in steps


@dataclass
class TensorWriter:
    """Writes tensor after tensor.

    Attributes:
        out: where to.
    """

    out: RangeEncoder
    _of_products: IntegerWriter = field(init=False)
    _of_entries: IntegerWriter = field(init=False)
    _sizes: BundleSizes = field(init=False, default_factory=BundleSizes)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerWriter(self.out), IntegerWriter(self.out)

    def write(self, tensor: Tensor, steps: FlatArray) -> Parts:
        """Write one tensor's changes, in steps and finite, shape (size,).

        Returns:
            What was written, as it will be read.
        """
        products, entries = cheapest(tensor, steps)
        self.out.write(_PRODUCTS * bool(products) + _ENTRIES * (entries is not None), 1, _KINDS)
        parts = list[Parts]()
        if products:
            self._write_products(tensor, products)
            parts.append(changes_of(tensor, products))
        if entries is not None:
            self._write_entries(tensor, entries)
            parts.append(iter([(slice(0, tensor.size), entries.astype(np.float64))]))
        return _of_patch(tensor, chain(*parts))

    def _write_products(self, tensor: Tensor, products: list[Product]) -> None:
        self.out.write_number(len(products) - 1, MAX_PRODUCTS.bit_length() + 1)
        busy_rows, busy_columns = BusyLines(tensor.rows), BusyLines(tensor.columns)
        at_once = max(1, _AT_ONCE // (tensor.rows + tensor.columns))
        for start in range(0, len(products), at_once):
            some = products[start : start + at_once]
            octaves = np.array([one.octaves for one in some])
            left, right = np.stack([one.left for one in some]), np.stack([one.right for one in some])
            squares = [busy_rows.passed(octaves, left), busy_columns.passed(octaves, right)]
            self._of_products.write_batches(
                np.hstack([left, right]).reshape(-1),
                np.hstack(squares).reshape(-1),
                [tensor.rows, tensor.columns] * len(some),
                [head for one in some for head in ((one.octaves, 1, MAX_OCTAVES + 1), None)],
            )

    def _write_entries(self, tensor: Tensor, entries: Ints) -> None:
        busy = BusyColumns(max(1, tensor.columns))
        self._sizes.start()
        for bundles in _in_portions(tensor.bundles()):
            part = slice(bundles[0].start, bundles[-1].stop)
            starts = np.array([bundle.start for bundle in bundles]) - part.start
            here = entries[part]
            sizes = sizes_of(here, starts)
            lengths = np.where(sizes > 0, np.diff(starts, append=here.size), 0)
            there = np.repeat(sizes > 0, np.diff(starts, append=here.size))
            bundle, here = np.repeat(np.arange(sizes.size), lengths), here[there]
            expected = busy.passed(sizes, bundle, tensor.columns_of(part)[there], here)
            heads = [self._sizes.interval(size) for size in sizes.tolist()]
            self._of_entries.write_batches(here, expected, lengths.tolist(), heads)


def _in_portions(bundles: Iterator[slice]) -> Iterator[list[slice]]:
    """Bundles that are put together at once, for time; not all of them, for memory."""
    portion = list[slice]()
    for bundle in bundles:
        if portion and (bundle.stop - portion[0].start > _AT_ONCE or len(portion) == MOST_BATCHES):
            yield portion
            portion = []
        portion.append(bundle)
    if portion:
        yield portion


@dataclass
class TensorReader:
    """Reads what `TensorWriter` wrote.

    Attributes:
        data: where from.
    """

    data: RangeDecoder
    _of_products: IntegerReader = field(init=False)
    _of_entries: IntegerReader = field(init=False)
    _sizes: BundleSizes = field(init=False, default_factory=BundleSizes)

    def __post_init__(self) -> None:
        self._of_products, self._of_entries = IntegerReader(self.data), IntegerReader(self.data)

    def read(self, tensor: Tensor) -> Parts:
        """One tensor's changes, as they are read. Raises PacketCorrupt, PacketTruncated."""
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
