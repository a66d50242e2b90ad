"""A decoder of docs/wire.md's masks in plain Python, written from that page: no numpy, no product.

Arrays are lists; the range code and lb are those of `sparse`, and its decoder's.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.wire.sparse_decoder import Source, log4

BLOCK, MOST, TOTAL = 16384, 60, 65536
QUARTERS = (32768, 38968, 46341, 55109)


def surprise(level: int) -> int:
    """Of 2^32."""
    return 2**47 // (2**15 + (QUARTERS[abs(level) % 4] << abs(level) // 4))


def chance(level: int) -> int:
    """That a flag is true, of 65536."""
    return surprise(level) // TOTAL if level < 0 else TOTAL - surprise(level) // TOTAL


def limited(level: int) -> int:
    return min(max(level, -MOST), MOST)


def flags_of(source: Source, size: int, level: int) -> list[bool]:
    read = rare if abs(level) >= 12 else frequent
    return [one ^ (level > 0) for one in read(source, size, abs(level))]


def frequent(source: Source, size: int, level: int) -> list[bool]:
    p, found = surprise(level) // TOTAL, list[bool]()
    each = [max(1, p**k * (TOTAL - p) ** (8 - k) // 2**112) for k in range(9)]
    counts = [each[pattern.bit_count()] for pattern in range(256)]
    for _ in range(size // 8):
        pattern = source.symbol(counts)
        found += [bool(pattern >> bit & 1) for bit in range(7, -1, -1)]
    for _ in range(size % 8):
        found.append(source.symbol([p, TOTAL - p]) == 0)
    return found


def rare(source: Source, size: int, level: int) -> list[bool]:
    shift, found = level // 4 - 3, [False] * size
    none = 2**32 - surprise(level)
    for _ in range(shift):
        none = none * none // 2**32
    starts, x = [0], 2**32
    while len(starts) < 64 and x >= 2**22:
        x = x * none // 2**32
        starts.append(TOTAL - x // TOTAL)
    place = 0
    while place < size:
        last = min(len(starts) - 1, -(-(size - place) >> shift))
        value = source.value(TOTAL)
        cell = min(last, sum(start <= value for start in starts) - 1)
        end = TOTAL if cell == last else starts[cell + 1]
        source.take(starts[cell], end - starts[cell], TOTAL)
        place += cell << shift
        if cell < last:
            place += source.even(1 << shift)
            if place >= size:
                raise ValueError("behind the last flag of a level")
            found[place] = True
            place += 1
    return found


@dataclass
class Counts:
    size: int
    believed: int
    seen: list[int] = field(init=False)
    hits: list[int] = field(init=False)
    expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.seen, self.hits, self.expected = ([0] * self.size for _ in range(3))

    def shifts(self) -> list[int]:
        found = []
        for seen, hits, expected in zip(self.seen, self.hits, self.expected, strict=True):
            n, h, e, k = 16 * seen, 16 * hits, expected // 4096, 16 * self.believed
            found.append(log4(h + k) - log4(e + k) - log4(n - h + k) + log4(n - e + k))
        return found

    def add(self, member: int, flag: bool, level: int) -> None:
        self.seen[member] += 1
        self.hits[member] += flag
        self.expected[member] += chance(limited(level))


@dataclass
class Walk:
    source: Source
    kinds: Counts = field(default_factory=lambda: Counts(28 * 7 * 3, 2))
    seen: int = 0
    hits: int = 0

    def block(self, rows: list[int], columns: list[int], of_columns: Counts) -> list[bool]:
        size, stride = len(rows), 1
        while size > 16 * stride:
            stride *= 2
        flags, of_rows = [False] * size, Counts(max(rows) + 1, 1)
        first = list(range(0, size, stride))
        level = limited(log4(self.hits + 1) - log4(self.seen - self.hits + 1))
        read = flags_of(self.source, len(first), level)
        for at, flag in zip(first, read, strict=True):
            flags[at] = flag
            of_rows.add(rows[at], flag, level)
            of_columns.add(columns[at], flag, level)
        while stride > 1:
            stride //= 2
            self.finer(flags, stride, rows, columns, of_rows, of_columns)
        self.seen += size
        self.hits += sum(flags)
        return flags

    def finer(
        self,
        flags: list[bool],
        stride: int,
        rows: list[int],
        columns: list[int],
        of_rows: Counts,
        of_columns: Counts,
    ) -> None:
        known = flags[:: 2 * stride]
        batch = list(range(stride, len(flags), 2 * stride))
        by_row, by_column, by_kind = of_rows.shifts(), of_columns.shifts(), self.kinds.shifts()
        told = []
        for i, at in enumerate(batch):
            near, neighbours = nearby(known, i)
            row, column = by_row[rows[at]], by_column[columns[at]]
            expected = limited(near + row + column)
            level_kind = min(max(near // 2 + 14, 0), 27)
            shift_kind = min(max((row + column + 2) // 4 + 3, 0), 6)
            kind = (level_kind * 7 + shift_kind) * 3 + neighbours
            told.append((limited(expected + by_kind[kind]), kind, expected, near + column, near + row))
        for level in range(-MOST, MOST + 1):
            members = [i for i, one in enumerate(told) if one[0] == level]
            if members:
                for i, flag in zip(members, flags_of(self.source, len(members), level), strict=True):
                    flags[batch[i]] = flag
        for at, (_, kind, expected, for_row, for_column) in zip(batch, told, strict=True):
            self.kinds.add(kind, flags[at], expected)
            of_rows.add(rows[at], flags[at], for_row)
            of_columns.add(columns[at], flags[at], for_column)


def nearby(known: list[bool], i: int) -> tuple[int, int]:
    """Of the flag between known ones i and i + 1."""
    found, hits = (2 * sum(known) + 1) * TOTAL // (2 * len(known) + 2), 0
    for reach, believed in ((32, 16), (4, 8), (1, 4)):
        inside = known[max(0, i + 1 - reach) : i + 1 + reach]
        hits = sum(inside)
        found = (hits * TOTAL + believed * found) // (len(inside) + believed)
    return (limited(log4(found) - log4(TOTAL - found)) if found else -MOST), hits


def decode(
    data: bytes,
    count: int,
    base: Sequence[float] | None,
    held: Sequence[bool] | None,
    tensors: Sequence[tuple[int, int]],
) -> list[bool]:
    """A mask of so many flags; `tensors` are (entries, row size) of the model's, of an unknown one none."""
    source = Source(data)
    form = source.even(8)
    if form == 0:
        level = source.even(2 * MOST + 1) - MOST
        flags = [
            flag
            for start in range(0, count, BLOCK)
            for flag in flags_of(source, min(BLOCK, count - start), level)
        ]
    elif form == (1 if base is None else 2):
        flags, walk, start = [False] * count, Walk(source), 0
        for size, told in tensors or [(count, 1)]:
            row_size = told if 1 < told <= BLOCK else 0
            of_columns = Counts(max(1, row_size), 1)
            for first in range(0, size, BLOCK):
                places = list(range(first, min(first + BLOCK, size)))
                if base is None:
                    places.sort(key=lambda place: place * 0x9E3779B1 % 2**32)
                else:
                    places.sort(key=lambda p: magnitude(base[start + p]) if held[start + p] else -1)
                rows = [p // (row_size or 64) - first // (row_size or 64) for p in places]
                columns = [p % row_size if row_size else 0 for p in places]
                for place, flag in zip(places, walk.block(rows, columns, of_columns), strict=True):
                    flags[start + place] = flag
            start += size
    else:
        raise ValueError("another base")
    if source.at < len(data):
        raise ValueError("something follows")
    return flags


def magnitude(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", abs(number)))[0]
