"""Columns of a CSV file, filled row by row, so that only the converted values take memory.

Cells become numbers, class numbers, token ids or group names as soon as they are read. Errors name the row,
the column and the cell. Rows are counted as in a spreadsheet: the first line of the file is row 1.
"""

import csv
import math
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.source_options import repeated
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_text_input
from fleetune.protocols.one_line import flat

EXACT = 2**24  # float32 holds every whole number up to here
ROUNDED_REMEDY = "leave the column out, or subtract a constant from it"
_MAX_ROUNDED = 10_000
_CHUNK_CELLS = 2**14
_SHOWN = 50
_WHOLE = re.compile(r"\s*[+-]?[0-9]+(\.0*)?\s*")

Rows = list[tuple[int, list[str]]]


class CsvFile:
    """A CSV file and the names of its columns.

    Args:
        source: the source as the user wrote it, for messages.
        path: path of the file; `.gz` is unpacked.
        names: names of the columns; empty: the first row has them.

    Raises:
        DataError: the file cannot be read or has no rows, or two columns have the same name.
    """

    def __init__(self, source: str, path: Path, names: Sequence[str] = ()) -> None:
        self.source, self.path = source, path
        self._headless, self._first = bool(names), 0
        self.names = [*names] or self._first_row()
        twice = repeated(self.names)
        if twice is not None:
            places = [place for place, name in enumerate(self.names, 1) if name == twice]
            where = " and ".join(map(str, places))
            raise DataError(
                f"{source}: columns {where} have the same name {twice!r}; give each column its own name"
            )

    def check(self, names: Sequence[str], option: str) -> None:
        """Raise DataError if a column that an option lists does not exist, or is listed twice."""
        twice = repeated(names)
        if twice is not None:
            raise DataError(f"{self.source}: {option} lists {twice!r} twice; list each column once")
        for name in names:
            if name not in self.names:
                names_shown = flat(", ".join(self.names))[:500]  # a quoted name may have several lines
                raise DataError(f"{self.source}: there is no column {name!r}; the columns are {names_shown}")

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield rows with their row numbers, without the header and blank rows.

        Raises:
            DataError: the file cannot be read, or a row has more or fewer cells than there are columns.
        """
        for number, row in self._all_rows():
            if not row or (number == self._first and not self._headless):
                continue
            if len(row) != len(self.names):
                raise DataError(
                    f"{self.source}: row {number} has {len(row)} columns; it must have"
                    f" {len(self.names)}, as the first row"
                )
            yield number, row

    def fill(self, *columns: "Column | None", cells_per_row: int = 1) -> None:
        """Read all rows in chunks, and pass each chunk to the columns; raises their errors and those of
        `rows`.
        """
        rows, found = self.rows(), False
        some = max(1, _CHUNK_CELLS // max(cells_per_row, len(self.names)))
        while chunk := [*islice(rows, some)]:
            found = True
            for column in columns:
                if column is not None:
                    column.take(chunk)
        if not found:
            raise DataError(f"{self.source}: {self.path} has no rows; it must have at least one")

    def wrong_cell(self, row: int, name: str, cell: str, words: str) -> DataError:
        """Return the error for a cell, with its place, what is wrong, and what to do."""
        shown = repr(cell) if len(cell) <= _SHOWN else f"{cell[:_SHOWN]!r}..."
        return DataError(f"{self.source}: row {row}, column {name}: {shown} {words}")

    def _first_row(self) -> list[str]:
        for _, row in self._all_rows():
            if row:
                return [name.strip() for name in row]
        raise DataError(f"{self.source}: {self.path} has no rows; its first row must name the columns")

    def _all_rows(self) -> Iterator[tuple[int, list[str]]]:
        number = 0
        try:
            with open_text_input(self.path) as file:
                reader, seen = csv.reader(file), False
                for number in count(1):
                    row = next(reader, None)
                    if row is None:
                        return
                    if row and not seen:
                        seen, self._first = True, number
                    yield number, row
        except (UnicodeDecodeError, csv.Error) as problem:
            raise DataError(
                f"{self.source}: cannot read {self.path}: {problem} (after row {max(0, number - 1)})"
            ) from None


class Column(Protocol):
    """Converts the cells of one or more columns to an array."""

    def take(self, rows: Rows) -> None:
        """Convert the next rows. Raises DataError for an invalid cell."""


class Numbers:
    """Converts columns to float32, shape (n, columns).

    Attributes:
        whole: True if every number so far is whole.
    """

    def __init__(self, file: CsvFile, names: Sequence[str]) -> None:
        self._file, self._names = file, [*names]
        self._places = [file.names.index(name) for name in names]
        self._found = array("f")
        self._rounded = RoundedNumbers()
        self.whole = True

    def take(self, rows: Rows) -> None:
        values = self._values(rows)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        if not np.isfinite(single).all():
            row, place = np.argwhere(~np.isfinite(single))[0]
            words = "is not a finite float32 number; correct it or remove the row"
            raise self._wrong(rows[row], place, words)
        for row, place in np.argwhere(np.abs(values) >= EXACT):
            other = self._rounded.other(self._names[place], rows[row][1][self._places[place]])
            if other is not None:
                words = f"and {other} become one number as float32; {ROUNDED_REMEDY}"
                raise self._wrong(rows[row], place, words)
        self.whole = self.whole and bool((values == np.floor(values)).all())
        self._found.frombytes(single.tobytes())

    def done(self) -> NDArray[np.float32]:
        """Return all numbers read so far."""
        return np.frombuffer(self._found, np.float32).reshape(-1, len(self._names))

    def _values(self, rows: Rows) -> NDArray[np.float64]:
        cells = (row[place] for _, row in rows for place in self._places)
        shape = len(rows), len(self._places)
        try:
            return np.fromiter(map(float, cells), np.float64, math.prod(shape)).reshape(shape)
        except ValueError:
            for row in rows:
                for place, at in enumerate(self._places):
                    if not _is_number(row[1][at]):
                        words = "is no number" if row[1][at].strip() else "is empty; a number was expected"
                        words += "; correct it, remove the row, or leave the column out with columns="
                        raise self._wrong(row, place, words) from None
            raise

    def _wrong(self, row: tuple[int, list[str]], place: int, words: str) -> DataError:
        return self._file.wrong_cell(row[0], self._names[place], row[1][self._places[place]], words)


class RoundedNumbers:
    """Finds two different whole numbers of a column that become one float32, such as ids or time stamps.

    It compares each number from 2**24 on with earlier ones of its column. Once it has `_MAX_ROUNDED` numbers
    of all columns, it forgets them all, so that memory does not grow with the number of columns. So it finds
    numbers in rows close to each other, such as ids, and may miss others.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, float], int] = {}

    def other(self, column: str, cell: str) -> int | None:
        """Return an earlier, different number of the column that is equal as float32; None without one.

        Args:
            column: name of the column.
            cell: a number of at least 2**24, as text. Numbers with a fraction are ignored.
        """
        if not is_whole(cell):
            return None
        if len(self._seen) >= _MAX_ROUNDED:
            self._seen.clear()
        whole = as_whole(cell)
        with np.errstate(over="ignore"):
            seen = self._seen.setdefault((column, float(np.float32(float(cell)))), whole)
        return None if seen == whole else seen


