"""CSV files: `csv:FILE?label=COLUMN`, rows as samples, windows of a series, or texts as token ids.

Windows of a series overlap, so their roles are not drawn one by one: a series is cut into blocks of time, no
window reaches over the end of a block, and a block's windows are tested, validated or trained on together
(`Dataset.block`). Blocks are counted from a file's first row: append to it, and nothing changes sides.
"""

import csv
import gzip
import re
import zlib
from pathlib import Path
from typing import Annotated, Any, TextIO
from urllib.parse import parse_qsl

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, dataset
from fleetune.protocols.errors import DataError

VOCABULARY = 8192  # of the built-in model `text-embedding`
Length = Annotated[int, Meta(ge=1, le=2**20)]
Size = Annotated[int, Meta(ge=0, le=2**20)]


class TableOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand behind the question mark; lists have commas between.

    Attributes:
        label: columns of the label; of a series, those whose next values are asked for. Empty: none.
        columns: of the input, in this order; empty: all that have no other part.
        group: the column that says who a row is from. A window has rows of one group.
        test, validation: columns that mark rows by 1; not for a series.
        classes: a label's texts, in the order of its numbers; empty: the label is a number already.
        names: of the columns, where the file has no header.
        text: columns of words; the input is then their token ids.
        words: of a text, at most; shorter ones are filled up with 0.
        vocabulary: ids are below.
        window: rows of a series in one sample; 0: each row is a sample.
        horizon: rows behind the window whose `label` is asked for; 0: the label of the window's last row.
        stride: rows between the first rows of two windows.
        block: rows that have one role; 0: ten times window and horizon.
    """

    label: str = ""
    columns: str = ""
    group: str = ""
    test: str = ""
    validation: str = ""
    classes: str = ""
    names: str = ""
    text: str = ""
    words: Length = 48
    vocabulary: Annotated[int, Meta(ge=2, le=2**24)] = VOCABULARY
    window: Size = 0
    horizon: Size = 0
    stride: Length = 1
    block: Size = 0


def load_table(source: str, path: Path, options: str) -> Dataset:
    """Read a CSV file, also compressed (`.gz`).

    Args:
        source: as the user wrote it, for messages.
        path: of the file.
        options: `key=value` with `&` between, see `TableOptions`.

    Raises:
        DataError: in one line, what is wrong with the options or the file.
    """
    asked = _options(source, options)
    table = _Table(source, *_read(source, path, asked))
    for columns in (asked.label, asked.columns, asked.group, asked.test, asked.validation, asked.text):
        table.check(_list(columns))
    if asked.window:
        return _windows(table, asked)
    return dataset(
        source,
        _texts(table, asked) if asked.text else table.numbers(_inputs(table, asked)),
        _labels(table, asked),
        group=table.texts(asked.group) if asked.group else None,
        test=table.numbers([asked.test])[:, 0] if asked.test else None,
        validation=table.numbers([asked.validation])[:, 0] if asked.validation else None,
    )


def token_ids(text: str, words: int, vocabulary: int) -> list[int]:
    """The first words of a text as numbers 1..vocabulary-1, by their checksums (CRC-32), so that no device
    needs a dictionary; filled up with 0, which is no word.
    """
    found = re.findall(r"\w+", text.lower())[:words]
    ids = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in found]
    return ids + [0] * (words - len(ids))


def _options(source: str, options: str) -> TableOptions:
    try:
        given = dict(parse_qsl(options, keep_blank_values=True, strict_parsing=bool(options)))
        asked = convert(given, TableOptions, strict=False)
    except (ValidationError, ValueError) as problem:
        known = ", ".join(TableOptions.__struct_fields__)
        raise DataError(f"{source}: {problem}; options are {known}, as in ?label=kwh&window=24") from None
    if asked.horizon and not (asked.window and asked.label):
        raise DataError(f"{source}: horizon asks for the label's next values; give window and label too")
    if asked.window and (asked.text or asked.test or asked.validation):
        raise DataError(f"{source}: a series has no text, and its blocks say what is tested; leave them out")
    return asked


def _list(columns: str) -> list[str]:
    return [name.strip() for name in columns.split(",") if name.strip()]


def _read(source: str, path: Path, asked: TableOptions) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and the rows."""

    def rows_of(file: TextIO) -> list[list[str]]:
        return [row for row in csv.reader(file) if row]

    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
                rows = rows_of(file)
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = rows_of(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{source}: cannot read {path}: {problem}") from None
    names = _list(asked.names) or [name.strip() for name in (rows.pop(0) if rows else [])]
    if not rows:
        raise DataError(f"{source}: {path} has no rows")
    for number, row in enumerate(rows, start=1 if asked.names else 2):
        if len(row) != len(names):
            raise DataError(f"{source}: row {number} has {len(row)} columns, the first {len(names)}")
    return names, rows


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Table:
    """Columns by name."""

    def __init__(self, source: str, names: list[str], rows: list[list[str]]) -> None:
        self.source, self.names, self._rows = source, names, rows

    def check(self, names: list[str]) -> None:
        """Raises DataError: there is no such column."""
        for name in names:
            if name not in self.names:
                raise DataError(f"{self.source}: no column {name!r}; there are {', '.join(self.names)}")

    def texts(self, name: str) -> NDArray[np.str_]:
        """A column as it stands, shape (n,)."""
        place = self.names.index(name)
        return np.array([row[place] for row in self._rows])

    def numbers(self, names: list[str]) -> NDArray[np.float32]:
        """Columns as numbers, shape (n, columns)."""
        found = np.empty((len(self._rows), len(names)), np.float32)
        for place, name in enumerate(names):
            column = self.texts(name)
            try:
                found[:, place] = column.astype(np.float64)
            except ValueError:
                wrong = next(text for text in column.tolist() if not _is_number(text))
                raise DataError(f"{self.source}: column {name} holds {wrong[:50]!r}, no number") from None
        return found


def _inputs(table: _Table, asked: TableOptions) -> list[str]:
    """Names of the input's columns. A series that is forecast is its own input, too."""
    labels = [] if asked.horizon else _list(asked.label)
    used = {*labels, asked.group, asked.test, asked.validation}
    found = _list(asked.columns) or [name for name in table.names if name not in used]
    if not found:
        raise DataError(f"{table.source}: no columns are left for the input")
    return found


def _texts(table: _Table, asked: TableOptions) -> NDArray[np.float32]:
    columns = [table.texts(name) for name in _list(asked.text)]
    texts = (" ".join(parts) for parts in zip(*columns, strict=True))
    return np.array([token_ids(text, asked.words, asked.vocabulary) for text in texts], np.float32)


def _labels(table: _Table, asked: TableOptions) -> NDArray[Any] | None:
    """None: there are none."""
    names = _list(asked.label)
    if not names:
        return None
    if asked.classes:
        classes = _list(asked.classes)
        numbers = {text: number for number, text in enumerate(classes)}
        found = [numbers.get(text.strip()) for text in table.texts(names[0])]
        if len(names) > 1 or None in found:
            raise DataError(f"{table.source}: classes list the texts of one label, all of them")
        return np.array(found, np.int64)
    labels = table.numbers(names)
    whole = labels.shape[1] == 1 and not asked.horizon and (labels == np.floor(labels)).all()
    return labels[:, 0].astype(np.int64) if whole else labels


def _windows(table: _Table, asked: TableOptions) -> Dataset:
    """Samples of shape (columns, window), time last, as convolutions take them."""
    values, labels = table.numbers(_inputs(table, asked)), _labels(table, asked)
    groups = table.texts(asked.group) if asked.group else np.zeros(len(values), np.str_)
    rows = asked.block or 10 * (asked.window + asked.horizon)
    starts: list[NDArray[np.intp]] = []
    blocks: list[NDArray[np.intp]] = []
    for group in dict.fromkeys(groups.tolist()):
        own = np.flatnonzero(groups == group)
        for first in range(0, own.size, rows):
            spans = _spans(own[first : first + rows], asked)
            blocks.append(np.full(len(spans), len(blocks)))
            starts.append(spans)
    spans = np.concatenate(starts)
    if not len(spans):
        raise DataError(f"{table.source}: no block of {rows} rows holds a window and its horizon")
    past, future = spans[:, : asked.window], spans[:, asked.window :]
    y = None
    if labels is not None:
        y = labels[future].reshape(len(spans), -1) if asked.horizon else labels[past[:, -1]]
    return dataset(
        table.source,
        np.ascontiguousarray(np.moveaxis(values[past], 1, 2)),
        y,
        group=groups[past[:, 0]] if asked.group else None,
        block=np.concatenate(blocks),
    )


def _spans(block: NDArray[np.intp], asked: TableOptions) -> NDArray[np.intp]:
    """Rows of each window of a block and of its horizon, shape (windows, window + horizon)."""
    length = asked.window + asked.horizon
    if block.size < length:
        return np.zeros((0, length), np.intp)
    return sliding_window_view(block, length)[:: asked.stride]
