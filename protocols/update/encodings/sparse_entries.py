"""Entropy coding of the entries that `sparse` sends (the hits): number, places, signs and levels.

Training changes some rows (neurons) and some columns (their inputs) more than others. So the code predicts
hits from the hits so far in the same row and column. A tensor is coded in blocks, and a block in batches.
Each batch is spread over all rows and columns, and is about half as large as all batches before it.

The share of hits in a row and in a column, compared with the mean, gives each entry of a batch a level. Its
probability is 2^(-level / 4). For each level, the gaps between hits are coded; they are geometrically
distributed. All arithmetic uses whole numbers, so that every machine computes the same levels. Bytes:
docs/wire.md, `sparse`, *Places*.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.entropy.booleans import TOTAL, Runs
from fleetune.protocols.update.entropy.octaves import PER_OCTAVE, Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

BATCH_ENDS = (1, 2, 3, 4, 6, 9, 14, 21, 32, 48, 64)
BLOCK = 1 << 15  # entries; the memory that reading needs in addition to the values grows with it
ALONE = 64  # a block of this many entries or fewer is one batch
LEVELS = 97
_POWERS = (1 << 32, 3611622603, 3037000500, 2553802834)  # 2^(32 - k / 4)
_MOST = 1 << 20  # a limit that keeps sums of squares below 2^63
# in 1/256: a prior, because few hits say little about how much rows differ
_PRIOR_EVENLY, _PRIOR_SPREAD = 700, 1000

# (entries of a batch by level, number of entries of each level, hits left in the block) -> places of the hits
# among these entries
CodeBatch = Callable[[Ints, list[int], int], Ints]


def _gaps(level: int) -> Runs:
    """Return the code of the gaps between hits of a level; see `Runs`, with hits as surprises."""
    shift = max(0, level // PER_OCTAVE - 3)
    hit = _POWERS[level % PER_OCTAVE] >> (level // PER_OCTAVE - shift)
    starts, none_yet = [0], 1 << 32
    while len(starts) < 64 and none_yet >= 1 << 22:
        none_yet -= none_yet * hit >> 32
        starts.append(TOTAL - (none_yet >> 16))
    return Runs(shift, starts, len(starts) - 1)


_GAPS = [_gaps(max(1, level)) for level in range(LEVELS)]


class Activity:
    """Counts the hits of each row, or of each column, among the entries visited so far."""

    def __init__(self, size: int) -> None:
        self._hits = np.zeros(size, np.int64)
        self._seen = np.zeros(size, np.int64)

    def add(self, seen: Ints, hits: Ints) -> None:
        self._seen += np.bincount(seen, minlength=self._seen.size)
        self._hits += np.bincount(hits, minlength=self._hits.size)

    def busier(self) -> Ints:
        """Return each row's or column's share of hits relative to the mean, in quarter octaves, shape
        (size,).

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
    """Return the places of the hits in a block, ascending, found by visiting entries in the order of the
    code.

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
    """Return a function that writes a tensor's hits, batch by batch; `flags` marks them, shape (n,)."""

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
                    out.write(starts[cells], starts[cells + 1] - starts[cells], TOTAL)
                    if shift:
                        out.write(target - place & ((1 << shift) - 1), 1, 1 << shift)
                    place, left, target = target + 1, left - 1, next(hits)
                else:
                    last = min(escape, _cells(end - place, shift))
                    out.write(starts[last], TOTAL - starts[last], TOTAL)
                    place = min(end, place + (last << shift))
        return places

    return code


def read_hits(data: RangeDecoder) -> CodeBatch:
    """Return a function that reads the hits of a tensor, batch by batch; raises PacketCorrupt,
    PacketTruncated.
    """

    def code(_: Ints, sizes: list[int], left: int) -> Ints:
        places: list[int] = []
        place = end = 0
        for level, size in enumerate(sizes):
            end += size
            gaps = _GAPS[level]
            while place < end and len(places) < left:
                last = min(gaps.escape, _cells(end - place, gaps.shift))
                cells = data.read_symbol(gaps.starts, last)
                place += cells << gaps.shift
                if cells < last:
                    place += data.read_bits(gaps.shift)
                    if place >= end:
                        raise PacketCorrupt("an entry lies after the end of its level")
                    places.append(place)
                    place += 1
                else:
                    place = min(end, place)
        return np.array(places, np.int64)

    return code


def _cells(size: int, shift: int) -> int:
    return -(-size >> shift)


MAX_LEVELS = 16
_ROW_UNKNOWN = 64  # row size if the rows are unknown
_MOST_VOTES = 3
_LEVEL_STEP = 4  # weight of an observed level; levels never seen count 1


@dataclass(frozen=True)
class Tensor:
    """The entries of a patch that belong to one tensor.

    Attributes:
        start, stop: range of these entries in the patch.
        row_size: number of entries in a row; 0 if there are no rows or they are unknown.
        places: place in its tensor of every entry of the patch; None if the tensor is whole.
    """

    start: int
    stop: int
    row_size: int
    places: NDArray[np.int32] | None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def num_columns(self) -> int:
        return max(1, self.row_size)

    def blocks(self) -> Iterator[tuple[slice, Ints, Ints]]:
        """Yield blocks of the tensor: range in the patch, and each entry's row in the block and column in the
        tensor.
        """
        for start in range(self.start, self.stop, BLOCK):
            block = slice(start, min(start + BLOCK, self.stop))
            if self.places is None:
                places = np.arange(block.start - self.start, block.stop - self.start)
            else:
                places = self.places[block].astype(np.int64)
            rows = places // (self.row_size or _ROW_UNKNOWN)
            columns = places - rows * self.row_size if self.row_size else np.zeros_like(places)
            yield block, rows - rows[0], columns


