"""Entropy coding of booleans by level: gaps between rare values, or patterns of eight booleans.

A level is the probability of a boolean in quarter octaves of its odds: a boolean of level q is True with odds
of 2^(q / 4) to 1. Its rarer value is called the surprise. The number of symbols is at most about one for
eight booleans, or one for a surprise. All arithmetic uses whole numbers, so that every machine and language
computes the same tables. Bytes: docs/wire.md, *Masks*, `Booleans`.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.octaves import PER_OCTAVE, Ints
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder, Symbols, write_symbols

MOST = 60  # at this level a surprise has a probability of about 2^-15
TOTAL = 1 << 16
RUNS_FROM = 12  # from this level on, surprises are so rare that the gaps between them are written
PATTERN = 8  # booleans in one symbol, below that level
_QUARTERS = (32768, 38968, 46341, 55109)  # 2^15 * 2^(k / 4)


def _surprise(level: int) -> int:
    """Return the probability of a surprise, out of 2^32."""
    odds = _QUARTERS[level % PER_OCTAVE] << level // PER_OCTAVE
    return (1 << 47) // ((1 << 15) + odds)


_OF_LEVEL = [_surprise(level) >> 16 for level in range(MOST + 1)]
# probability of True, out of `TOTAL`, at index level + MOST
CHANCES: Ints = np.array([*_OF_LEVEL[:0:-1], *(TOTAL - each for each in _OF_LEVEL)])


@dataclass(frozen=True)
class Runs:
    """The code of the gap before a surprise: a symbol for the cell, then `shift` bits for the place in the
    cell.

    Attributes:
        shift: log2 of the booleans in a cell.
        starts: first number, out of `TOTAL`, of each symbol 0..escape. Symbol `escape` means that none of
            that many cells has a surprise.
        escape: the last symbol.
    """

    shift: int
    starts: list[int]
    escape: int


@cache
def runs(level: int) -> Runs:
    """Return the code of gaps for booleans of this level or its negative, from `RUNS_FROM` to `MOST`."""
    shift = level // PER_OCTAVE - 3
    none_in_cell = (1 << 32) - _surprise(level)
    for _ in range(shift):
        none_in_cell = none_in_cell * none_in_cell >> 32
    starts, none_yet = [0], 1 << 32
    while len(starts) < 64 and none_yet >= 1 << 22:
        none_yet = none_yet * none_in_cell >> 32
        starts.append(TOTAL - (none_yet >> 16))
    return Runs(shift, starts, len(starts) - 1)


@cache
def patterns(level: int) -> list[int]:
    """Return where each of the 256 patterns of eight booleans starts, and then their total.

    The first boolean is the highest bit of a pattern.
    """
    chance = _OF_LEVEL[level]
    sizes = [max(1, chance**k * (TOTAL - chance) ** (PATTERN - k) >> 112) for k in range(PATTERN + 1)]
    starts = [0]
    for pattern in range(1 << PATTERN):
        starts.append(starts[-1] + sizes[pattern.bit_count()])
    return starts


def surprise(level: int) -> int:
    """Return the probability of a surprise, out of `TOTAL`; `level` is at least 0."""
    return _OF_LEVEL[level]


@cache
def pattern_table() -> Ints:
    """Return `patterns` of all levels below `RUNS_FROM`, shape (RUNS_FROM, 257)."""
    return np.array([patterns(level) for level in range(RUNS_FROM)])


@cache
def run_table() -> tuple[Ints, Ints]:
    """Return `starts` of each level up to MOST, padded with `TOTAL`, and `escape` of each level.

    Levels without runs have 0.
    """
    tables = [runs(level) for level in range(RUNS_FROM, MOST + 1)]
    starts = np.full((MOST + 1, 1 + max(len(table.starts) for table in tables)), TOTAL)
    escape = np.zeros(MOST + 1, np.int64)
    for level, table in enumerate(tables, RUNS_FROM):
        starts[level, : len(table.starts)], escape[level] = table.starts, table.escape
    return starts, escape


LEVELS = 2 * MOST + 1  # number of order values that the booleans of a batch use


@dataclass(frozen=True)
class _Groups:
    """Groups of booleans; a group has all booleans of one batch and one level, next to each other.

    Attributes:
        order: order value of each group's symbols.
        level: level of each group without its sign.
        begin: index of each group's first boolean among all booleans.
        length: number of booleans in each group.
    """

    order: Ints
    level: Ints
    begin: Ints
    length: Ints


def symbols_of(booleans: MaskArray, levels: Ints, batches: NDArray[np.uint16]) -> list[Symbols]:
    """Return the symbols of booleans, in the order of their batches.

    Args:
        booleans: booleans of all batches, shape (n,), those of each batch in their order.
        levels: level of each boolean, from -MOST to MOST.
        batches: batch of each boolean. The order values of a batch start at LEVELS times its number.
    """
    if not booleans.size:
        return []
    members = np.argsort(levels.astype(np.int8), kind="stable")
    members = members[np.argsort(batches[members], kind="stable")]
    own = levels[members]
    order = batches[members].astype(np.int64) * LEVELS + own + MOST
    begin = np.concatenate([[0], np.flatnonzero(order[1:] != order[:-1]) + 1])
    groups = _Groups(order[begin], np.abs(own[begin]), begin, np.diff(begin, append=booleans.size))
    surprises = booleans[members] ^ (own > 0)
    in_runs = groups.level >= RUNS_FROM
    return [*_patterns(surprises, groups, ~in_runs), _runs(surprises, groups, in_runs)]


def _patterns(surprises: MaskArray, groups: _Groups, chosen: MaskArray) -> list[Symbols]:
    """Return symbols of eight booleans each, and one symbol for each boolean that remains in a group."""
    symbols = np.where(chosen, groups.length // PATTERN, 0)
    within = np.arange(surprises.size) - np.repeat(groups.begin, groups.length)
    whole = within < np.repeat(PATTERN * symbols, groups.length)
    pattern, of_group = np.packbits(surprises[whole]).astype(np.int64), np.repeat(groups.order, symbols)
    level, table = np.repeat(groups.level, symbols), pattern_table()
    start = table[level, pattern]
    many = Symbols(of_group, start, table[level, pattern + 1] - start, table[level, -1])
    single = np.flatnonzero(~whole & np.repeat(chosen, groups.length))
    group = np.searchsorted(groups.begin, single, "right") - 1
    chance = CHANCES[MOST - groups.level[group]]
    found = surprises[single]
    start, size = np.where(found, 0, chance), np.where(found, chance, TOTAL - chance)
    return [many, Symbols(groups.order[group], start, size, np.full(size.size, TOTAL))]


def _runs(surprises: MaskArray, groups: _Groups, chosen: MaskArray) -> Symbols:
    """Return symbols of the gap before each surprise: `escape` as needed, the cell, and the bits in the cell.

    After the last surprise of a group, cells without surprises fill the group.
    """
    numbers = np.flatnonzero(chosen)
    place = np.flatnonzero(surprises)
    group = np.searchsorted(groups.begin, place, "right") - 1
    place, group = place[chosen[group]], group[chosen[group]]
    last = np.searchsorted(group, numbers, "right")  # insert the end of each group after its surprises
    ends = np.insert(np.zeros(place.size, np.bool_), last, values=True)
    place = np.insert(place, last, groups.begin[numbers] + groups.length[numbers])
    group = np.insert(group, last, numbers)
    before = np.empty_like(place)
    before[1:] = place[:-1] + 1
    first = np.flatnonzero(np.diff(group, prepend=-1))
    before[first] = groups.begin[group[first]]
    return _gaps(place - before, groups.level[group], groups.order[group], ends)


def _gaps(gap: Ints, level: Ints, order: Ints, ends: MaskArray) -> Symbols:
    """Return symbols of the gaps before surprises and before the ends of groups.

    Gaps before ends take whole cells.
    """
    starts, escapes = run_table()
    shift, escape = level // PER_OCTAVE - 3, escapes[level]
    cells = np.where(ends, -(-gap >> shift), gap >> shift)
    escaped = cells // escape
    cell = cells - escaped * escape
    has_cell, has_bits = ~ends | (cell > 0), ~ends & (shift > 0)
    count = escaped + has_cell + has_bits
    every = np.repeat(np.arange(gap.size), count)
    number = np.arange(every.size) - np.repeat(np.cumsum(count) - count, count) - escaped[every]
    cell = np.where(number < 0, escape[every], cell[every])
    start = starts[level[every], cell]
    stop = np.where(
        ends[every] | (number < 0), TOTAL, starts[level[every], np.minimum(cell + 1, starts.shape[1] - 1)]
    )
    bits = number > 0
    even = np.int64(1) << shift[every]
    return Symbols(
        order[every],
        np.where(bits, gap[every] & even - 1, start),
        np.where(bits, 1, stop - start),
        np.where(bits, even, TOTAL),
    )


def write_booleans(out: RangeEncoder, booleans: MaskArray, levels: Ints) -> None:
    """Write booleans level by level, each level's booleans in their order; shapes (n,)."""
    write_symbols(out, symbols_of(booleans, levels, np.zeros(booleans.size, np.uint16)))


