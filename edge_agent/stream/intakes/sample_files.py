"""Reads the samples in one file: an image, a sound (WAV), rows of a CSV file, or arrays of an .npz file.

The agent itself reads CSV and WAV. The decoder process reads images and .npz files.
"""

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.edge_agent.datasets.audio import SOUND, sound_features
from fleetune.edge_agent.datasets.csv_columns import EXACT, ROUNDED_REMEDY, RoundedNumbers
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
from fleetune.edge_agent.stream.decoding.frames import Block, FileKind
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_sample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore
from fleetune.edge_agent.stream.store_values import FileProgress, TableColumns
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_input
from fleetune.protocols.one_line import flat

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
KNOWN = IMAGES | {SOUND, ".csv", ".npz"}
MAX_TABLE_BYTES = 2**36  # size of a CSV file, which is read line by line
MAX_LINE_BYTES = 2**22
MAX_CELLS = 2**18
BATCH = 64  # samples in one transaction
_ID = "id"


class NeedsPackage(Exception):  # noqa: N818 - it reports what is missing
    """The package that reads such files is not installed; the message names the package."""


class BadFile(BadSample):
    """Nothing in a file can be read. The file is tried again when it changes."""

    def __init__(self, words: str) -> None:
        super().__init__("file", words)


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
        refuse: called with the problem of each sample that is refused.
        decoder: the process that decodes images and .npz files.
        labels: names of the label columns.
        class_names: class number of each class name.
        columns: names of the input columns, in the order of a sample; (): the order of the table.
        sounds: how sounds become features.
    """

    refuse: Callable[[BadSample], None]
    decoder: DecoderProcess
    labels: tuple[str, ...] = ("label",)
    class_names: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    sounds: LogMel = LogMel()  # noqa: RUF009 - frozen

    def label(self, words: str) -> int | float | None:
        """Return the label that a table's cell or a folder's name gives; None if it is empty.

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
            line = f"label {words[:50]!r} is not a number, and classes.txt in the folder does not list it"
            raise BadSample("label", line) from None


def read_samples(
    path: Path, reading: ReadOptions, label: float | None = None, name: str | None = None
) -> Iterator[Sample]:
    """Read all samples in a file.

    Args:
        path: the file; its ending says its format.
        reading: how the file is read.
        label: label of every sample of a file without labels.
        name: name of the sample in an image or a sound.

    Raises:
        BadFile: the file is damaged, or its ending is unknown.
        NeedsPackage: the package that reads such files is not installed.
    """
    match path.suffix.lower():
        case suffix if suffix in IMAGES:
            yield make_sample(read_image(path, reading), label, name)
        case suffix if suffix == SOUND:
            yield make_sample(read_features(path, reading.sounds), label, name)
        case ".npz":
            yield from read_shard(path, reading, label)
        case ".csv":
            yield from CsvLines(path, reading, label).samples(last=True)
        case suffix:
            raise BadFile(
                f"{path}: {suffix or 'a file without ending'} is not supported; give an image, or a file"
                f" that ends in .csv, .npz or {SOUND}"
            )


def store_file(
    store: SampleStore,
    samples: Iterable[Sample],
    progress: Callable[[], FileProgress] | None = None,
    columns: TableColumns | None = None,
) -> Iterator[Outcome]:
    """Store a file's samples in batches, and its progress with the last one. Raises StoreError."""
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield from store.add(batch)
            batch = []
    yield from store.add(batch, progress=None if progress is None else progress(), columns=columns)


def read_image(path: Path, reading: ReadOptions) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read an image as uint8: (height, width) if it is grey, else (height, width, 3).

    Raises:
        BadFile: it is damaged or too large.
        NeedsPackage: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise NeedsPackage("images need Pillow: pip install pillow")
    found = [*_blocks(path, "image", reading)]
    if len(found) != 1 or len(found[0].x.array) != 1:
        raise BadFile(f"{path}: the decoder process did not return exactly one image; copy the file again")
    array: np.ndarray[Any, np.dtype[np.uint8]] = found[0].x.array[0]
    return array


def read_features(path: Path, sounds: LogMel) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a sound's log-mel features, of shape `sounds.shape`. Raises BadFile, see `read_sound`."""
    try:
        return sound_features(path, sounds)
    except DataError as problem:
        raise BadFile(str(problem)) from None


