"""How likely a flag is, in quarter octaves of its odds, and the symbols in which groups of such are written.

A flag of level q is True with odds of 2^(q / 4) to 1. The rarer of its two values is the surprise. Whole
numbers only, so that every machine and language has the same tables.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints

MOST = 60  # a surprise has at least a chance of about 2^-15
TOTAL = 1 << 16
RUNS_FROM = 12  # from there on surprises are so rare that the gaps between them are written
PATTERN = 8  # flags in a symbol where they are not
_QUARTERS = (32768, 38968, 46341, 55109)  # 2^15 * 2^(k / 4)


def _surprise(level: int) -> int:
    """The chance of a surprise, out of 2^32."""
    odds = _QUARTERS[level % PER_OCTAVE] << level // PER_OCTAVE
    return (1 << 47) // ((1 << 15) + odds)


_OF_LEVEL = [_surprise(level) >> 16 for level in range(MOST + 1)]
# of True, out of `TOTAL`, at level + MOST
CHANCES: Ints = np.array([*_OF_LEVEL[:0:-1], *(TOTAL - each for each in _OF_LEVEL)])


@dataclass(frozen=True)
class Runs:
    """How the gap before a surprise is written: its upper part by `starts`, then `shift` even bits.

    Attributes:
        shift: a cell is 2^shift flags.
        starts: what each of 0..escape cells owns of `TOTAL` begins here; `escape` is "as many, and none yet".
        escape: the last of them.
    """

    shift: int
    starts: list[int]
    escape: int


@cache
def runs(level: int) -> Runs:
    """Of flags whose level is this or its negative, `RUNS_FROM` to `MOST`."""
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
    """Where each of 256 patterns of surprises begins, the first flag in the highest bit; then their total."""
    chance = _OF_LEVEL[level]
    sizes = [max(1, chance**k * (TOTAL - chance) ** (PATTERN - k) >> 112) for k in range(PATTERN + 1)]
    starts = [0]
    for pattern in range(1 << PATTERN):
        starts.append(starts[-1] + sizes[pattern.bit_count()])
    return starts


def surprise(level: int) -> int:
    """The chance of a surprise, out of `TOTAL`; `level` from 0."""
    return _OF_LEVEL[level]


@cache
def pattern_table() -> Ints:
    """`patterns` of all levels that have them, shape (RUNS_FROM, 257)."""
    return np.array([patterns(level) for level in range(RUNS_FROM)])


@cache
def run_table() -> tuple[Ints, Ints]:
    """`starts` of each level up to MOST, behind the last `TOTAL`; `escape` of each, 0: no runs."""
    tables = [runs(level) for level in range(RUNS_FROM, MOST + 1)]
    starts = np.full((MOST + 1, 1 + max(len(table.starts) for table in tables)), TOTAL)
    escape = np.zeros(MOST + 1, np.int64)
    for level, table in enumerate(tables, RUNS_FROM):
        starts[level, : len(table.starts)], escape[level] = table.starts, table.escape
    return starts, escape