class Classes:
    """Converts the texts of a label to class numbers, int64, shape (n,)."""

    def __init__(self, file: CsvFile, name: str, classes: Sequence[str]) -> None:
        self._file, self._name, self._place = file, name, file.names.index(name)
        self._numbers = {text: number for number, text in enumerate(classes)}
        self._found = array("q")

    def take(self, rows: Rows) -> None:
        for number, row in rows:
            cell = row[self._place]
            found = self._numbers.get(cell.strip())
            if found is None:
                words = (
                    f"is not one of the classes {', '.join(self._numbers)[:200]}; list every"
                    " text of the label"
                )
                raise self._file.wrong_cell(number, self._name, cell, words)
            self._found.append(found)

    def done(self) -> NDArray[np.int64]:
        """Return all class numbers read so far."""
        return np.frombuffer(self._found, np.int64)


class Groups:
    """Converts a column to texts, shape (n,); each different text is stored once."""

    def __init__(self, file: CsvFile, name: str) -> None:
        self._place, self._numbers, self._found = file.names.index(name), dict[str, int](), array("i")

    def take(self, rows: Rows) -> None:
        known = self._numbers
        self._found.extend([known.setdefault(row[self._place], len(known)) for _, row in rows])

    def done(self) -> NDArray[np.object_]:
        """Return all texts read so far, as str objects."""
        return np.array([*self._numbers], object)[np.frombuffer(self._found, np.intc)]


class TokenIds:
    """Converts columns of words to token ids, float32, shape (n, words)."""

    def __init__(self, file: CsvFile, names: Sequence[str], words: int, vocabulary: int) -> None:
        self._places = [file.names.index(name) for name in names]
        self._words, self._vocabulary, self._found = words, vocabulary, array("f")

    def take(self, rows: Rows) -> None:
        for _, row in rows:
            text = " ".join(row[place] for place in self._places)
            self._found.extend(token_ids(text, self._words, self._vocabulary))

    def done(self) -> NDArray[np.float32]:
        """Return all token ids read so far."""
        return np.frombuffer(self._found, np.float32).reshape(-1, self._words)


def token_ids(text: str, words: int, vocabulary: int) -> list[int]:
    """Convert the first words of a text to token ids from 1 to `vocabulary - 1`, padded with 0.

    An id is the word's checksum (CRC-32) modulo the vocabulary, so that no device needs a dictionary.
    """
    found = islice(re.finditer(r"\w+", text.lower()), words)
    ids = [1 + zlib.crc32(word.group().encode()) % (vocabulary - 1) for word in found]
    return ids + [0] * (words - len(ids))


def is_whole(cell: str) -> bool:
    """True if a cell is written as a whole number, such as 12 or 12.0. 1.2e9 counts as a measured number."""
    return _WHOLE.fullmatch(cell) is not None


def as_whole(cell: str) -> int:
    """Return the exact number of a cell for which `is_whole` is true.

    Raises ValueError if the number has thousands of digits.
    """
    return int(cell.partition(".")[0])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