def read_shard(path: Path, reading: ReadOptions, label: float | None = None) -> Iterator[Sample]:
    """Read the samples of an .npz file with `x`, and optionally `y` and `id`.

    Args:
        path: the file.
        reading: how it is read.
        label: label of its folder, for a file without `y`.

    Raises:
        BadFile: it is damaged, lacks `x`, or marks samples for testing.
    """
    for block in _blocks(path, "npz", reading):
        y = None if block.y is None else block.y.array
        for index, one in enumerate(block.x.array):
            name = None if block.names is None else block.names[index]
            yield from _made(one, label if y is None else y[index], name, reading)


def _blocks(path: Path, kind: FileKind, reading: ReadOptions) -> Iterator[Block]:
    """Yield the samples that the decoder process sends for a file."""
    try:
        yield from reading.decoder.decode(path, kind)
    except DataError as problem:
        raise BadFile(str(problem)) from None


class Rows:
    """Converts the rows of a table to samples.

    Args:
        path: path of the table, for messages.
        names: names of its columns.
        reading: how rows are read.
        label: label of its folder, for a table without label columns.

    Raises:
        BadFile: its columns have no or repeated names, or are not those of the first table.
    """

    def __init__(
        self, path: Path, names: Sequence[str], reading: ReadOptions, label: float | None = None
    ) -> None:
        names = [name.strip() for name in names]
        places = {name: place for place, name in enumerate(names)}
        inputs = tuple(name for name in names if name not in reading.labels and name != _ID)
        self.columns = reading.columns or inputs
        if len(places) < len(names) or not inputs:
            raise BadFile(f"{path}: its first line must name each column once, and at least one input column")
        if set(inputs) != set(self.columns):
            raise BadFile(
                f"{path}: has the columns {', '.join(inputs)[:100]}; expected {', '.join(self.columns)[:100]}"
            )
        self._reading, self._folder, self._width, self._names = reading, label, len(names), names
        self._inputs = [places[name] for name in self.columns]
        self._labels = [places[name] for name in reading.labels if name in places]
        self._id, self._path = places.get(_ID), path
        self._rounded = RoundedNumbers()

    def sample(self, cells: Sequence[str]) -> Iterator[Sample]:
        """Yield the sample in a row; nothing if it is refused.

        Raises:
            BadFile: two different whole numbers of a column become one float32, such as row numbers.
        """
        try:
            if len(cells) != self._width:
                words = f"a row has {len(cells)} cells; the first line has {self._width}"
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
            said = f"{self._path}: column {name} holds {words[:50]!r}; it must be a finite number"
            raise BadSample("not-finite", said)
        if abs(found) >= EXACT and (other := self._rounded.other(name, words)) is not None:
            raise BadFile(
                f"{self._path}: column {name}: {other} and {words.strip()[:50]} become one number as float32;"
                f" {ROUNDED_REMEDY}"
            )
        return found


class CsvLines:
    """A CSV file that may still grow, read in whole lines from where reading stopped.

    Args:
        path: path of the file.
        reading: how rows are read.
        label: label of its folder, for a table without label columns.
        taken: number of bytes read before. If the file is now shorter, it is read from the start.

    Raises:
        BadFile: see `Rows`; or its first line is too long or not text.
    """

    def __init__(self, path: Path, reading: ReadOptions, label: float | None = None, taken: int = 0) -> None:
        self._path, self._reading = path, reading
        with open_input(path, MAX_TABLE_BYTES, error=BadFile) as file:
            head, num_bytes = file.readline(MAX_LINE_BYTES), file.seek(0, os.SEEK_END)
        if not head.endswith(b"\n"):
            raise BadFile(f"{path}: its first line must name the columns; it is too long or not complete")
        self.rows = Rows(path, self._cells(head.removeprefix(b"\xef\xbb\xbf")), reading, label)
        self.taken = taken if len(head) <= taken <= num_bytes else len(head)

    def samples(self, *, last: bool) -> Iterator[Sample]:
        """Yield the samples of complete lines, and advance `taken`.

        Args:
            last: True if a last line without a line end is complete too.
        """
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
            raise BadFile(f"{self._path}: a line has more than {MAX_CELLS:,} cells")
        try:
            return next(csv.reader(io.StringIO(line.decode("utf-8"), newline="")), [])
        except (UnicodeDecodeError, csv.Error) as problem:
            raise BadFile(f"{self._path}: a line is not valid CSV ({flat(problem)[:100]})") from None


def _made(x: Any, y: Any, name: Any, reading: ReadOptions) -> Iterator[Sample]:
    try:
        yield make_sample(x, y, name)
    except BadSample as problem:
        reading.refuse(problem)
