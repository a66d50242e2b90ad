"""A folder whose files become samples: images and sounds by class folder, rows of tables, .npz shards.

`FOLDER/3/a.png` is a sample of class 3; `FOLDER/cat/a.png` one of the class that FOLDER/classes.txt has on
the line `cat`, counted from 0. What lies in FOLDER itself, or in FOLDER/unlabelled, has no label yet: moved
into a class folder it gets one. A file is taken once it has not changed for a while, and once only; CSV files
may grow. Files stay where they are.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from fleetune.edge_agent.datasets.audio import CLASSES, SOUNDS, class_names
from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.stream.decoding.decoder_process import IDLE_S, DecoderProcess, NeedsPackage
from fleetune.edge_agent.stream.intakes.sample_files import (
    IMAGES,
    KNOWN,
    BadFile,
    CsvLines,
    ReadOptions,
    read_features,
    read_image,
    read_parquet,
    read_shard,
)
from fleetune.edge_agent.stream.sample import MAX_NAME, BadSample, Sample, make_sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.store_values import FileProgress, TableColumns
from fleetune.protocols.errors import DataError, ReadingStopped, StoreError
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.one_line import unexpected

EVERY_S = 2.0
SETTLED_S = 1.0
LINE_S = 10.0  # a last line without its end is waited for so long
BATCH = 64
_UNLABELLED = "unlabelled"
_UNFINISHED = (".tmp", ".part", ".new", ".swp", "~")
_SHARE = 0.05  # of the time that looking may take

log = logging.getLogger(__name__)


class WatchedFolder:
    """Looks again and again; what it finds is kept in the store.

    Args:
        store: of the device.
        folder: that is watched.
        labels: names of a table's columns that are the label.
        sounds: how sounds become features.
        memory_bytes: that the agent and the process that decodes files may take; None: not known.
        clock: seconds that never jump.
    """

    def __init__(
        self,
        store: SampleStore,
        folder: Path,
        labels: tuple[str, ...] = ("label",),
        *,
        sounds: LogMel = LogMel(),  # noqa: B008 - frozen
        memory_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._folder, self._clock = store, folder, clock
        self._decoder = DecoderProcess(memory_bytes, sounds)
        self._reading = ReadOptions(store.refuse, self._decoder, labels, sounds=sounds)
        self._classes: tuple[object, list[str]] = (None, [])
        self._unsettled: dict[str, tuple[int, int, float]] = {}
        self._told: set[str] = set()
        self._new = 0

    def run(self, stopped: threading.Event) -> None:
        """Until told to stop; longer pauses where looking takes long."""
        try:
            while not stopped.is_set():
                began = self._clock()
                try:
                    self.look(stopped)
                except ReadingStopped:
                    return
                except StoreError as problem:
                    self._store.refusals.add("disk", str(problem))
                pause_s = max(EVERY_S, (self._clock() - began) / _SHARE)
                if pause_s > IDLE_S:
                    self.close()
                stopped.wait(pause_s)
                self._decoder.rest()
        finally:
            self.close()

    def close(self) -> None:
        """End the process that decodes files; the next one starts another."""
        self._decoder.close()

    def look(self, stopped: threading.Event | None = None) -> None:
        """Take what is new and whole.

        Raises:
            StoreError: the store cannot be written; the file at hand is taken another time.
            ReadingStopped: `stopped` was set while a file was read; likewise.
        """
        columns = self._store.table_columns()
        names = {name: number for number, name in enumerate(self._class_names())}
        self._reading = replace(
            self._reading, class_names=names, columns=() if columns is None else columns.columns
        )
        found: set[str] = set()
        for path in self._files():
            if stopped is not None and stopped.is_set():
                return
            found.add(str(path))
            with (
                input_limits(is_stopped=None if stopped is None else stopped.is_set),
                suppress(OSError),  # it is gone, or cannot be read: another time
            ):
                self._consider(path)
        if self._new:
            log.info("watch:%s: %d new samples", self._folder, self._new)
            self._new = 0
        self._unsettled = {path: seen for path, seen in self._unsettled.items() if path in found}
        self._store.drop_missing_files(found, str(self._folder))

    def _files(self) -> Iterator[Path]:
        for where, folders, files in os.walk(self._folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith(".") and not name.endswith(_UNFINISHED):
                    path = Path(where) / name
                    if path.suffix.lower() in KNOWN:
                        yield path

    def _class_names(self) -> list[str]:
        """Read again when the file changes; what is wrong with it is counted once."""
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

    def _consider(self, path: Path) -> None:
        state, now = path.stat(), self._clock()
        known, key = self._store.file_progress(str(path)), str(path)
        if known is not None and (known.num_bytes, known.changed_ns) == (state.st_size, state.st_mtime_ns):
            self._unsettled.pop(key, None)
            return
        seen = self._unsettled.get(key)
        if seen is None or seen[:2] != (state.st_size, state.st_mtime_ns):
            self._unsettled[key] = state.st_size, state.st_mtime_ns, now
            return
        if now - seen[2] >= SETTLED_S:
            taken = FileProgress(key, state.st_size, state.st_mtime_ns)
            self._take(path, taken, known, last=now - seen[2] >= LINE_S)

    def _take(self, path: Path, taken: FileProgress, known: FileProgress | None, *, last: bool) -> None:
        try:
            if path.suffix.lower() == ".csv":
                self._take_lines(path, taken, known, last=last)
            else:
                self._keep(self._samples(path), lambda: taken)
        except NeedsPackage as problem:
            if str(problem) not in self._told:
                self._told.add(str(problem))
                log.error("%s: %s", path, problem)  # noqa: TRY400 - one line
        except BadSample as problem:
            self._leave_out(taken, problem)
        except (StoreError, ReadingStopped):
            raise
        except Exception as fault:  # whatever a file brings about, the others are read
            log.debug("", exc_info=fault)
            self._leave_out(taken, BadFile(f"{path}: {unexpected(fault)}"))

    def _leave_out(self, taken: FileProgress, problem: BadSample) -> None:
        self._store.refuse(problem)
        self._store.add([], structs.replace(taken, problem=str(problem)))

    def _samples(self, path: Path) -> Iterator[Sample]:
        label, suffix = self._label(path), path.suffix.lower()
        if suffix in IMAGES | SOUNDS:
            x = (read_image if suffix in IMAGES else read_features)(path, self._reading)
            yield make_sample(x, label, _as_name(path.relative_to(self._folder).as_posix()))
        elif suffix == ".npz":
            yield from read_shard(path, self._reading, label)
        else:
            yield from read_parquet(path, self._reading, label)

    def _take_lines(self, path: Path, taken: FileProgress, known: FileProgress | None, *, last: bool) -> None:
        lines = CsvLines(path, self._reading, self._label(path), 0 if known is None else known.taken)
        if not self._reading.columns:
            self._reading = replace(self._reading, columns=lines.rows.columns)

        def so_far() -> FileProgress:
            return structs.replace(taken, num_bytes=lines.taken, taken=lines.taken)

        self._keep(lines.samples(last=last), so_far)

    def _keep(self, samples: Iterable[Sample], taken: Callable[[], FileProgress]) -> None:
        batch: list[Sample] = []
        for sample in samples:
            batch.append(sample)
            if len(batch) == BATCH:
                self._new += self._store.add(batch).count("stored")
                batch = []
        self._new += self._store.add(batch, taken(), TableColumns(self._reading.columns)).count("stored")

    def _label(self, path: Path) -> int | float | None:
        parts = path.relative_to(self._folder).parts[:-1]
        if not parts or parts[0] == _UNLABELLED:
            return None
        try:
            return self._reading.label(parts[0])
        except BadSample as problem:
            raise BadFile(f"{path}: {problem}") from None


def _as_name(words: str) -> str | None:
    return words if len(words) <= MAX_NAME and words.isprintable() else None
