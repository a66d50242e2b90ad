"""The entries that `sparse` sends, tensor after tensor: how many, where, their signs and their levels."""

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
_ROW_UNKNOWN = 64  # entries a row where no row is known
_MOST_VOTES = 3
_LEVEL_STEP = 4  # how much an entry counts, against 1 for levels never seen


@dataclass(frozen=True)
class Tensor:
    """The entries of a patch that are of one tensor.

    Attributes:
        start, stop: which entries of the patch these are.
        row_size: how many entries a row has; 0: rows are not known, or are none.
        places: of every entry of the patch in its tensor; None: the tensor is whole.
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
        """Parts of the patch, with the row in its block and the column in its tensor of each entry."""
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
    """The tensors of a patch of so many entries."""
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
    """What signs and levels are expected, from those before.

    A sign: that of most entries before it in its row, by how many more these are. A level: what came after
    one like that of the entry before.
    """

    def __init__(self, num_levels: int) -> None:
        self._signs = [[1, 1] for _ in range(_MOST_VOTES + 1)]
        self._levels = [[max(1, 16 >> 2 * level) for level in range(num_levels)] for _ in range(num_levels)]
        self.start_block()

    def start_block(self) -> None:
        self._row, self._votes, self._level = -1, 0, 0

    def signs(self, row: int) -> tuple[list[int], int]:
        """How often a sign was the likely one, and how often not; and which is likely for one in `row`."""
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
    """Writes the entries of tensor after tensor.

    Attributes:
        out: where to.
        num_levels: of all entries.
    """

    out: RangeEncoder
    num_levels: int
    _model: _Model = field(init=False)

    def __post_init__(self) -> None:
        self._model = _Model(self.num_levels)

    def write(
        self, tensor: Tensor, chosen: NDArray[np.bool_], negative: NDArray[np.bool_], levels: Ints
    ) -> None:
        """Write one tensor's; arrays are of all entries of the patch."""
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
        data: where from.
        num_levels: of all entries.
    """

    data: RangeDecoder
    num_levels: int
    _model: _Model = field(init=False)

    def __post_init__(self) -> None:
        self._model = _Model(self.num_levels)

    def read(self, tensor: Tensor) -> Iterator[tuple[Ints, NDArray[np.bool_], Ints]]:
        """One tensor's, block by block: entries of the patch, which are negative, and their levels.

        Raises:
            PacketCorrupt, PacketTruncated.
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
