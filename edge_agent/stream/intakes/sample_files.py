"""Reads the samples in one file: an image, a sound (WAV), rows of a CSV file, or arrays of an .npz file.

The agent itself reads CSV and WAV. The decoder process reads images and .npz files.
"""

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from msgspec import structs

from fleetune.edge_agent.datasets import csv_columns
from fleetune.edge_agent.datasets.audio import SOUND, sound_features
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.datasets.row_reader import FILE, FOLDER, check_columns, input_names, with_places
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.source_options import name_list, repeated
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
from fleetune.edge_agent.stream.decoding.frames import Block, FileKind
from fleetune.edge_agent.stream.intakes.row_samples import LabelTexts, LoadState, RowSamples
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
        options: which columns of tables have which role, and the windows.
        sounds: how sounds become features.
    """

    refuse: Callable[[BadSample], None]
    decoder: DecoderProcess
    labels: tuple[str, ...] = ("label",)
    class_names: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    options: SeriesOptions = SeriesOptions()  # noqa: RUF009 - frozen
    sounds: LogMel = LogMel()  # noqa: RUF009 - frozen

    def label(self, words: str) -> int | float | None:
        """Return the label of a cell or a folder's name; None if it is empty. Raises BadSample."""
        return LabelTexts(self.class_names).label(words)


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
    states: Callable[[], Mapping[str, bytes]] = dict,
) -> Iterator[Outcome]:
    """Store a file's samples in batches, and its progress and states with the last. Raises StoreError."""
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield from store.add(batch)
            batch = []
    at = None if progress is None else progress()
    yield from store.add(batch, progress=at, columns=columns, states=states())


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


class CsvLines:
    """A CSV file that may still grow, read in whole lines from where reading stopped.

    Args:
        path: path of the file.
        reading: how rows are read.
        label: label of its folder, for a table without label columns.
        taken: number of bytes read before. If the file is now shorter, it is read from the start.
        load: returns the stored state of a series of windows; None if there is none.

    Attributes:
        taken: number of bytes read so far.
        columns: names of the input columns.

    Raises:
        BadFile: its columns have no or repeated names, or lack one that is needed; or its first line is too
            long or not text.
    """

    def __init__(
        self,
        path: Path,
        reading: ReadOptions,
        label: float | None = None,
        taken: int = 0,
        load: LoadState = lambda _: None,
    ) -> None:
        self._path, self._reading = path, reading
        with open_input(path, MAX_TABLE_BYTES, error=BadFile) as file:
            head, num_bytes = file.readline(MAX_LINE_BYTES), file.seek(0, os.SEEK_END)
        if not head.endswith(b"\n"):
            raise BadFile(f"{path}: its first line must name the columns; it is too long or not complete")
        names = name_list(reading.options.names)
        first = 0 if names else len(head)
        again = max(1, first) <= taken <= num_bytes
        self.taken = taken if again else first
        names = names or [name.strip() for name in self._cells(head.removeprefix(b"\xef\xbb\xbf"))]
        options = self._options(names)
        self.columns = self._inputs(names, options)
        self._id, self._width = names.index(_ID) if _ID in names else None, len(names)
        self._at_file = {FOLDER, FILE} & {options.group, *name_list(options.label)}
        self._rows = RowSamples(
            str(path),
            [*names, FOLDER, FILE],
            self.columns,
            options,
            refuse=reading.refuse,
            read_label=reading.label,
            load=load if again else lambda _: None,
            label=None if reading.options.label else label,
        )

    def _options(self, names: Sequence[str]) -> SeriesOptions:
        """Return the options with the label columns. Raises BadFile if a column does not exist."""
        options, path = self._reading.options, self._path
        if (twice := repeated(names)) is not None:
            raise BadFile(f"{path}: its first line must name each column once; {twice!r} occurs twice")
        if not options.label:
            labels = [name for name in self._reading.labels if name in names]
            options = structs.replace(options, label=",".join(labels))
        try:
            check_columns(str(path), [*names, FOLDER, FILE], options, {})
        except DataError as problem:
            raise BadFile(str(problem)) from None
        return options

    def _inputs(self, names: Sequence[str], options: SeriesOptions) -> tuple[str, ...]:
        """Return the input columns: those of the first table. Raises BadFile if this one has others."""
        path, first = self._path, self._reading.columns
        try:
            inputs = tuple(input_names(str(path), names, options, {_ID}))
        except DataError as problem:
            raise BadFile(str(problem)) from None
        if first and set(inputs) != set(first):
            both = f"has the columns {', '.join(inputs)[:100]}; expected {', '.join(first)[:100]}"
            raise BadFile(f"{path}: {both}, as in the first file: name columns that all have with columns=")
        return first or inputs

    @property
    def states(self) -> dict[str, bytes]:
        """Return the states of the series of windows, to be stored with the samples."""
        return self._rows.states

    def samples(self, *, last: bool) -> Iterator[Sample]:
        """Yield the samples of complete lines, and advance `taken`.

        Args:
            last: True if a last line without a line end is complete too.
        """
        with open_input(self._path, MAX_TABLE_BYTES, error=BadFile) as file:
            file.seek(self.taken)
            ended = False
            while not ended:
                rows, num_bytes, lost, ended = self._portion(file, last=last)
                ids = [] if self._id is None else [row[self._id].strip() or None for _, row in rows]
                if self._at_file:
                    rows = [(number, with_places(self._path, row)) for number, row in rows]
                if rows:
                    yield from self._rows.samples(rows, ids)
                if lost:
                    self._rows.lose()
                self.taken += num_bytes

    def _portion(self, file: BinaryIO, *, last: bool) -> tuple[csv_columns.Rows, int, bool, bool]:
        """Return the next rows, their bytes, whether a row after them was refused, and whether they are the
        last ones for now.
        """
        rows: csv_columns.Rows = []
        num_bytes = 0
        while len(rows) < BATCH and num_bytes < MAX_LINE_BYTES:
            line = file.readline(MAX_LINE_BYTES)
            if not line or not (line.endswith(b"\n") or last or len(line) == MAX_LINE_BYTES):
                return rows, num_bytes, False, True
            num_bytes += len(line)
            try:
                cells = self._cells(line)
                if cells and len(cells) != self._width:
                    words = f"{self._path}: a row has {len(cells)} cells; the first line has {self._width}"
                    raise BadSample("shape", words)  # noqa: TRY301
            except BadSample as problem:
                kind = "not-numbers" if problem.kind == "file" else problem.kind
                self._reading.refuse(BadSample(kind, str(problem)))
                return rows, num_bytes, True, False
            if cells:
                rows.append((0, cells))
        return rows, num_bytes, False, False

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
