"""CSV files, `csv:FILE?label=COLUMN`: rows as samples, windows of time series, or texts as token ids.

The path may be a file, a folder or a pattern. Files are read one after the other, in the order of names.

Windows of a time series overlap, so they cannot be split one by one. The series is cut into blocks of time,
and no window crosses the end of a block. All windows of a block belong to the same part of the split
(`Dataset.block`). Blocks are counted from the first row of a file (and group), so that appended rows move no
window to another part.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.edge_agent.datasets import csv_columns
from fleetune.edge_agent.datasets.csv_columns import Classes, CsvFile, Numbers, TokenIds
from fleetune.edge_agent.datasets.csv_files import csv_files
from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.edge_agent.datasets.row_reader import (
    FILE,
    FOLDER,
    RowReader,
    check_columns,
    input_names,
    with_places,
)
from fleetune.edge_agent.datasets.series_options import CLASSES_OF_ONE, Length, SeriesOptions, series_options
from fleetune.edge_agent.datasets.source_options import name_list, source_options
from fleetune.edge_agent.datasets.windows import Rows, Series
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import memory_limit_bytes, size_words
from fleetune.protocols.one_line import flat

VOCABULARY = 8192  # of the built-in model `text-embedding`
Groups = NDArray[np.int32]


class TableOptions(SeriesOptions, frozen=True, forbid_unknown_fields=True):
    """Options after the question mark, with those of `SeriesOptions`.

    Attributes:
        test, validation: columns that mark rows of that part with 1; not for a time series.
        text: columns of words; the input is their token ids.
        words: largest number of words of a text; shorter texts are padded with 0.
        vocabulary: number of token ids.
    """

    test: str = ""
    validation: str = ""
    text: str = ""
    words: Length = 48
    vocabulary: Annotated[int, Meta(ge=2, le=2**24)] = VOCABULARY

    @property
    def marks(self) -> list[str]:
        """The options that mark the parts of the split and are given."""
        return [name for name in ("test", "validation") if getattr(self, name)]


def load_csv(source: str, path: Path, options: str) -> Dataset:
    """Load CSV files, plain or compressed (`.gz`).

    Args:
        source: the source as the user wrote it, for messages.
        path: path of a file or folder, or a pattern such as logs/*.csv.
        options: `key=value` pairs separated by `&`, see `TableOptions`.

    Raises:
        DataError: an option or a file is wrong, or the samples do not fit into memory.
    """
    settings = table_options(source, options)
    samples = _Samples(source, settings)
    for table in tables(source, path, settings):
        samples.read(table)
    return samples.dataset()


def table_options(source: str, options: str) -> TableOptions:
    """Return the options of a source. Raises DataError."""
    settings = series_options(source, source_options(source, options), TableOptions)
    if settings.window and (settings.text or settings.marks):
        raise DataError(
            f"{source}: with window, the options text, test and validation are not allowed; leave them out"
        )
    if settings.classes and not settings.label:
        raise DataError(f"{source}: {CLASSES_OF_ONE}")
    if settings.text and settings.columns:
        raise DataError(f"{source}: text and columns both name the input; give only one of them")
    return settings


def tables(source: str, path: Path, settings: TableOptions) -> Iterator[CsvFile]:
    """Yield the files of a source, whose columns are checked against the options and the first file.

    Raises:
        DataError: there is no file, or one lacks a column.
    """
    first: CsvFile | None = None
    for file in csv_files(source, path):
        where = source if file == path else str(file)
        table = CsvFile(where, file, name_list(settings.names))
        table.names += [FOLDER, FILE]
        check_columns(where, table.names, settings, _roles(settings))
        if first is not None and not settings.columns and {*table.names} != {*first.names}:
            other = flat(", ".join(sorted({*first.names} ^ {*table.names})))[:200]
            raise DataError(
                f"{where}: its columns differ from those of {first.path}: only one of both has {other}; name"
                " the columns that all files have with columns="
            )
        first = first or table
        yield table


def _roles(settings: TableOptions) -> dict[str, str]:
    return {name: getattr(settings, name) for name in ("test", "validation", "text")}


@dataclass
class _Samples:
    """Collects the samples of all files.

    Attributes:
        source: the source as the user wrote it, for messages.
        settings: the options.
    """

    source: str
    settings: TableOptions
    names: Sequence[str] = ()
    _x: "array[float]" = field(default_factory=lambda: array("f"))
    _y: "array[float]" = field(default_factory=lambda: array("d"))
    _group: "array[int]" = field(default_factory=lambda: array("i"))
    _block: "array[int]" = field(default_factory=lambda: array("q"))
    _marks: "array[float]" = field(default_factory=lambda: array("f"))
    _groups: dict[str, int] = field(default_factory=dict)
    _num_rows: int = 0
    _longest: int = 0
    _blocks: int = 0

    def read(self, table: CsvFile) -> None:
        """Add the samples of a file. Raises DataError."""
        settings, marks = self.settings, self.settings.marks
        self.names = self.names or input_names(
            table.where, table.names, settings, {settings.test, settings.validation}
        )
        inputs: Numbers | TokenIds
        if settings.text:
            inputs = TokenIds(table, name_list(settings.text), settings.words, settings.vocabulary)
        else:
            inputs = Numbers(table, self.names, missing=settings.missing != "refuse")
        reader = RowReader(table, settings, inputs, _label(table, settings), groups=self._groups)
        marked = Numbers(table, [getattr(settings, name) for name in marks])
        series: list[tuple[Rows, Groups]] = []
        for portion in self._portions(table):
            self._num_rows += len(portion)
            rows, group = reader.read(portion)
            if settings.window:
                series.append((rows, group))
                continue
            kept = ~(np.isnan(rows.x).any(axis=1) | np.isnan(rows.y).any(axis=1))
            if marks:
                self._marks.frombytes(marked.convert(portion)[kept].tobytes())
            self._add(rows.x[kept], rows.y[kept], group[kept])
        if series:
            self._add_windows(series)

    def _portions(self, table: CsvFile) -> Iterator[csv_columns.Rows]:
        settings = self.settings
        for portion in table.portions(settings.words if settings.text else 1):
            if {FOLDER, FILE} & {settings.group, *name_list(settings.label)}:
                yield [(number, with_places(table.path, row)) for number, row in portion]
            else:
                yield portion

    def _add_windows(self, portions: list[tuple[Rows, Groups]]) -> None:
        """Add the windows of each group of a file."""
        for code, rows in _by_group(portions, grouped=bool(self.settings.group)):
            self._longest = max(self._longest, len(rows))
            cutter, base = Series(self.settings, rows.x.shape[1], rows.y.shape[1]), self._blocks
            for found in cutter.push(rows):
                self._blocks = base + found.block + 1
                kept = ~np.isnan(found.y).any(axis=1)
                num = int(kept.sum())
                self._add(found.x[kept], found.y[kept], np.full(num, code, np.int32))
                self._block.extend([base + found.block] * num)

    def _add(self, x: NDArray[np.float32], y: NDArray[np.float64], group: Groups) -> None:
        limit = memory_limit_bytes() // 2
        if len(self._x) * 4 + x.size * 4 > limit:
            step = ", give a larger step" if self.settings.window else ""
            raise DataError(
                f"{self.source}: its samples take more than {size_words(limit)} of memory; read fewer files"
                f"{step}, or store them as a stream with watch: (docs/streams.md)"
            )
        self._x.frombytes(np.ascontiguousarray(x).tobytes())
        self._y.frombytes(np.ascontiguousarray(y).tobytes())
        self._group.frombytes(np.ascontiguousarray(group).tobytes())

    def dataset(self) -> Dataset:
        """Return all samples. Raises DataError if there are none."""
        settings, num = self.settings, len(self._group)
        if not num:
            raise DataError(f"{self.source}: {self._why_none()}")
        shape = (num, -1, settings.window) if settings.window else (num, -1)
        marks = np.frombuffer(self._marks, np.float32).reshape(num, -1)
        parts = {name: marks[:, place] for place, name in enumerate(settings.marks)}
        names = np.array([*self._groups], object)
        made = make_dataset(
            self.source,
            np.frombuffer(self._x, np.float32).reshape(shape),
            self._labels(num),
            group=names[np.frombuffer(self._group, np.intc)] if settings.group else None,
            block=np.frombuffer(self._block, np.int64) if settings.window else None,
            test=parts.get("test"),
            validation=parts.get("validation"),
        )
        return made if settings.text else replace(made, columns=tuple(self.names))

    def _why_none(self) -> str:
        settings = self.settings
        if not self._num_rows:
            return "there are no rows; a file must have at least one"
        if not settings.window:
            return "every row has an empty cell; name complete columns with columns="
        if self._longest < settings.length:
            horizon = f" and horizon {settings.horizon}" if settings.horizon else ""
            return (
                f"window {settings.window}{horizon} is longer than every file (or group): the longest has"
                f" {self._longest} rows; give a smaller window"
            )
        return (
            f"no {settings.length} rows follow each other without a gap or an empty cell; give a smaller"
            " window or a larger gap, or missing=hold"
        )

    def _labels(self, num: int) -> NDArray[np.int64] | NDArray[np.float32] | None:
        if not self.settings.label:
            return None
        labels = np.frombuffer(self._y).reshape(num, -1)
        is_class = labels.shape[1] == 1 and not self.settings.horizon and not (labels % 1).any()
        return labels[:, 0].astype(np.int64) if is_class else labels.astype(np.float32)


def _label(table: CsvFile, settings: TableOptions) -> Numbers | Classes | None:
    names, missing = name_list(settings.label), settings.missing != "refuse"
    if settings.classes:
        return Classes(table, names[0], name_list(settings.classes), missing=missing)
    return Numbers(table, names, missing=missing) if names else None


def _by_group(portions: list[tuple[Rows, Groups]], *, grouped: bool) -> Iterator[tuple[int, Rows]]:
    """Yield the rows of each group of a file, in the order of their first rows."""
    columns = zip(*(vars(rows).values() for rows, _ in portions), strict=True)
    rows = Rows(*(np.concatenate(column) for column in columns))
    groups = np.concatenate([group for _, group in portions])
    if not grouped:
        yield 0, rows
        return
    for code in dict.fromkeys(groups.tolist()):
        yield code, rows[groups == code]