def tensors_of(known: Known, count: int) -> Iterator[Tensor]:
    """Yield the tensors to which a patch of `count` entries belongs."""
    for start, stop, row_size in known.parts(count):
        yield Tensor(start, stop, row_size if 1 < row_size <= BLOCK else 0, known.places)


class _Model:
    """Predicts signs and levels from earlier ones.

    The likely sign is that of most earlier hits in the row. Its probability depends on the size of their
    majority. The probability of a level depends on the level of the hit before.
    """

    def __init__(self, num_levels: int) -> None:
        self._signs = [[1, 1] for _ in range(_MOST_VOTES + 1)]
        self._levels = [[max(1, 16 >> 2 * level) for level in range(num_levels)] for _ in range(num_levels)]
        self.start_block()

    def start_block(self) -> None:
        self._row, self._votes, self._level = -1, 0, 0

    def signs(self, row: int) -> tuple[list[int], int]:
        """Return the counts of likely and unlikely signs, and which sign is likely next in `row`."""
        if row != self._row:
            self._row, self._votes = row, 0
        return self._signs[min(abs(self._votes), _MOST_VOTES)], int(self._votes < 0)

    def add_sign(self, counts: list[int], unlike: int, negative: int) -> None:
        counts[unlike] += 1
        self._votes += 1 - 2 * negative

    def levels(self) -> list[int]:
        return self._levels[self._level]

    def add_level(self, level: int) -> None:
        self._levels[self._level][level] += _LEVEL_STEP
        self._level = level


class Writer:
    """Writes the sent entries of tensor after tensor.

    Attributes:
        out: range encoder that receives the symbols.
        num_levels: number of levels of magnitude.
    """

    def __init__(self, out: RangeEncoder, num_levels: int) -> None:
        self.out, self.num_levels, self._model = out, num_levels, _Model(num_levels)

    def write(
        self, tensor: Tensor, chosen: NDArray[np.bool_], negative: NDArray[np.bool_], levels: Ints
    ) -> None:
        """Write the sent entries of one tensor. Arrays cover all entries of the patch."""
        left = int(np.count_nonzero(chosen[tensor.start : tensor.stop]))
        self.out.write_number(left, tensor.size.bit_length() + 1)
        if not left:
            return
        busy_columns = Activity(tensor.num_columns)
        for block, rows, columns in tensor.blocks():
            num_hits = int(np.count_nonzero(chosen[block]))
            if block.stop < tensor.stop:
                self.out.write_number(num_hits, rows.size.bit_length() + 1)
            hits = places_of(rows, columns, busy_columns, num_hits, write_hits(self.out, chosen[block]))
            self._model.start_block()
            for row, sign, level in zip(
                rows[hits].tolist(), negative[block][hits].tolist(), levels[block][hits].tolist(), strict=True
            ):
                counts, likely = self._model.signs(row)
                unlike = sign ^ likely
                self.out.write_counted(unlike, counts)
                self._model.add_sign(counts, unlike, sign)
                if self.num_levels > 1:
                    self.out.write_counted(level, self._model.levels())
                    self._model.add_level(level)


class Reader:
    """Reads what `Writer` wrote.

    Attributes:
        data: range decoder that supplies the symbols.
        num_levels: number of levels of magnitude.
    """

    def __init__(self, data: RangeDecoder, num_levels: int) -> None:
        self.data, self.num_levels, self._model = data, num_levels, _Model(num_levels)

    def read(self, tensor: Tensor) -> Iterator[tuple[Ints, NDArray[np.bool_], Ints]]:
        """Read one tensor block by block: yield the sent entries, which of them are negative, and their
        levels.

        Raises:
            PacketCorrupt, PacketTruncated: the data are damaged or end too early.
        """
        left = self.data.read_number(tensor.size.bit_length() + 1)
        if not left:
            return
        busy_columns = Activity(tensor.num_columns)
        for block, rows, columns in tensor.blocks():
            last = block.stop == tensor.stop
            num_hits = left if last else self.data.read_number(rows.size.bit_length() + 1)
            if num_hits > min(left, rows.size):
                raise PacketCorrupt(
                    f"a block announces {num_hits} of its {rows.size} entries, but {left} remain in the"
                    " tensor"
                )
            hits = places_of(rows, columns, busy_columns, num_hits, read_hits(self.data))
            if hits.size < num_hits:
                raise PacketCorrupt(f"a block has {hits.size} entries, but announced {num_hits}")
            left -= num_hits
            self._model.start_block()
            found = [self._read_entry(row) for row in rows[hits].tolist()]
            signs, levels = np.array(found, np.int64).reshape(-1, 2).T
            yield block.start + hits, signs.astype(np.bool_), levels

    def _read_entry(self, row: int) -> tuple[int, int]:
        counts, likely = self._model.signs(row)
        unlike = self.data.read_counted(counts)
        sign = unlike ^ likely
        self._model.add_sign(counts, unlike, sign)
        if self.num_levels == 1:
            return sign, 0
        level = self.data.read_counted(self._model.levels())
        self._model.add_level(level)
        return sign, level
