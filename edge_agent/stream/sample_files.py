"""Samples out of one file: an image, a sound, rows of a table (CSV, Parquet), the arrays of an .npz shard.

Pillow, pyarrow and soundfile are imported where such a file is read, and nowhere else.
"""

import csv
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.edge_agent.datasets.audio import SOUNDS, NeedsSoundfile, sound_features
from fleetune.edge_agent.datasets.csv_columns import EXACT, as_whole, is_whole
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.stream.sample import MAX_SAMPLE_BYTES, BadSample, Sample, make_sample
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import flat

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
TABLES = frozenset({".csv", ".parquet"})
KNOWN = IMAGES | SOUNDS | TABLES | {".npz"}
MAX_SHARD_BYTES = 2**30
MAX_LINE_BYTES = 2**22
_MAX_ROUNDED = 10_000  # whole numbers above 2**24 that are compared with the next ones
_MARKS = {"test", "validation", "x_train", "x_test", "x_validation"}
_ID = "id"


class BadFile(BadSample):
    """Nothing of a file can be taken; it is not tried again until it changes."""

    def __init__(self, words: str) -> None:
        super().__init__("file", words)


class NeedsPackage(Exception):  # noqa: N818 - it reports what is missing
    """What reads such files is not installed here: `str()` is the line that says how to."""


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        labels: names of the columns that are the label.
        class_names: of the labels 0, 1, ...
        columns: names of a table's other columns, in the order in which they are a sample; (): as they stand
            in the first table.
        refuse: told of each sample that cannot be kept.
        sounds: how sounds become features.
    """

    refuse: Callable[[BadSample], None]
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


def read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image as uint8: (height, width) where it is grey, else (height, width, 3).

    Raises:
        BadFile: it is damaged, or too large; NeedsPackage: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise NeedsPackage("images need Pillow: pip install pillow") from None
    try:
        with Image.open(path) as image:
            if image.width * image.height * 3 > MAX_SAMPLE_BYTES // 4:
                words = f"{path}: an image of {image.width} x {image.height}; scale it down"
                raise BadFile(words)  # noqa: TRY301
            grey = image.mode in ("1", "L", "LA", "I;16")
            return np.asarray(image.convert("L" if grey else "RGB"), np.uint8)
    except BadFile:
        raise
    except Exception as problem:  # noqa: BLE001 - what decodes images raises nearly anything
        raise BadFile(f"{path}: no readable image ({flat(problem)[:200]})") from None


def read_features(path: Path, settings: LogMel) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A sound's log-mel features, of the shape `settings.shape`.

    Raises:
        BadFile: it is damaged, or has another rate; NeedsPackage: soundfile is not installed.
    """
    try:
        return sound_features(path, settings)
    except NeedsSoundfile as problem:
        raise NeedsPackage("such sounds need soundfile: pip install soundfile") from problem
    except DataError as problem:
        raise BadFile(str(problem)) from None


def read_shard(path: Path, reading: Reading, label: float | None = None) -> Iterator[Sample]:
    """The samples of an .npz file with `x`, and perhaps `y` and `id`; `label` is that of its folder.

    Raises:
        BadFile: it is damaged, has no such arrays, or marks samples for testing.
    """
    arrays = _arrays(path)
    if "x" not in arrays or _MARKS & set(arrays):
        words = "marks which samples are for what, which in a stream each one's own content does: write x, y"
        raise BadFile(f"{path}: {words if _MARKS & set(arrays) else 'there is no array x in it'}")
    x = arrays["x"]
    y, names = arrays.get("y"), arrays.get(_ID)
    for column in (y, names):
        if x.ndim < 1 or (column is not None and column.shape[:1] != x.shape[:1]):
            raise BadFile(f"{path}: x, y and id do not have as many rows")
    for index, one in enumerate(x):
        name = None if names is None else names[index].item()
        yield from _made(one, label if y is None else y[index], name, reading)


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with zipfile.ZipFile(path) as content:
            if sum(entry.file_size for entry in content.infolist()) > MAX_SHARD_BYTES:
                words = f"{path}: more than {MAX_SHARD_BYTES >> 20} MiB unpacked; write smaller shards"
                raise BadFile(words)  # noqa: TRY301
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files if name in {"x", "y", _ID} | _MARKS}
    except BadFile:
        raise
    except Exception as problem:  # noqa: BLE001 - damaged archives raise nearly anything
        raise BadFile(f"{path}: no readable .npz file of plain arrays ({flat(problem)[:200]})") from None


def read_parquet(path: Path, reading: Reading, label: float | None = None) -> Iterator[Sample]:
    """The rows of a Parquet file.

    Raises:
        BadFile: it is damaged, or its columns are others; NeedsPackage: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise NeedsPackage("Parquet files need pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as content:
            row_of = Rows(path, content.schema_arrow.names, reading, label)
            for batch in content.iter_batches(256):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield from row_of.sample(["" if cell is None else str(cell) for cell in row])
    except BadSample:
        raise
    except Exception as problem:  # noqa: BLE001 - damaged files raise nearly anything
        raise BadFile(f"{path}: no readable Parquet file ({flat(problem)[:200]})") from None


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
        self, path: Path, names: Sequence[str], reading: Reading, label: float | None = None
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

    def __init__(self, path: Path, reading: Reading, label: float | None = None, taken: int = 0) -> None:
        self._path, self._reading = path, reading
        with path.open("rb") as file:
            head = file.readline(MAX_LINE_BYTES)
        if not head.endswith(b"\n"):
            raise BadFile(f"{path}: its first line, which names the columns, is too long or not whole")
        self.rows = Rows(path, self._cells(head.removeprefix(b"\xef\xbb\xbf")), reading, label)
        self.taken = taken if len(head) <= taken <= path.stat().st_size else len(head)

    def samples(self, *, last: bool) -> Iterator[Sample]:
        """Those of whole lines, `taken` following; `last`: a last line without its end is whole too."""
        with self._path.open("rb") as file:
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
        try:
            return next(csv.reader(io.StringIO(line.decode("utf-8"), newline="")), [])
        except (UnicodeDecodeError, csv.Error) as problem:
            raise BadFile(f"{self._path}: a line that is no CSV ({flat(problem)[:100]})") from None


def _made(x: Any, y: Any, name: Any, reading: Reading) -> Iterator[Sample]:
    try:
        yield make_sample(x, y, name)
    except BadSample as problem:
        reading.refuse(problem)
