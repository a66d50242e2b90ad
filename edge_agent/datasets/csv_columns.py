"""Converts the cells of tables and messages: to numbers, times, class numbers, token ids or group names.

A table is a CSV file, or a stream of messages whose columns are JSON paths. It decides what a bad cell does:
a data set stops with an error, a stream leaves out the row and counts it. Rows are counted as in a
spreadsheet: the first line of the file is row 1.
"""

import csv
import datetime as dt
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.source_options import repeated
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_text_input

EXACT = 2**24  # float32 holds every whole number up to here
ROUNDED_REMEDY = "leave the column out, or subtract a constant from it; name a time with time="
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})  # in lower case
MISSING_REMEDY = "missing=gap leaves such rows out"
_MAX_ROUNDED = 10_000
_CHUNK_CELLS = 2**14
_SHOWN = 50
_WHOLE = re.compile(r"\s*[+-]?[0-9]+(\.0*)?\s*")
_PARTS_OF_DATE = 6

Row = tuple[int, list[str]]
Rows = list[Row]
CellKind = Literal["not-numbers", "not-finite", "label", "file"]


class Table(Protocol):
    """What converts cells: the names of the columns, and what a bad cell does.

    Attributes:
        names: names of the columns.
        refused: indices of the rows of the present portion that are refused.
    """

    names: list[str]
    refused: set[int]

    def refuse(self, place: int, row: Row, name: str, kind: CellKind, words: str) -> None:
        """Handle a bad cell.

        Args:
            place: index of the row in its portion.
            row: its number and its cells.
            name: the column.
            kind: kind of the problem; "file" if the table cannot be used at all.
            words: what is wrong, and what to do.
        """