def read_booleans(data: RangeDecoder, levels: Ints) -> MaskArray:
    """Read what `write_booleans` wrote. Raises PacketCorrupt, PacketTruncated."""
    members, groups = _by_level(levels)
    surprises, places = np.zeros(levels.size, np.bool_), list[int]()
    for level, start, stop in groups:
        if abs(level) >= RUNS_FROM:
            places += [start + place for place in _read_runs(data, stop - start, runs(abs(level)))]
        else:
            surprises[start:stop] = _read_patterns(data, stop - start, abs(level))
    surprises[places] = True
    booleans = np.empty(levels.size, np.bool_)
    booleans[members] = surprises ^ (levels[members] > 0)
    return booleans


def _by_level(levels: Ints) -> tuple[Ints, list[tuple[int, int, int]]]:
    """Return indices that sort the booleans by level, and (level, begin, end) of each level that occurs."""
    members = np.argsort(levels.astype(np.int8), kind="stable")
    counts = np.bincount(levels + MOST)
    present = np.flatnonzero(counts)
    stops = np.cumsum(counts)[present]
    starts = stops - counts[present]
    return members, list(zip((present - MOST).tolist(), starts.tolist(), stops.tolist(), strict=True))


def _read_patterns(data: RangeDecoder, size: int, level: int) -> MaskArray:
    whole = np.frombuffer(data.read_many(patterns(level), size // PATTERN), np.uint8)
    single = [_read_surprise(data, surprise(level)) for _ in range(size % PATTERN)]
    return np.concatenate([np.unpackbits(whole).view(np.bool_), np.array(single, np.bool_)])


def _read_surprise(data: RangeDecoder, chance: int) -> bool:
    found = data.peek(TOTAL) < chance
    data.take(0 if found else chance, chance if found else TOTAL - chance)
    return found


def _read_runs(data: RangeDecoder, size: int, table: Runs) -> list[int]:
    shift, escape = table.shift, table.escape
    places, place = list[int](), 0
    while place < size:
        last = min(escape, -(-(size - place) >> shift))
        cells = data.read_symbol(table.starts, last)
        place += cells << shift
        if cells < last:
            place += data.read_bits(shift)
            if place >= size:
                raise PacketCorrupt("damaged entropy code: a boolean lies after the end of its level")
            places.append(place)
            place += 1
    return places
