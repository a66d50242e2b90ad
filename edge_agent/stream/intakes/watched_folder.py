"""Intake of a watched folder, whose files become samples: images, WAV files, tables, .npz files.

`FOLDER/3/a.png` is a sample of class 3. `FOLDER/cat/a.png` has the class of the line `cat` in
FOLDER/classes.txt, counted from 0. Files in FOLDER itself, or in FOLDER/unlabelled, have no label yet. A file
that is moved into a class folder gets its label. A file is read once, when it has not changed for a while.
CSV files may grow. Files stay in the folder. FLAC, OGG and MP3 files are skipped with one warning.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from fleetune.edge_agent.datasets.audio import CLASSES, OTHER_SOUNDS, class_names, convert_command
from fleetune.edge_agent.datasets.csv_files import base_folder, files_of
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.source_options import name_list
from fleetune.edge_agent.stream.decoding.decoder_process import IDLE_S, DecoderProcess
from fleetune.edge_agent.stream.intakes.sample_files import (
    KNOWN,
    BadFile,
    CsvLines,
    NeedsPackage,
    ReadOptions,
    read_samples,
    store_file,
)
from fleetune.edge_agent.stream.sample import MAX_NAME, BadSample, Sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.store_values import FileProgress, TableColumns
from fleetune.protocols.errors import DataError, ReadingStopped, StoreError
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.one_line import unexpected

POLL_S = 2.0
SETTLED_S = 1.0
LAST_LINE_S = 10.0  # after this time without a change, a last line without a line end is complete
_UNLABELLED = "unlabelled"
_MAX_SHARE = 0.05  # largest share of the time that scanning may take

log = logging.getLogger(__name__)


class WatchedFolder:
    """Scans a folder repeatedly, and stores the samples of new files.

    Args:
        store: the device's store.
        place: the watched folder, or a pattern of files.
        labels: names of the label columns of tables.
        options: which columns of tables have which role, and the windows.
        sounds: how sounds become features.
        memory_bytes: memory of the agent together with its decoder process; None: not earlier.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        store: SampleStore,
        place: Path,
        labels: tuple[str, ...] = ("label",),
        *,
        options: SeriesOptions = SeriesOptions(),  # noqa: B008 - frozen
        sounds: LogMel = LogMel(),  # noqa: B008 - frozen
        memory_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._place, self._clock = store, place, clock
        self._folder = base_folder(place)
        self._decoder = DecoderProcess(memory_bytes)
        self._reading = ReadOptions(store.refuse, self._decoder, labels, options=options, sounds=sounds)
        self._classes: tuple[object, list[str]] = (None, [])
        self._changing: dict[str, tuple[int, int, float]] = {}
        self._reported: set[str] = set()
        self._warned = False
        self._new = 0

    def run(self, stopped: threading.Event) -> None:
        """Scan until `stopped` is set; pauses are longer when a scan takes long."""
        try:
            while not stopped.is_set():
                began = self._clock()
                try:
                    self.scan(stopped.is_set)
                except ReadingStopped:
                    return
                except StoreError as problem:
                    self._store.refusals.add("disk", str(problem))
                pause_s = max(POLL_S, (self._clock() - began) / _MAX_SHARE)
                if pause_s > IDLE_S:
                    self.close()
                stopped.wait(pause_s)
                self._decoder.rest()
        finally:
            self.close()

    def read_now(self, is_enough: Callable[[], bool]) -> None:
        """Store the samples of the files that are there, as if they had not changed for a while.

        Args:
            is_enough: called often; when it returns True, reading ends.
        """
        clock = self._clock
        try:
            self.scan()
            self._clock = lambda: clock() + LAST_LINE_S
            with suppress(ReadingStopped):
                self.scan(is_enough)
        finally:
            self._clock = clock
            self.close()

    def close(self) -> None:
        """End the decoder process. The next file starts another."""
        self._decoder.close()

    def scan(self, is_stopped: Callable[[], bool] | None = None) -> None:
        """Store the samples of files that are new and complete.

        Args:
            is_stopped: called often; when it returns True, the scan ends.

        Raises:
            StoreError: the store cannot be written; the next scan reads the file again.
            ReadingStopped: it was stopped while a file was read; the next scan reads it again.
        """
        options, columns = self._reading.options, self._store.table_columns()
        classes = name_list(options.classes) or self._class_names()
        names = {name: number for number, name in enumerate(classes)}
        known = () if columns is None or options.columns else columns.columns
        self._reading = replace(self._reading, class_names=names, columns=known)
        found: set[str] = set()
        for path in self._files():
            if is_stopped is not None and is_stopped():
                return
            found.add(str(path))
            with (
                input_limits(is_stopped=is_stopped),
                suppress(OSError),  # the file is gone or cannot be read now: the next scan tries again
            ):
                self._check_file(path)
        if self._new:
            log.info("watch:%s: %d new samples", self._folder, self._new)
            self._new = 0
        self._changing = {path: seen for path, seen in self._changing.items() if path in found}
        self._store.drop_missing_files(found, str(self._folder))

    def _files(self) -> Iterator[Path]:
        for path in files_of(self._place):
            if path.suffix.lower() in OTHER_SOUNDS:
                self._warn_of_sound(path)
            if path.suffix.lower() in KNOWN:
                yield path

    def _warn_of_sound(self, path: Path) -> None:
        """Log the first sound that is no WAV file."""
        if not self._warned:
            self._warned = True
            log.warning(
                "watch:%s: %s and other FLAC, OGG and MP3 files are skipped; convert each with %s",
                self._folder,
                path,
                convert_command(self._reading.sounds.rate),
            )

    def _class_names(self) -> list[str]:
        """Return the classes' names, read again when their file changes; count a problem with it once."""
        try:
            state = (self._folder / CLASSES).stat()
        except OSError:
            return []
        mark = state.st_ino, state.st_size, state.st_mtime_ns
        if self._classes[0] != mark:
            self._classes = mark, []
            try:
                self._classes = mark, class_names(self._folder)
            except DataError as problem:
                self._store.refuse(BadFile(str(problem)))
        return self._classes[1]

    def _check_file(self, path: Path) -> None:
        state, now = path.stat(), self._clock()
        earlier, key = self._store.file_progress(str(path)), str(path)
        if earlier is not None and (earlier.num_bytes, earlier.changed_ns) == (
            state.st_size,
            state.st_mtime_ns,
        ):
            self._changing.pop(key, None)
            return
        seen = self._changing.get(key)
        if seen is None or seen[:2] != (state.st_size, state.st_mtime_ns):
            self._changing[key] = state.st_size, state.st_mtime_ns, now
            return
        if now - seen[2] >= SETTLED_S:
            taken = FileProgress(key, state.st_size, state.st_mtime_ns)
            self._read(path, taken, earlier, last=now - seen[2] >= LAST_LINE_S)

    def _read(self, path: Path, taken: FileProgress, earlier: FileProgress | None, *, last: bool) -> None:
        try:
            if path.suffix.lower() == ".csv":
                self._read_csv(path, taken, earlier, last=last)
            else:
                name = _as_name(path.relative_to(self._folder).as_posix())
                self._store_samples(read_samples(path, self._reading, self._label(path), name), lambda: taken)
        except NeedsPackage as problem:
            if str(problem) not in self._reported:
                self._reported.add(str(problem))
                log.error("%s: %s", path, problem)  # noqa: TRY400 - one line
        except BadSample as problem:
            self._skip(taken, problem)
        except (StoreError, ReadingStopped):
            raise
        except Exception as fault:  # one bad file must not stop the others
            log.debug("", exc_info=fault)
            self._skip(taken, BadFile(f"{path}: {unexpected(fault)}"))

    def _skip(self, taken: FileProgress, problem: BadSample) -> None:
        self._store.refuse(problem)
        self._store.add([], progress=structs.replace(taken, problem=str(problem)))

    def _read_csv(self, path: Path, taken: FileProgress, earlier: FileProgress | None, *, last: bool) -> None:
        before, load = 0 if earlier is None else earlier.taken, self._store.series_state
        lines = CsvLines(path, self._reading, self._label(path), before, load)
        if not self._reading.columns:
            self._reading = replace(self._reading, columns=lines.columns)

        def progress() -> FileProgress:
            return structs.replace(taken, num_bytes=lines.taken, taken=lines.taken)

        self._store_samples(lines.samples(last=last), progress, lambda: lines.states)

    def _store_samples(
        self,
        samples: Iterable[Sample],
        taken: Callable[[], FileProgress],
        states: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        for outcome in store_file(self._store, samples, taken, TableColumns(self._reading.columns), states):
            self._new += outcome == "stored"

    def _label(self, path: Path) -> int | float | None:
        """Return the label that the folder of a file gives; None if it gives none. Raises BadFile."""
        parts, reading = path.relative_to(self._folder).parts[:-1], self._reading
        if not parts or parts[0] == _UNLABELLED:
            return None
        try:
            return reading.label(parts[0])
        except BadSample as problem:
            if path.suffix.lower() == ".csv" and (reading.options.label or not reading.class_names):
                return None  # a folder of a day or a machine
            raise BadFile(f"{path}: {problem}") from None


def _as_name(words: str) -> str | None:
    return words if len(words) <= MAX_NAME and words.isprintable() else None
