"""Entries that `sparse` sends, tensor by tensor: their number, places, signs and levels."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sparse_places import (
    BLOCK,
    Activity,
    places_of,
    read_hits,
    write_hits,
)
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

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
        """Blocks of the tensor: their range in the patch, and each entry's row in the block and column in
        the tensor.
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


def tensors_of(known: Known, count: int) -> list[Tensor]:
    """Divide a patch of `count` entries into its tensors."""
    tensors, start = [], 0
    while start < count:
        number = known.tensors[start] if known.tensors.size else 0
        stop = int(np.searchsorted(known.tensors, number, "right")) if known.tensors.size else count
        row_size = known.row_sizes[number] if known.row_sizes else 0
        known_rows = row_size if 1 < row_size <= BLOCK else 0
        tensors.append(Tensor(start, stop, known_rows, known.places))
        start = stop
    return tensors


class _Model:
    """Prediction of signs and levels from those before.

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
        """Counts of likely and unlikely signs, and which sign is likely next in `row`."""
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


@dataclass
class Writer:
    """Writes the sent entries of tensor after tensor.

    Attributes:
        out: range encoder that receives the symbols.
        num_levels: number of levels of magnitude.
    """

    out: RangeEncoder
    num_levels: int
    _model: _Model = field(init=False)

    def __post_init__(self) -> None:
        self._model = _Model(self.num_levels)

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


@dataclass
class Reader:
    """Reads what `Writer` wrote.

    Attributes:
        data: range decoder that supplies the symbols.
        num_levels: number of levels of magnitude.
    """

    data: RangeDecoder
    num_levels: int
    _model: _Model = field(init=False)

    def __post_init__(self) -> None:
        self._model = _Model(self.num_levels)

    def read(self, tensor: Tensor) -> Iterator[tuple[Ints, NDArray[np.bool_], Ints]]:
        """Read one tensor block by block: the sent entries of the patch, True for each negative one, and
        their levels.

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
                raise PacketCorrupt(f"{num_hits} of {rows.size} entries, where {left} are left")
            hits = places_of(rows, columns, busy_columns, num_hits, read_hits(self.data))
            if hits.size < num_hits:
                raise PacketCorrupt(f"{hits.size} entries where {num_hits} were announced")
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
