"""A decoder of docs/wire.md's `sparse` in plain Python, written from that page: no numpy, no product.

Arrays are lists; a base is a list of numbers that float32 holds, `tensors` the number of each entry's tensor,
`row_sizes` how many entries a row of each tensor has, `places` each entry's place in its tensor.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BLOCK = 32768
BATCH_ENDS = (1, 2, 3, 4, 6, 9, 14, 21, 32, 48, 64)
QUARTERS = (35734, 42495, 50536, 60097)
POWERS = (1 << 32, 3611622603, 3037000500, 2553802834)
EIGHTHS = (32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097)


@dataclass
class Source:
    """The range decoder."""

    data: bytes
    at: int = 8
    code: int = field(init=False)
    width: int = 1 << 64

    def __post_init__(self) -> None:
        self.code = int.from_bytes(self.data[:8].ljust(8, b"\0"), "big")

    def value(self, total: int) -> int:
        found = self.code // (self.width // total)
        if found >= total:
            raise ValueError("outside of every symbol")
        return found

    def take(self, start: int, size: int, total: int) -> None:
        step = self.width // total
        self.code -= step * start
        self.width = step * size
        while self.width < 1 << 32:
            if self.at >= len(self.data) + 8:
                raise ValueError("cut short")
            word = int.from_bytes(self.data[self.at : self.at + 4].ljust(4, b"\0"), "big")
            self.code, self.width, self.at = self.code << 32 | word, self.width << 32, self.at + 4

    def even(self, total: int) -> int:
        found = self.value(total)
        self.take(found, 1, total)
        return found

    def number(self, num_lengths: int) -> int:
        length = self.even(num_lengths)
        if length < 2:
            return length
        return (1 << length - 1) + self.even(1 << length - 1)

    def symbol(self, counts: list[int]) -> int:
        found, start = self.value(sum(counts)), 0
        for symbol, count in enumerate(counts):
            if found < start + count:
                self.take(start, count, sum(counts))
                return symbol
            start += count
        raise AssertionError


def log4(number: int) -> int:
    """4 log2(number), to the nearest."""
    exponent = number.bit_length() - 1
    leading = (number << 15) >> exponent
    return 4 * exponent + sum(leading >= one for one in QUARTERS)


def gap_table(level: int) -> tuple[int, list[int]]:
    shift = max(0, level // 4 - 3)
    hit = POWERS[level % 4] >> (level // 4 - shift)
    starts, none_yet = [0], 1 << 32
    while len(starts) < 64 and none_yet >= 1 << 22:
        none_yet -= none_yet * hit >> 32
        starts.append(65536 - (none_yet >> 16))
    return shift, starts


GAPS = [gap_table(max(1, level)) for level in range(97)]


@dataclass
class Activity:
    hits: list[int]
    seen: list[int]

    def busier(self) -> list[int]:
        num_hits, num_seen = sum(self.hits), sum(self.seen)
        if not num_hits:
            return [0] * len(self.hits)
        hits = [16 * one for one in self.hits]
        expected = [16 * one * num_hits // num_seen for one in self.seen]
        spread = sum(min(abs(h - e), 1 << 20) ** 2 for h, e in zip(hits, expected, strict=True))
        evenly = sum(min(e, 1 << 20) ** 2 for e in expected)
        before = 16 * (evenly + 700) // (max(0, spread - 256 * num_hits) + 1000)
        before = min(max(before, 2), 1024)
        return [log4(h + before) - log4(e + before) for h, e in zip(hits, expected, strict=True)]


def entries_of(
    source: Source, rows: list[int], columns: list[int], of_columns: Activity, num_hits: int
) -> list[int]:
    """Which entries of a block are hits."""
    left, rest, found = num_hits, len(rows), list[int]()
    of_rows = Activity([0] * (rows[-1] + 1), [0] * (rows[-1] + 1))
    for batch in batches(rows, columns):
        if not left:
            break
        share = log4(rest) - log4(left)
        by_row, by_column = of_rows.busier(), of_columns.busier()
        level = {e: min(max(share - by_row[rows[e]] - by_column[columns[e]], 1), 96) for e in batch}
        hits = list[int]()
        for each in range(1, 97):
            members = [e for e in batch if level[e] == each]
            hits += [members[place] for place in hits_of(source, each, len(members), left - len(hits))]
        for activity, axis in ((of_rows, rows), (of_columns, columns)):
            for e in batch:
                activity.seen[axis[e]] += 1
            for e in hits:
                activity.hits[axis[e]] += 1
        found += hits
        left -= len(hits)
        rest -= len(batch)
    if left:
        raise ValueError("fewer entries than announced")
    return sorted(found)


def batches(rows: list[int], columns: list[int]) -> list[list[int]]:
    if len(rows) <= 64:
        return [list(range(len(rows)))]
    found = [list[int]() for _ in BATCH_ENDS]
    for e, (row, column) in enumerate(zip(rows, columns, strict=True)):
        drawn = (row * 0x9E3779B1 + column * 0x85EBCA6B) % 2**32 >> 16 & 63
        found[sum(drawn >= end for end in BATCH_ENDS)].append(e)
    return found


def hits_of(source: Source, level: int, size: int, left: int) -> Iterator[int]:
    shift, starts = GAPS[level]
    place = 0
    while place < size and left:
        last = min(len(starts) - 1, -(-(size - place) >> shift))
        value = source.value(65536)
        cells = min(last, sum(start <= value for start in starts) - 1)
        end = 65536 if cells == last else starts[cells + 1]
        source.take(starts[cells], end - starts[cells], 65536)
        place += cells << shift
        if cells < last:
            place += source.even(1 << shift)
            if place >= size:
                raise ValueError("beyond the last entry of a level")
            yield place
            place, left = place + 1, left - 1


def decode(
    data: bytes,
    count: int,
    base: Sequence[float] | None,
    tensors: Sequence[int],
    row_sizes: Sequence[int],
    places: Sequence[int] | None,
) -> list[float]:
    """The values that `sparse` wrote."""
    source, values = Source(data), [0.0] * count if base is None else list(base)
    if source.even(8) != (base is not None):
        raise ValueError("another base")
    num_levels = source.even(16) + 1
    eighths = [source.even(2216)]
    while len(eighths) < num_levels:
        eighths.append(eighths[-1] + source.number(13))
    if eighths[-1] >= 2216:
        raise ValueError("a magnitude beyond float32")
    sizes = [float32(EIGHTHS[one % 8] * 2.0 ** (one // 8 - 164)) for one in eighths]
    signs = [[1, 1] for _ in range(4)]
    levels = [[max(1, 16 >> 2 * level) for level in range(num_levels)] for _ in range(num_levels)]
    numbers = list(tensors) or [0] * count
    start = 0
    while start < count:
        stop = start + numbers.count(numbers[start])
        row_size = row_sizes[numbers[start]] if row_sizes else 0
        row_size = row_size if 1 < row_size <= BLOCK else 0
        left = source.number((stop - start).bit_length() + 1)
        of_columns = Activity([0] * max(1, row_size), [0] * max(1, row_size))
        for first in range(start, stop if left else start, BLOCK):
            behind = min(first + BLOCK, stop)
            at = [e - start if places is None else places[e] for e in range(first, behind)]
            rows = [one // (row_size or 64) - at[0] // (row_size or 64) for one in at]
            columns = [one % row_size if row_size else 0 for one in at]
            num_hits = left if behind == stop else source.number(len(at).bit_length() + 1)
            if num_hits > min(left, len(at)):
                raise ValueError("more entries than there are")
            left -= num_hits
            row, votes, level = -1, 0, 0
            for hit in entries_of(source, rows, columns, of_columns, num_hits):
                row, votes = rows[hit], votes if rows[hit] == row else 0
                counts = signs[min(abs(votes), 3)]
                unlike = source.symbol(counts)
                counts[unlike] += 1
                negative = unlike ^ (votes < 0)
                votes += -1 if negative else 1
                if num_levels > 1:
                    before, level = level, source.symbol(levels[level])
                    levels[before][level] += 4
                step = -sizes[level] if negative else sizes[level]
                values[first + hit] = float32(values[first + hit] + step)
        start = stop
    if source.at < len(data):
        raise ValueError("something follows")
    return values


def float32(number: float) -> float:
    """The nearest float32. Raises OverflowError: it is beyond the largest."""
    return struct.unpack("<f", struct.pack("<f", number))[0]
