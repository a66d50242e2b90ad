"""Write and read booleans of given levels: rare surprises by the gaps between them, others eight in a symbol.

So the number of symbols is at most about one for eight booleans, or one for a surprise. Bytes: docs/wire.md,
*Masks*, `Booleans`.
"""

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.entropy.boolean_levels import (
    MOST,
    PATTERN,
    RUNS_FROM,
    TOTAL,
    Runs,
    patterns,
    runs,
    surprise,
)
from fleetune.protocols.update.entropy.boolean_symbols import symbols_of
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.entropy.symbols import write_symbols


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
    """Indices of the booleans sorted by level, and (level, begin, end) in it of each level that occurs."""
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
                raise PacketCorrupt("a boolean behind the last of its level")
            places.append(place)
            place += 1
    return places
