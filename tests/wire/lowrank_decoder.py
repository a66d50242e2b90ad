"""A decoder of docs/wire.md's `lowrank` in plain Python, written from that page: no numpy, no product.

Arrays are lists, as in the decoder of `sparse`, whose range code and lb these are; flags are those of masks.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.wire.mask_decoder import flags_of, limited
from tests.wire.sparse_decoder import EIGHTHS, Source, float32, log4

FIRST = (-36, -36, -36, -28, -19, -13, -9, -5, -2, 1, 4, 6, 8, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
FURTHER = (-16, -16, -16, -16, -16, -16, -16, -11, -7, -3, 0, 2, 5, 7, 9, 12, 14, 16, 18, 20, 22, 24, 24, 24)
POWERS = (16384, 19484, 23170, 27554)


def level_flags(source: Source, levels: list[int]) -> list[bool]:
    """Flags of these levels: level after level, of each those that have it, in their order."""
    found = [False] * len(levels)
    for level in sorted(set(levels)):
        members = [at for at, one in enumerate(levels) if one == level]
        for at, flag in zip(members, flags_of(source, len(members), level), strict=True):
            found[at] = flag
    return found


def counts(odds: int) -> list[int]:
    power = POWERS[odds % 4]
    ratio = power << odds // 4 if odds >= 0 else power >> -(odds // 4)
    yes = 512 * ratio // (ratio + 16384) + 1
    return [yes, 514 - yes]


@dataclass
class Integers:
    source: Source
    counts: list[list[list[int]]] = field(init=False)  # by kind of answer and by what is expected: [yes, no]

    def __post_init__(self) -> None:
        self.counts = [[counts(odds) for odds in (FURTHER if kind else FIRST)] for kind in range(4)]

    def read(self, expected: list[int]) -> list[int]:
        classes = [min(max(one // 4 + 8, 0), 23) for one in expected]
        found, members = [0] * len(expected), list(range(len(expected)))
        for answer in range(15):
            kind = self.counts[min(answer, 3)]
            levels = [limited(log4(yes) - log4(no)) for yes, no in kind]
            flags = level_flags(self.source, [levels[classes[at]] for at in members])
            for at, flag in zip(members, flags, strict=True):
                kind[classes[at]][0 if flag else 1] += 64
                found[at] += flag
            members = [at for at, flag in zip(members, flags, strict=True) if flag]
            if not members:
                break
        for at in members:
            found[at] += self.source.number(15)
            if found[at] > 16383:
                raise ValueError("an integer beyond all")
        nonzero = [at for at, one in enumerate(found) if one]
        for at, negative in zip(nonzero, level_flags(self.source, [0] * len(nonzero)), strict=True):
            found[at] *= -1 if negative else 1
        return found


@dataclass
class Busy:
    squares: list[int]

    def levels(self) -> list[int]:
        size, total = len(self.squares), sum(self.squares)
        if not total:
            return [0] * size
        own = [min(one, 2**50 // (4 * size)) for one in self.squares]
        total = min(total, 2**50)
        return [log4(4 * size * one + total) - log4(5 * total) for one in own]

    def add(self, integers: list[int]) -> None:
        for at, one in enumerate(integers):
            self.squares[at % len(self.squares)] += one * one


def columns_of(size: int, row_size: int, places: list[int] | None) -> int:
    if row_size < 2:
        return 0
    places = places or list(range(size))
    columns = sum(one // row_size == places[0] // row_size for one in places)
    if size % columns:
        return 0
    rows = [places[at : at + columns] for at in range(0, size, columns)]
    first = [one % row_size for one in rows[0]]
    alike = all(
        one[0] // row_size == one[-1] // row_size and [each % row_size for each in one] == first
        for one in rows
    )
    return columns if alike else 0


def products(source: Source, integers: Integers, rows: int, columns: int) -> list[float]:
    number = source.number(9) + 1
    most = min(255, (rows * columns - 1) // (rows + columns)) if min(rows, columns) > 4 else 0
    if number > most:
        raise ValueError("too many products")
    of_rows, of_columns = Busy([0] * rows), Busy([0] * columns)
    total = [0] * (rows * columns)
    for _ in range(number):
        octaves = source.even(15)
        factors = []
        for busy in (of_rows, of_columns):
            levels = busy.levels()
            factors.append(integers.read([8 * octaves - log4(len(levels)) + one for one in levels]))
            busy.add(factors[-1])
            if not any(factors[-1]):
                raise ValueError("a product that is 0")
        for row, left in enumerate(factors[0]):
            for column, right in enumerate(factors[1]):
                total[row * columns + column] += left * right << 14 - octaves
    return [one / 2**14 for one in total]


def entries(source: Source, integers: Integers, size: int, columns: int) -> list[float]:
    bundle, found = columns * -(-64 // columns) if columns else 256, list[int]()
    busy = Busy([0] * (columns or 1))
    for start in range(0, size, bundle):
        length, square = min(bundle, size - start), source.even(25)
        here = [0] * length
        if square:
            levels = busy.levels()
            here = integers.read([4 * (square - 9) + levels[at % len(levels)] for at in range(length)])
            busy.add(here)
        found += here
    return [float(one) for one in found]


def decode(
    data: bytes,
    count: int,
    base: Sequence[float] | None,
    tensors: Sequence[int],
    row_sizes: Sequence[int],
    places: Sequence[int] | None,
) -> list[float]:
    """The values that `lowrank` wrote."""
    source, values = Source(data), [0.0] * count if base is None else list(base)
    if source.even(8) != (base is not None):
        raise ValueError("another base")
    eighths = source.even(2216)
    step = float32(EIGHTHS[eighths % 8] * 2.0 ** (eighths // 8 - 164))
    of_products, of_entries = Integers(source), Integers(source)
    numbers, start = list(tensors) or [0] * count, 0
    while start < count:
        stop = start + numbers.count(numbers[start])
        row_size = row_sizes[numbers[start]] if row_sizes else 0
        columns = columns_of(stop - start, row_size, None if places is None else list(places[start:stop]))
        kind, changes = source.even(3), list[float]()
        if kind == 1:
            changes = entries(source, of_entries, stop - start, columns)
        elif kind == 2:
            rows = (stop - start) // columns if columns else 0
            changes = products(source, of_products, rows, columns)
        for at, change in enumerate(changes, start):
            values[at] = float32(values[at] + float32(change * step))
        start = stop
    if source.at < len(data):
        raise ValueError("something follows")
    return [struct.unpack("<f", struct.pack("<f", one))[0] for one in values]