class CsvFile:
    """A CSV file and the names of its columns.

    Args:
        where: the source as the user wrote it, or the file, for messages.
        path: path of the file; `.gz` is unpacked.
        names: names of the columns; empty: the first row has them.

    Raises:
        DataError: the file cannot be read or has no rows, or two columns have the same name.
    """

    def __init__(self, where: str, path: Path, names: Sequence[str] = ()) -> None:
        self.where, self.path = where, path
        self.refused: set[int] = set()  # a bad cell ends reading
        self._headless, self._first = bool(names), 0
        self.names = [*names] or self._first_row()
        self._width = len(self.names)
        twice = repeated(self.names)
        if twice is not None:
            places = [place for place, name in enumerate(self.names, 1) if name == twice]
            both = " and ".join(map(str, places))
            raise DataError(
                f"{where}: columns {both} have the same name {twice!r}; give each column its own name"
            )

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield rows with their row numbers, without the header and blank rows.

        Raises:
            DataError: the file cannot be read, or a row has more or fewer cells than there are columns.
        """
        for number, row in self._all_rows():
            if not row or (number == self._first and not self._headless):
                continue
            if len(row) != self._width:
                raise DataError(
                    f"{self.where}: row {number} has {len(row)} columns; it must have {self._width}, as the"
                    " first row"
                )
            yield number, row

    def portions(self, cells_per_row: int = 1) -> Iterator[Rows]:
        """Yield all rows in portions. Raises as `rows`."""
        rows = self.rows()
        some = max(1, _CHUNK_CELLS // max(cells_per_row, len(self.names)))
        while portion := [*islice(rows, some)]:
            yield portion

    def refuse(self, _place: int, row: Row, name: str, _kind: CellKind, words: str) -> NoReturn:
        """Raise the error for a cell, with its place, what is wrong, and what to do."""
        shown = shown_cell(row[1][self.names.index(name)])
        raise DataError(f"{self.where}: row {row[0]}, column {name}: {shown} {words}")

    def _first_row(self) -> list[str]:
        for _, row in self._all_rows():
            if row:
                return [name.strip() for name in row]
        raise DataError(f"{self.where}: {self.path} has no rows; its first row must name the columns")

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
                f"{self.where}: cannot read {self.path}: {problem} (after row {max(0, number - 1)})"
            ) from None


class Numbers:
    """Converts columns to float32, shape (n, columns); missing cells to NaN.

    Args:
        table: the table.
        names: names of the columns.
        missing: True if cells may be missing; else they are refused.
    """

    def __init__(self, table: Table, names: Sequence[str], *, missing: bool = False) -> None:
        self._table, self._names, self._missing = table, [*names], missing
        self._places = [table.names.index(name) for name in names]
        self._rounded = RoundedNumbers()

    def convert(self, rows: Rows) -> NDArray[np.float32]:
        """Convert the next rows; a refused cell is NaN too."""
        values = self._values(rows)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        for place, column in np.argwhere(~np.isfinite(single)):
            self._check_missing(place, rows[place], column)
        single[~np.isfinite(single)] = np.nan
        for place, column in np.argwhere(np.abs(values) >= EXACT):
            name, cell = self._names[column], rows[place][1][self._places[column]]
            other = self._rounded.other(name, cell)
            if other is not None:
                words = f"and {other} become one number as float32; {ROUNDED_REMEDY}"
                self._table.refuse(place, rows[place], name, "file", words)
        return single

    def _values(self, rows: Rows) -> NDArray[np.float64]:
        shape = len(rows), len(self._places)
        cells = (row[place] for _, row in rows for place in self._places)
        try:
            return np.fromiter(map(float, cells), np.float64, math.prod(shape)).reshape(shape)
        except ValueError:
            cells = (row[place] for _, row in rows for place in self._places)
            return np.fromiter(map(_number, cells), np.float64, math.prod(shape)).reshape(shape)

    def _check_missing(self, place: int, row: Row, column: int) -> None:
        """Refuse a cell that is no finite number, unless it may be missing."""
        cell, name = row[1][self._places[column]].strip(), self._names[column]
        missing = cell.lower() in MISSING
        if missing and self._missing:
            return
        if not cell:
            words, kind = f"is empty; correct it, or {MISSING_REMEDY}", "not-numbers"
        elif _is_number(cell):
            words, kind = "is not a finite float32 number; correct it or remove the row", "not-finite"
            words += f", or {MISSING_REMEDY}" * missing
        else:
            words, kind = "is no number; correct it, or leave the column out with columns=", "not-numbers"
            words += f"; {MISSING_REMEDY}" * missing
            words += f"; a time is named by time={name}" * (_time_of([cell]) is not None)
        self._table.refuse(place, row, name, kind, words)  # type: ignore[arg-type]


class Times:
    """Converts the columns of a row's time to one number, float64, shape (n,).

    One column is a number in any unit, or a date in ISO 8601, in seconds since 1970. Two columns are the
    date and the time of day. More are year, month, day, hour, minute and second. Dates without a zone count
    as UTC.
    """

    def __init__(self, table: Table, names: Sequence[str]) -> None:
        self._table, self._names = table, [*names]
        self._places = [table.names.index(name) for name in names]

    def convert(self, rows: Rows) -> NDArray[np.float64]:
        """Convert the next rows; a refused time is NaN."""
        with suppress(ValueError):  # most tables have plain numbers
            if len(self._places) == 1:
                found = np.fromiter((float(row[self._places[0]]) for _, row in rows), np.float64, len(rows))
                if np.isfinite(found).all():
                    return found
        times = np.full(len(rows), np.nan)
        for place, row in enumerate(rows):
            time = _time_of([row[1][one].strip() for one in self._places])
            if time is None:
                words = "is no time; write a number, or a date such as 2026-05-31T12:00:00"
                self._table.refuse(place, row, self._names[0], "not-numbers", words)
            else:
                times[place] = time
        return times


class Classes:
    """Converts the texts of a label to class numbers, float64, shape (n, 1); missing ones to NaN."""

    def __init__(self, table: Table, name: str, classes: Sequence[str], *, missing: bool = False) -> None:
        self._table, self._name, self._place = table, name, table.names.index(name)
        self._numbers = {text: float(number) for number, text in enumerate(classes)}
        self._missing = missing

    def convert(self, rows: Rows) -> NDArray[np.float64]:
        """Convert the next rows; a refused label is NaN too."""
        found = np.array([[self._numbers.get(row[self._place].strip(), np.nan)] for _, row in rows])
        for place in np.flatnonzero(np.isnan(found[:, 0])):
            if not (self._missing and rows[place][1][self._place].strip().lower() in MISSING):
                known = ", ".join(self._numbers)[:200]
                words = f"is not one of the classes {known}; list every text of the label"
                self._table.refuse(int(place), rows[place], self._name, "label", words)
        return found


class Groups:
    """Converts a column to numbers of its texts, int32, shape (n,); each different text is stored once."""

    def __init__(self, table: Table, name: str, known: dict[str, int] | None = None) -> None:
        self._place, self.known = table.names.index(name), {} if known is None else known

    def convert(self, rows: Rows) -> NDArray[np.int32]:
        known = self.known
        return np.array([known.setdefault(row[self._place], len(known)) for _, row in rows], np.int32)


class TokenIds:
    """Converts columns of words to token ids, float32, shape (n, words)."""

    def __init__(self, table: Table, names: Sequence[str], words: int, vocabulary: int) -> None:
        self._places = [table.names.index(name) for name in names]
        self._words, self._vocabulary = words, vocabulary

    def convert(self, rows: Rows) -> NDArray[np.float32]:
        texts = (" ".join(row[place] for place in self._places) for _, row in rows)
        return np.array([token_ids(text, self._words, self._vocabulary) for text in texts], np.float32)


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _time_of(cells: Sequence[str]) -> float | None:
    """Return the time in the cells of a row, see `Times`; None if there is none."""
    try:
        if len(cells) == 1 and _is_number(cells[0]):
            found = float(cells[0])
            return found if math.isfinite(found) else None
        if len(cells) > 2:
            parts = [int(float(one)) for one in cells[:_PARTS_OF_DATE]]
            date = dt.datetime(*parts, tzinfo=dt.UTC)  # type: ignore[arg-type, misc]
        else:
            date = dt.datetime.fromisoformat("T".join(cells))
        return (date if date.tzinfo else date.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None


def shown_cell(cell: str) -> str:
    """Return a cell as messages show it."""
    return repr(cell) if len(cell) <= _SHOWN else f"{cell[:_SHOWN]!r}..."
