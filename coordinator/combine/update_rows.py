"""The updates of a round as rows of a matrix that is read in blocks of columns, one block at a time.

Rows up to `MOST_IN_MEMORY` bytes stay in memory. Beyond that they lie in an unnamed file in the run's folder,
which the system removes with the process.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np

from fleetune.protocols.errors import StoreError
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

MOST_BYTES = 2**24  # of a block of all updates
MOST_IN_MEMORY = 2**22  # of the rows; they are copied once when they move to the file
_STEP = 8  # entries in a byte of a mask: a block begins with a whole byte


@dataclass(frozen=True)
class Block:
    """Consecutive entries of all rows.

    Attributes:
        part: which entries of the model.
        values: float32, shape (rows, entries); `absent` where a row lacks the entry.
        is_full: True if no row lacks an entry.
    """

    part: slice
    values: FlatArray
    is_full: bool


@dataclass(frozen=True)
class _Row:
    """Where a row lies in the file: its mask (None: all entries) and its values."""

    mask_at: int | None
    values_at: int


class UpdateRows:
    """Stores the updates of a round, and reads them by block.

    Args:
        spec: the model.
        folder: folder of the file; None: the system's folder for temporary files.
    """

    def __init__(self, spec: ModelSpec, folder: Path | None = None) -> None:
        self._size = spec.num_parameters
        self._spec = spec
        where = None if folder is None else str(folder)
        self._file = SpooledTemporaryFile(max_size=MOST_IN_MEMORY, dir=where)  # noqa: SIM115 - closed after use
        self._close = weakref.finalize(self, self._file.close)  # also if a round is given up
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, patch: Patch) -> None:
        """Store one update. Raises StoreError if the disk is full."""
        try:
            mask_at = None
            if not isinstance(patch.selection, Everything):
                mask_at = self._file.tell()
                self._file.write(np.packbits(patch.selection.mask(self._spec)[: self._size]).data)
            self._rows.append(_Row(mask_at, self._file.tell()))
            self._file.write(np.ascontiguousarray(patch.values, np.float32).data)
        except OSError as problem:
            raise StoreError(f"cannot write the updates of a round by rows: {problem.strerror}") from None

    def blocks(self, absent: float) -> Iterator[Block]:
        """Yield all entries in consecutive blocks of at most `MOST_BYTES`; `absent` stands for no value.

        The next block overwrites the values of the last one.
        """
        length = max(_STEP, MOST_BYTES // (4 * max(1, len(self))) // _STEP * _STEP)
        next_value = [row.values_at for row in self._rows]
        is_full = all(row.mask_at is None for row in self._rows)
        buffer = np.empty((len(self), min(length, self._size)), np.float32)
        for start in range(0, self._size, length):
            part = slice(start, min(start + length, self._size))
            values = buffer[:, : part.stop - start]
            for number, row in enumerate(self._rows):
                present = self._present(row, part)
                if present is None:
                    values[number] = self._read(next_value[number], part.stop - start)
                    next_value[number] += 4 * (part.stop - start)
                else:
                    count = int(np.count_nonzero(present))
                    values[number] = absent
                    values[number][present] = self._read(next_value[number], count)
                    next_value[number] += 4 * count
            yield Block(part, values, is_full)

    def close(self) -> None:
        """Remove the file."""
        self._close()

    def _present(self, row: _Row, part: slice) -> np.ndarray | None:
        if row.mask_at is None:
            return None
        self._file.seek(row.mask_at + part.start // _STEP)
        packed = np.frombuffer(self._file.read(-(-(part.stop - part.start) // _STEP)), np.uint8)
        return np.unpackbits(packed, count=part.stop - part.start).astype(bool)

    def _read(self, place: int, count: int) -> FlatArray:
        self._file.seek(place)
        return np.frombuffer(self._file.read(4 * count), np.float32)
