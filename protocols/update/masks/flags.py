"""Flags of one level, written and read: rare surprises by the gaps between them, others eight in a symbol.

So no more than one symbol is coded for eight flags or for a surprise, however many they are.
"""

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.update.encodings.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.masks.levels import PATTERN, RUNS_FROM, TOTAL, Runs, patterns, runs, surprise


def write_flags(out: RangeEncoder, flags: MaskArray, level: int) -> None:
    """Flags that are all of this level, shape (n,)."""
    surprises = flags ^ (level > 0)
    if abs(level) >= RUNS_FROM:
        _write_runs(out, np.flatnonzero(surprises).tolist(), flags.size, runs(abs(level)))
        return
    starts, whole = patterns(abs(level)), flags.size // PATTERN * PATTERN
    out.write_many(np.packbits(surprises[:whole]).tobytes(), starts)
    chance = surprise(abs(level))
    for one in surprises[whole:].tolist():
        out.write(0 if one else chance, chance if one else TOTAL - chance, TOTAL)


def read_flags(data: RangeDecoder, size: int, level: int) -> MaskArray:
    """What `write_flags` wrote of so many. Raises PacketCorrupt, PacketTruncated."""
    if abs(level) >= RUNS_FROM:
        surprises = np.zeros(size, np.bool_)
        surprises[_read_runs(data, size, runs(abs(level)))] = True
        return surprises ^ (level > 0)
    whole = np.frombuffer(data.read_many(patterns(abs(level)), size // PATTERN), np.uint8)
    single = [_read_surprise(data, surprise(abs(level))) for _ in range(size % PATTERN)]
    return np.concatenate([np.unpackbits(whole).view(np.bool_), np.array(single, np.bool_)]) ^ (level > 0)


def _read_surprise(data: RangeDecoder, chance: int) -> bool:
    found = data.peek(TOTAL) < chance
    data.take(0 if found else chance, chance if found else TOTAL - chance)
    return found


def _write_runs(out: RangeEncoder, places: list[int], size: int, table: Runs) -> None:
    shift, starts, escape = table.shift, table.starts, table.escape
    place = 0
    for surprising in places:
        while (cells := surprising - place >> shift) >= escape:
            out.write(starts[escape], TOTAL - starts[escape], TOTAL)
            place += escape << shift
        out.write(starts[cells], starts[cells + 1] - starts[cells], TOTAL)
        if shift:
            out.write(surprising - place & ((1 << shift) - 1), 1, 1 << shift)
        place = surprising + 1
    while place < size:
        last = min(escape, -(-(size - place) >> shift))
        out.write(starts[last], TOTAL - starts[last], TOTAL)
        place += last << shift


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
                raise PacketCorrupt("a flag behind the last of its level")
            places.append(place)
            place += 1
    return places
