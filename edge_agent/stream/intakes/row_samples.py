"""Makes samples of the rows of a stream's table: of a growing CSV file, or of messages.

Without `window` each row is a sample. With it, rows are cut into windows (`datasets.windows`). What a series
needs for its next windows is stored together with its samples, so windows survive a restart. Windows of a
block that overlap belong to the same part of the split: they have the draws of the block's first window.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets import csv_columns
from fleetune.edge_agent.datasets.csv_columns import MISSING, CellKind, Numbers, Row, shown_cell
from fleetune.edge_agent.datasets.row_reader import RowReader
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.source_options import name_list
from fleetune.edge_agent.datasets.windows import Rows, Series, SeriesState, Windows
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_sample

MAX_NUMBERS = 2**16  # numbers in a window that is made on the device: they are stored with each message
MAX_GROUPS = 1000
LoadState = Callable[[str], bytes | None]
ReadLabel = Callable[[str], float | None]
_states = msgspec.msgpack.Decoder(SeriesState)


@dataclass(frozen=True)
class LabelTexts:
    """Reads the texts of labels.

    Attributes:
        class_names: class number of each class name.
    """

    class_names: Mapping[str, int]

    def label(self, words: str) -> int | float | None:
        """Return the label that a text gives; None if it is empty.

        Raises:
            BadSample: the text is neither a number nor one of `class_names`.
        """
        words = words.strip()
        if not words:
            return None
        if words in self.class_names:
            return self.class_names[words]
        try:
            return int(words) if words.lstrip("+-").isdigit() else float(words)
        except ValueError:
            line = f"label {words[:50]!r} is not a number, and neither classes= nor classes.txt lists it"
            raise BadSample("label", line) from None


class RowSamples:
    """Makes samples of the rows of one table.

    Args:
        where: the file or the topic, for messages and as the name of its series.
        names: names of the columns.
        inputs: names of the input columns, in the order of a sample.
        options: which columns have which role, and the windows.
        refuse: called with the problem of each row that is refused.
        read_label: returns the label that a cell gives, None if it is empty; raises BadSample.
        load: returns the stored state of a series; None if there is none.
        from_messages: True if rows may come late or twice.

    Attributes:
        states: states to be stored with the samples, by name of the series.
        label: label of all rows, without label columns.

    Raises:
        BadSample: the windows are too large.
    """

    def __init__(
        self,
        where: str,
        names: Sequence[str],
        inputs: Sequence[str],
        options: SeriesOptions,
        *,
        refuse: Callable[[BadSample], None],
        read_label: ReadLabel,
        load: LoadState = lambda _: None,
        from_messages: bool = False,
        label: float | None = None,
    ) -> None:
        self._where, self.names, self._inputs, self.options = where, [*names], [*inputs], options
        self.refused: set[int] = set()
        self._refuse, self._load, self._from_messages, self.label = refuse, load, from_messages, label
        self._groups: dict[str, int] = {}
        self._labels = name_list(options.label)
        # with other options, a series begins anew
        self._key = f"{zlib.crc32(repr((options, self._inputs)).encode()):08x}"
        self._series: dict[str, Series] = {}
        self._reader = RowReader(
            self,
            options,
            Numbers(self, inputs, missing=options.missing != "refuse"),
            _Labels(self, self._labels, read_label) if self._labels else None,
            self._groups,
        )
        if options.length * len(inputs) > MAX_NUMBERS:
            words = f"{where}: {options.length} rows of {len(inputs)} columns are more than {MAX_NUMBERS:,}"
            raise BadSample("file", f"{words} numbers; give a smaller window")

    @property
    def states(self) -> dict[str, bytes]:
        """Return the states of the series that changed, to be stored with their samples."""
        return {name: msgspec.msgpack.encode(series.saved()) for name, series in self._series.items()}

    def refuse(self, place: int, row: Row, name: str, kind: CellKind, words: str) -> None:
        """Count a bad cell. Raises BadSample if the whole table cannot be used."""
        shown = shown_cell(row[1][self.names.index(name)])
        problem = BadSample(kind, f"{self._where}: column {name}: {shown} {words}")
        if kind == "file":
            raise problem
        if place not in self.refused:
            self.refused.add(place)
            self._refuse(problem)

    def samples(
        self, rows: csv_columns.Rows, ids: Sequence[str | None] = (), arrived: float | None = None
    ) -> Iterator[Sample]:
        """Yield the samples of the next rows.

        Args:
            rows: the rows.
            ids: names of the samples of the rows; for rows without windows only.
            arrived: time of rows without a time; None if it is unknown.
        """
        self.refused.clear()
        self._groups.clear()
        read, groups = self._reader.read(rows)
        if arrived is not None and not self.options.time:
            read.time[:] = arrived
        if self.options.window:
            for code in dict.fromkeys(groups.tolist()):
                yield from self._windows(code, read[groups == code])
            return
        usable = ~(read.refused | np.isnan(read.x).any(axis=1))
        for place in np.flatnonzero(usable):
            name = ids[int(place)] if len(ids) else None
            yield from self._made(read.x[place], read.y[place], name)

    def lose(self) -> None:
        """Let no window cross the present place, because a row there cannot be read."""
        if self.options.window and not self.options.group:
            self._opened(0)
        for series in self._series.values():
            series.state.lost = True

    def _windows(self, code: int, rows: Rows) -> Iterator[Sample]:
        series = self._opened(code)
        if not self._from_messages or rows.refused.any():
            found, problem = series.push(rows), ""
        else:
            found, problem = series.insert(rows)
        if problem:
            late = f"{self._where}: a message is older than the window that it belongs to; it is left out"
            self._refuse(BadSample("late", late))
        for windows in found:
            yield from self._of_block(series.state, windows)

    def _of_block(self, state: SeriesState, windows: Windows) -> Iterator[Sample]:
        """Yield windows of one block as samples of the same part of the split."""
        for x, y in zip(windows.x, windows.y, strict=True):
            for sample in self._made(np.ascontiguousarray(x), y, None):
                if self.options.step >= self.options.length:  # no two windows have a row in common
                    yield sample
                    continue
                if state.draws is None or state.draws[0] != windows.block:
                    state.draws = windows.block, sample.for_test, sample.for_validation
                _, for_test, for_validation = state.draws
                yield replace(sample, for_test=for_test, for_validation=for_validation)

    def _opened(self, code: int) -> Series:
        group = next((text for text, number in self._groups.items() if number == code), "")
        name = f"{self._key} {self._where} {group}"
        if name not in self._series:
            if len(self._series) >= MAX_GROUPS:
                words = f"{self._where}: more than {MAX_GROUPS:,} groups; name another column with group="
                raise BadSample("file", words)
            data = self._load(name)
            state = None if data is None else _state(data)
            num_labels = len(self._labels)
            self._series[name] = Series(self.options, len(self._inputs), num_labels, state)
        return self._series[name]

    def _made(self, x: NDArray[np.float32], y: NDArray[np.float64], name: str | None) -> Iterator[Sample]:
        label: float | list[float] | None = self.label
        if len(y):
            label = None if np.isnan(y).any() else _number(y[0]) if len(y) == 1 else y.tolist()
        try:
            yield make_sample(x, label, name)
        except BadSample as problem:
            self._refuse(problem)


def _number(label: float) -> int | float:
    return int(label) if label.is_integer() else float(label)


def _state(data: bytes) -> SeriesState | None:
    try:
        return _states.decode(data)
    except msgspec.MsgspecError:  # another version wrote it
        return None


class _Labels:
    """Converts label columns to float64, shape (n, labels); empty cells to NaN."""

    def __init__(self, table: RowSamples, names: Sequence[str], read_label: ReadLabel) -> None:
        self._table, self._names, self._read = table, [*names], read_label
        self._places = [table.names.index(name) for name in names]

    def convert(self, rows: csv_columns.Rows) -> NDArray[np.float64]:
        found = np.full((len(rows), len(self._places)), np.nan)
        for place, row in enumerate(rows):
            for column, at in enumerate(self._places):
                cell = row[1][at]
                try:
                    label = None if cell.strip().lower() in MISSING else self._read(cell)
                except BadSample as problem:
                    self._table.refuse(place, row, self._names[column], "label", str(problem))
                    continue
                if label is not None:
                    found[place, column] = label
        return found
