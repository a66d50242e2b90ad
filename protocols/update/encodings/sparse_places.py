"""Entropy coding of the places of the sent entries (the hits) in a tensor.

Training changes some rows (neurons) and some columns (their inputs) more than others. So the code predicts
hits from the hits so far in the same row and column. A tensor is coded in blocks, and a block in batches.
Each batch is spread over all rows and columns, and is about half as large as all batches before it.

The share of hits in a row and in a column, compared with the mean, gives each entry of a batch a level. Its
probability is 2^(-level / 4). For each level, the gaps between hits are coded; they are geometrically
distributed. All arithmetic uses whole numbers, so that every machine computes the same levels. Bytes:
docs/wire.md, `sparse`, *Places*.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.entropy.quarter_octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

BATCH_ENDS = (1, 2, 3, 4, 6, 9, 14, 21, 32, 48, 64)
BLOCK = 1 << 15  # entries; the memory that reading needs in addition to the values grows with it
ALONE = 64  # a block of this many entries or fewer is one batch
LEVELS = 97
_POWERS = (1 << 32, 3611622603, 3037000500, 2553802834)  # 2^(32 - k / 4)
_TOTAL = 1 << 16
_MOST = 1 << 20  # a limit that keeps sums of squares below 2^63
# in 1/256: a prior, because few hits say little about how much rows differ
_PRIOR_EVENLY, _PRIOR_SPREAD = 700, 1000

# (entries of a batch by level, number of entries of each level, hits left in the block) -> places of the hits
# among these entries
CodeBatch = Callable[[Ints, list[int], int], Ints]


@dataclass(frozen=True)
class _Gaps:
    """Code of the gap before a hit: the cell by `starts`, then the place in the cell as `shift` even bits."""

    shift: int
    # starts of the symbols 0..escape; `escape` means that none of that many cells has a hit
    starts: list[int]
    escape: int


def _gaps(level: int) -> _Gaps:
    shift = max(0, level // PER_OCTAVE - 3)
    hit = _POWERS[level % PER_OCTAVE] >> (level // PER_OCTAVE - shift)
    starts, none_yet = [0], 1 << 32
    while len(starts) < 64 and none_yet >= 1 << 22:
        none_yet -= none_yet * hit >> 32
        starts.append(_TOTAL - (none_yet >> 16))
    return _Gaps(shift, starts, len(starts) - 1)


_GAPS = [_gaps(max(1, level)) for level in range(LEVELS)]


class Activity:
    """Number of hits of each row, or each column, among the entries visited so far."""

    def __init__(self, size: int) -> None:
        self._hits = np.zeros(size, np.int64)
        self._seen = np.zeros(size, np.int64)

    def add(self, seen: Ints, hits: Ints) -> None:
        self._seen += np.bincount(seen, minlength=self._seen.size)
        self._hits += np.bincount(hits, minlength=self._hits.size)

    def busier(self) -> Ints:
        """Share of hits of each row or column relative to the mean, in quarter octaves, shape (size,).

        The estimate is shrunk towards the mean (empirical Bayes, gamma-Poisson). The prior is a number of
        hits at the mean rate. It is large if rows differ no more than by chance.
        """
        num_hits, num_seen = int(self._hits.sum()), int(self._seen.sum())
        if not num_hits:
            return np.zeros(self._hits.size, np.int64)
        hits, expected = 16 * self._hits, 16 * self._seen * num_hits // num_seen
        spread = int((np.minimum(abs(hits - expected), _MOST) ** 2).sum()) - 256 * num_hits
        evenly = int((np.minimum(expected, _MOST) ** 2).sum())
        before = 16 * (evenly + _PRIOR_EVENLY) // (max(0, spread) + _PRIOR_SPREAD)
        before = min(max(before, 2), 1024)
        return quarter_octaves(hits + before) - quarter_octaves(expected + before)


def places_of(rows: Ints, columns: Ints, busy_columns: Activity, num_hits: int, code: CodeBatch) -> Ints:
    """Find the hits of a block, ascending, by visiting its entries in the order of the code.

    Args:
        rows: row of each entry in the block, shape (n,).
        columns: column of each entry in the tensor, shape (n,).
        busy_columns: counts of the tensor's columns; this function adds the block to them.
        num_hits: number of hits in the block, at most n.
        code: function that writes or reads the hits of one batch.
    """
    left, rest = num_hits, rows.size
    busy_rows = Activity(int(rows[-1]) + 1)
    found: list[Ints] = []
    for batch in _batches(rows, columns):
        if not left:
            break
        share = int(quarter_octaves(np.array([rest]))[0] - quarter_octaves(np.array([left]))[0])
        busier = busy_rows.busier()[rows[batch]] + busy_columns.busier()[columns[batch]]
        level = np.clip(share - busier, 1, LEVELS - 1).astype(np.uint8)
        members = batch[np.argsort(level, kind="stable")]
        hits = members[code(members, np.bincount(level, minlength=LEVELS).tolist(), left)]
        busy_rows.add(rows[batch], rows[hits])
        busy_columns.add(columns[batch], columns[hits])
        left -= hits.size
        rest -= batch.size
        found.append(hits)
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def _batches(rows: Ints, columns: Ints) -> list[Ints]:
    if rows.size <= ALONE:
        return [np.arange(rows.size)]
    drawn = rows.astype(np.uint32) * np.uint32(0x9E3779B1) + columns.astype(np.uint32) * np.uint32(0x85EBCA6B)
    turn = np.searchsorted(BATCH_ENDS, np.arange(64), side="right").astype(np.uint8)[(drawn >> 16) & 63]
    order = np.argsort(turn, kind="stable")
    return np.split(order, np.cumsum(np.bincount(turn, minlength=len(BATCH_ENDS)))[:-1])


def write_hits(out: RangeEncoder, flags: NDArray[np.bool_]) -> CodeBatch:
    """Function that writes the hits of a tensor, batch by batch. `flags` marks the hits, shape (n,)."""

    def code(members: Ints, sizes: list[int], left: int) -> Ints:
        places = np.flatnonzero(flags[members])
        ahead, place, end = [*places.tolist(), members.size], 0, 0
        hits = iter(ahead)
        target = next(hits)
        for level, size in enumerate(sizes):
            end += size
            gaps = _GAPS[level]
            shift, starts, escape = gaps.shift, gaps.starts, gaps.escape
            while place < end and left:
                cells = target - place >> shift
                if target < end and cells < escape:
                    out.write(starts[cells], starts[cells + 1] - starts[cells], _TOTAL)
                    if shift:
                        out.write(target - place & ((1 << shift) - 1), 1, 1 << shift)
                    place, left, target = target + 1, left - 1, next(hits)
                else:
                    last = min(escape, _cells(end - place, shift))
                    out.write(starts[last], _TOTAL - starts[last], _TOTAL)
                    place = min(end, place + (last << shift))
        return places

    return code


def read_hits(data: RangeDecoder) -> CodeBatch:
    """Function that reads the hits of a tensor, batch by batch. It raises PacketCorrupt, PacketTruncated."""

    def code(_: Ints, sizes: list[int], left: int) -> Ints:
        places: list[int] = []
        place = end = 0
        for level, size in enumerate(sizes):
            end += size
            gaps = _GAPS[level]
            while place < end and len(places) < left:
                last = min(gaps.escape, _cells(end - place, gaps.shift))
                cells = min(last, bisect_right(gaps.starts, data.peek(_TOTAL)) - 1)
                if cells < last:
                    data.take(gaps.starts[cells], gaps.starts[cells + 1] - gaps.starts[cells])
                    place += (cells << gaps.shift) + data.read_bits(gaps.shift)
                    if place >= end:
                        raise PacketCorrupt("an entry behind the last of its kind")
                    places.append(place)
                    place += 1
                else:
                    data.take(gaps.starts[last], _TOTAL - gaps.starts[last])
                    place = min(end, place + (last << gaps.shift))
        return np.array(places, np.int64)

    return code


def _cells(size: int, shift: int) -> int:
    return -(-size >> shift)
