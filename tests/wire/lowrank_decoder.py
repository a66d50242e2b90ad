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
        self.squares = [before + one * one for before, one in zip(self.squares, integers, strict=True)]


@dataclass
class Sizes:
    source: Source
    counts: list[list[int]] = field(init=False)  # by the bundle before and by this one

    def __post_init__(self) -> None:
        self.counts = [[max(1, 16 >> abs(one - before)) for one in range(25)] for before in range(25)]

    def read(self, before: int) -> int:
        counts = self.counts[before]
        size = self.source.symbol(counts)
        counts[size] += 8
        return size


def matrix_of(size: int, row_size: int, places: list[int] | None) -> list[tuple[int, int]] | None:
    """The row and the column of each entry in its matrix; None: there is none."""
    if row_size < 2 or (places is None and size % row_size):
        return None
    found = [divmod(place, row_size) for place in places or range(size)]
    rows, columns = (sorted(set(one)) for one in zip(*found, strict=True))
    row, column = ({one: at for at, one in enumerate(each)} for each in (rows, columns))
    return [(row[one], column[other]) for one, other in found]


def products(source: Source, integers: Integers, matrix: list[tuple[int, int]]) -> list[float]:
    rows, columns = (max(one) + 1 for one in zip(*matrix, strict=True))
    number = source.number(9) + 1
    most = min(255, (len(matrix) - 1) // (rows + columns)) if min(rows, columns) > 4 else 0
    if number > most:
        raise ValueError("too many products")
    of_rows, of_columns = Busy([0] * rows), Busy([0] * columns)
    total = [0] * len(matrix)
    for _ in range(number):
        octaves = source.even(15)
        factors = []
        for busy in (of_rows, of_columns):
            levels = busy.levels()
            factors.append(integers.read([8 * octaves - log4(len(levels)) + one for one in levels]))
            busy.add(factors[-1])
            if not any(factors[-1]):
                raise ValueError("a product that is 0")
        for at, (row, column) in enumerate(matrix):
            total[at] += factors[0][row] * factors[1][column] << 14 - octaves
    return [one / 2**14 for one in total]


def bundles_of(size: int, matrix: list[tuple[int, int]] | None) -> list[range]:
    if matrix is None:
        return [range(start, min(start + 256, size)) for start in range(0, size, 256)]
    rows, columns = (max(one) + 1 for one in zip(*matrix, strict=True))
    of_each = -(-max(64, columns // 8) * rows // size)
    numbers = [row // of_each for row, _ in matrix]
    return [
        range(numbers.index(one), numbers.index(one) + numbers.count(one)) for one in sorted(set(numbers))
    ]


def entries(
    source: Source, integers: Integers, sizes: Sizes, size: int, matrix: list[tuple[int, int]] | None
) -> list[float]:
    columns = [0] * size if matrix is None else [column for _, column in matrix]
    squares, seen = [0] * (max(columns) + 1), [0] * (max(columns) + 1)
    found, before = [0] * size, 0
    for bundle in bundles_of(size, matrix):
        before = sizes.read(before)
        if not before:
            continue
        total, of_all = sum(squares), sum(seen)
        levels = [0] * len(squares)
        if total:
            total = min(total, 2**50)
            levels = [
                log4(min(q, 2**50 // of_all) * of_all + 2 * total) - log4(total) - log4(s + 2)
                for q, s in zip(squares, seen, strict=True)
            ]
        here = integers.read([4 * (before - 9) + levels[columns[at]] for at in bundle])
        for at, one in zip(bundle, here, strict=True):
            found[at] = one
            squares[columns[at]] += one * one
            seen[columns[at]] += 1
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
    of_products, of_entries, sizes = Integers(source), Integers(source), Sizes(source)
    numbers, start = list(tensors) or [0] * count, 0
    while start < count:
        stop = start + numbers.count(numbers[start])
        row_size = row_sizes[numbers[start]] if row_sizes else 0
        matrix = matrix_of(stop - start, row_size, None if places is None else list(places[start:stop]))
        kind, changes = source.even(4), list[list[float]]()
        if kind >= 2:
            if matrix is None:
                raise ValueError("products of no matrix")
            changes.append(products(source, of_products, matrix))
        if kind % 2:
            changes.append(entries(source, of_entries, sizes, stop - start, matrix))
        for at, change in (one for each in changes for one in enumerate(each, start)):
            values[at] = float32(values[at] + float32(change * step))
        start = stop
    if source.at < len(data):
        raise ValueError("something follows")
    return [struct.unpack("<f", struct.pack("<f", one))[0] for one in values]
