"""Levels of booleans: the probability of a boolean in quarter octaves of its odds, and the symbols of such
booleans.

A boolean of level q is True with odds of 2^(q / 4) to 1. Its rarer value is called the surprise. All
arithmetic uses whole numbers, so that every machine and language computes the same tables. Bytes:
docs/wire.md, *Masks*.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints

MOST = 60  # at this level a surprise has a probability of about 2^-15
TOTAL = 1 << 16
RUNS_FROM = 12  # from this level on, surprises are so rare that the gaps between them are written
PATTERN = 8  # booleans in one symbol, below that level
_QUARTERS = (32768, 38968, 46341, 55109)  # 2^15 * 2^(k / 4)


def _surprise(level: int) -> int:
    """Probability of a surprise, out of 2^32."""
    odds = _QUARTERS[level % PER_OCTAVE] << level // PER_OCTAVE
    return (1 << 47) // ((1 << 15) + odds)


_OF_LEVEL = [_surprise(level) >> 16 for level in range(MOST + 1)]
# probability of True, out of `TOTAL`, at index level + MOST
CHANCES: Ints = np.array([*_OF_LEVEL[:0:-1], *(TOTAL - each for each in _OF_LEVEL)])


@dataclass(frozen=True)
class Runs:
    """Code of the gap before a surprise: the cell by `starts`, then the place in the cell as `shift` even
    bits.

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
    """Code of gaps for booleans of this level or its negative. `level` is from `RUNS_FROM` to `MOST`."""
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
    """Starts of the 256 patterns of eight booleans, the first boolean in the highest bit, and then their
    total.
    """
    chance = _OF_LEVEL[level]
    sizes = [max(1, chance**k * (TOTAL - chance) ** (PATTERN - k) >> 112) for k in range(PATTERN + 1)]
    starts = [0]
    for pattern in range(1 << PATTERN):
        starts.append(starts[-1] + sizes[pattern.bit_count()])
    return starts


def surprise(level: int) -> int:
    """Probability of a surprise, out of `TOTAL`; `level` is at least 0."""
    return _OF_LEVEL[level]


@cache
def pattern_table() -> Ints:
    """`patterns` of all levels below `RUNS_FROM`, shape (RUNS_FROM, 257)."""
    return np.array([patterns(level) for level in range(RUNS_FROM)])


@cache
def run_table() -> tuple[Ints, Ints]:
    """`starts` of each level up to MOST, padded with `TOTAL`, and `escape` of each; 0 for levels without
    runs.
    """
    tables = [runs(level) for level in range(RUNS_FROM, MOST + 1)]
    starts = np.full((MOST + 1, 1 + max(len(table.starts) for table in tables)), TOTAL)
    escape = np.zeros(MOST + 1, np.int64)
    for level, table in enumerate(tables, RUNS_FROM):
        starts[level, : len(table.starts)], escape[level] = table.starts, table.escape
    return starts, escape
