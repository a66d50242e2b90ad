"""Samples out of one file: an image, a sound, rows of a table (CSV, Parquet), the arrays of an .npz shard.

CSV and WAV are read here, by readers of our own. All others are decoded in a process of its own.
"""

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.edge_agent.datasets.audio import SOUNDS, wav_features
from fleetune.edge_agent.datasets.csv_columns import EXACT, as_whole, is_whole
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
from fleetune.edge_agent.stream.decoding.frames import Block, Cells, Columns, FileKind, Frame
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_sample
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_input
from fleetune.protocols.one_line import flat

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
TABLES = frozenset({".csv", ".parquet"})
KNOWN = IMAGES | SOUNDS | TABLES | {".npz"}
MAX_TABLE_BYTES = 2**36  # of a CSV file, which is read line by line
MAX_LINE_BYTES = 2**22
MAX_CELLS = 2**18
_MAX_ROUNDED = 10_000  # whole numbers above 2**24 that are compared with the next ones
_ID = "id"


class BadFile(BadSample):
    """Nothing of a file can be taken; it is not tried again until it changes."""

    def __init__(self, words: str) -> None:
        super().__init__("file", words)


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
        labels: names of the columns that are the label.
        class_names: of the labels 0, 1, ...
        columns: names of a table's other columns, in the order in which they are a sample; (): as they stand
            in the first table.
        refuse: told of each sample that cannot be kept.
        decoder: reads images, sounds, Parquet and .npz files in a process of its own.
        sounds: how sounds become features.
    """

    refuse: Callable[[BadSample], None]
    decoder: DecoderProcess
    labels: tuple[str, ...] = ("label",)
    class_names: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    sounds: LogMel = LogMel()  # noqa: RUF009 - frozen

    def label(self, words: str) -> int | float | None:
        """A label as it stands in a table, or as a folder is called.

        Raises:
            BadSample: it is neither a number nor one of `class_names`.
        """
        words = words.strip()
        if not words:
            return None
        if words in self.class_names:
            return self.class_names[words]
        try:
            return int(words) if words.lstrip("+-").isdigit() else float(words)
        except ValueError:
            line = f"label {words[:50]!r} is no number, and classes.txt in the folder does not list it"
            raise BadSample("label", line) from None


def read_image(path: Path, reading: ReadOptions) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image as uint8: (height, width) where it is grey, else (height, width, 3).

    Raises:
        BadFile: it is damaged, or too large; NeedsPackage: Pillow is not installed.
    """
    return _one(path, "image", reading)


