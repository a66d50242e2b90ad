"""Symbols of many batches of booleans at once. Each batch can be read by `booleans`, level by level."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.boolean_levels import (
    CHANCES,
    MOST,
    PATTERN,
    RUNS_FROM,
    TOTAL,
    pattern_table,
    run_table,
)
from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints
from fleetune.protocols.update.entropy.symbols import Symbols

LEVELS = 2 * MOST + 1  # number of order values that the booleans of a batch use


@dataclass(frozen=True)
class _Groups:
    """Groups of booleans. A group has all booleans of one batch and one level, next to each other.

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
    """Symbols of booleans, in the order of their batches.

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
    """Symbols of eight booleans each, and then one symbol for each boolean that remains in a group."""
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
    """Symbols of the gap before each surprise: `escape` as often as needed, the cell, and the bits in the
    cell.

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
    """Symbols of the gaps before surprises and before the ends of groups. Gaps before ends take whole
    cells.
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