def read_features(path: Path, reading: ReadOptions) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A sound's log-mel features, of the shape `reading.sounds.shape`.

    Raises:
        BadFile: it is damaged, or has another rate; NeedsPackage: soundfile is not installed.
    """
    found = None
    if path.suffix.lower() == ".wav":  # our own reader knows most of these files
        try:
            found = wav_features(path, reading.sounds)
        except DataError as problem:
            raise BadFile(str(problem)) from None
    return _one(path, "sound", reading) if found is None else found


def read_shard(path: Path, reading: ReadOptions, label: float | None = None) -> Iterator[Sample]:
    """The samples of an .npz file with `x`, and perhaps `y` and `id`; `label` is that of its folder.

    Raises:
        BadFile: it is damaged, has no such arrays, or marks samples for testing.
    """
    for frame in _frames(path, "npz", reading):
        if isinstance(frame, Block):
            x, y = frame.x.array, None if frame.y is None else frame.y.array
            for index, one in enumerate(x):
                name = None if frame.names is None else frame.names[index]
                yield from _made(one, label if y is None else y[index], name, reading)


def read_parquet(path: Path, reading: ReadOptions, label: float | None = None) -> Iterator[Sample]:
    """The rows of a Parquet file.

    Raises:
        BadFile: it is damaged, or its columns are others; NeedsPackage: pyarrow is not installed.
    """
    rows: Rows | None = None
    for frame in _frames(path, "parquet", reading):
        if isinstance(frame, Columns):
            rows = Rows(path, frame.names, reading, label)
        elif isinstance(frame, Cells) and rows is not None:
            for row in frame.rows:
                yield from rows.sample(row)


def _one(path: Path, kind: FileKind, reading: ReadOptions) -> np.ndarray[Any, Any]:
    found = [frame for frame in _frames(path, kind, reading) if isinstance(frame, Block)]
    if len(found) != 1 or len(found[0].x.array) != 1:
        raise BadFile(f"{path}: not one {kind}")
    array: np.ndarray[Any, Any] = found[0].x.array[0]
    return array


def _frames(path: Path, kind: FileKind, reading: ReadOptions) -> Iterator[Frame]:
    """What the decoding process sends of a file."""
    try:
        yield from reading.decoder.decode(path, kind)
    except DataError as problem:
        raise BadFile(str(problem)) from None


class Rows:
    """From the rows of a table to samples.

    Args:
        path: of the table, for messages.
        names: of its columns.
        reading: how they are read.
        label: of its folder, for tables without a column of labels.

    Raises:
        BadFile: it has not the columns that a table here has.
    """

    def __init__(
        self, path: Path, names: Sequence[str], reading: ReadOptions, label: float | None = None
    ) -> None:
        names = [name.strip() for name in names]
        places = {name: place for place, name in enumerate(names)}
        inputs = tuple(name for name in names if name not in reading.labels and name != _ID)
        self.columns = reading.columns or inputs
        if len(places) < len(names) or not inputs:
            raise BadFile(f"{path}: its first line must name each column once, and one at least is a number")
        if set(inputs) != set(self.columns):
            raise BadFile(
                f"{path}: columns {', '.join(inputs)[:100]}; tables here have {', '.join(self.columns)[:100]}"
            )
        self._reading, self._folder, self._width, self._names = reading, label, len(names), names
        self._inputs = [places[name] for name in self.columns]
        self._labels = [places[name] for name in reading.labels if name in places]
        self._id, self._path = places.get(_ID), path
        self._rounded: dict[tuple[str, float], int] = {}

    def sample(self, cells: Sequence[str]) -> Iterator[Sample]:
        """The sample in a row; none where it cannot be kept.

        Raises:
            BadFile: a column holds two different whole numbers that are one float32, such as numbers of rows.
        """
        try:
            if len(cells) != self._width:
                words = f"a row of {len(cells)} cells; the first line has {self._width}"
                raise BadSample("shape", words)  # noqa: TRY301
            x = np.array([self._number(cells, place) for place in self._inputs], np.float64)
            y = [self._reading.label(cells[place]) for place in self._labels]
        except BadFile:
            raise
        except BadSample as problem:
            self._reading.refuse(problem)
            return
        label: Any = self._folder if not y else y[0] if len(y) == 1 else None if None in y else y
        name = None if self._id is None else cells[self._id].strip() or None
        yield from _made(x, label, name, self._reading)

    def _number(self, cells: Sequence[str], place: int) -> float:
        words, name = cells[place], self._names[place]
        try:
            found = float(words)
        except ValueError:
            said = f"{self._path}: column {name} holds {words[:50]!r}; it must be a number"
            raise BadSample("not-numbers", said) from None
        if not math.isfinite(found):
            said = f"{self._path}: column {name} holds {words[:50]!r}; a finite number was expected"
            raise BadSample("not-finite", said)
        if abs(found) >= EXACT and is_whole(words):
            self._check_rounded(name, found, as_whole(words))
        return found

    def _check_rounded(self, name: str, found: float, whole: int) -> None:
        if len(self._rounded) >= _MAX_ROUNDED:
            self._rounded.clear()
        with np.errstate(over="ignore"):
            seen = self._rounded.setdefault((name, float(np.float32(found))), whole)
        if seen != whole:
            raise BadFile(
                f"{self._path}: column {name}: {seen} and {whole} become one number as float32;"
                " leave the column out of the file, or subtract a constant from it"
            )


class CsvLines:
    """A CSV file, which may still grow: whole lines from where one stopped.

    Args:
        path: of the file.
        reading, label: as of `Rows`.
        taken: bytes that were taken before; more than there are, and it is begun anew.

    Raises:
        BadFile: see `Rows`; or its first line is too long, or no text.
    """

    def __init__(self, path: Path, reading: ReadOptions, label: float | None = None, taken: int = 0) -> None:
        self._path, self._reading = path, reading
        with open_input(path, MAX_TABLE_BYTES, error=BadFile) as file:
            head, num_bytes = file.readline(MAX_LINE_BYTES), file.seek(0, os.SEEK_END)
        if not head.endswith(b"\n"):
            raise BadFile(f"{path}: its first line, which names the columns, is too long or not whole")
        self.rows = Rows(path, self._cells(head.removeprefix(b"\xef\xbb\xbf")), reading, label)
        self.taken = taken if len(head) <= taken <= num_bytes else len(head)

    def samples(self, *, last: bool) -> Iterator[Sample]:
        """Those of whole lines, `taken` following; `last`: a last line without its end is whole too."""
        with open_input(self._path, MAX_TABLE_BYTES, error=BadFile) as file:
            file.seek(self.taken)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and not (last or len(line) == MAX_LINE_BYTES):
                    return
                try:
                    cells = self._cells(line)
                except BadFile as problem:
                    self._reading.refuse(BadSample("not-numbers", str(problem)))
                    cells = []
                if cells:
                    yield from self.rows.sample(cells)
                self.taken += len(line)

    def _cells(self, line: bytes) -> list[str]:
        if line.count(b",") >= MAX_CELLS:
            raise BadFile(f"{self._path}: a line of more than {MAX_CELLS:,} cells")
        try:
            return next(csv.reader(io.StringIO(line.decode("utf-8"), newline="")), [])
        except (UnicodeDecodeError, csv.Error) as problem:
            raise BadFile(f"{self._path}: a line that is no CSV ({flat(problem)[:100]})") from None


def _made(x: Any, y: Any, name: Any, reading: ReadOptions) -> Iterator[Sample]:
    try:
        yield make_sample(x, y, name)
    except BadSample as problem:
        reading.refuse(problem)
