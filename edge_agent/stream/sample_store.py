"""The store of a device's samples: one SQLite file in which each change is one durable transaction.

Several processes may open the file at once: the agent, a sensor's program, `edge-agent add`. After a power
cut, the file has every change whose call had returned, and no part of any other change. All functions may be
called from any thread.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import deletion, drift_windows, series_states, store_values
from fleetune.edge_agent.stream.deletion import SampleFilter
from fleetune.edge_agent.stream.refusal_counts import RefusalCounts
from fleetune.edge_agent.stream.retention import DAY_S, RetentionLimits, delete_held, evict, stored_bytes
from fleetune.edge_agent.stream.sample import UNLABELLED, BadSample, Label, Sample
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.store_schema import connect, open_store, store_error
from fleetune.edge_agent.stream.store_values import (
    DriftState,
    FileProgress,
    PinnedSnapshot,
    StoreClock,
    TableColumns,
    TrainingRound,
)
from fleetune.protocols.errors import StoreError

Outcome = Literal["stored", "known", "labelled", "refused"]
"""The outcome of adding a sample. "stored": the sample is new (the limits decide how long it stays). "known":
it was
stored before. "labelled": it was stored before, and its label is new. "refused": it is not valid.
"""

_MAX_UNCHECKED_BYTES = 100_000
_NO_STATES: Mapping[str, bytes] = {}
_NONE = np.zeros(0, np.float32)


@dataclass
class _Transaction:
    """An open transaction.

    Attributes:
        number: number of its change.
        now_s: time by the store's own clock, in seconds.
        wall: time by the device's clock, in seconds since 1970.
        unchecked_bytes: bytes added since the limits were last applied.
    """

    number: int
    now_s: float
    wall: float
    unchecked_bytes: int = 0


class SampleStore:
    """The samples of a device.

    Args:
        connection: connection to the file.
        path: path of the file.
        wall: the device's clock, in seconds since 1970.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._connection, self.path, self._wall = connection, path, wall
        self._lock = threading.RLock()
        self.refusals = RefusalCounts()
        self._requirements: SampleRequirements | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        bounds: RetentionLimits | None = None,
        *,
        wall: Callable[[], float] = time.time,
        durable: bool = True,
    ) -> Self:
        """Open a store, or create it.

        Args:
            path: path of the file.
            bounds: the owner's limits from now on; None for the limits that were set last.
            wall: the device's clock, in seconds since 1970.
            durable: True if changes must survive a power cut. Simulations turn it off.

        Raises:
            StoreVersion: the file has a format that this version does not read.
            StoreError: the file cannot be opened or is damaged.
        """
        store = cls(open_store(path, durable=durable), path, wall=wall)
        try:
            store._begin(bounds)
        except BaseException:
            store.close()
            raise
        return store

    def _begin(self, bounds: RetentionLimits | None) -> None:
        with self._lock:
            known = store_values.get(self._connection, RetentionLimits)
        with self._transaction():
            if bounds is not None and bounds != known:
                store_values.put(self._connection, bounds)

    def close(self) -> None:
        """Save the counts and close the file."""
        # on a full disk only counts are lost
        with self._lock, closing(self._connection), suppress(StoreError):
            self.save_counts()

    def require(self, requirements: SampleRequirements) -> None:
        """From now on, refuse samples that the model cannot use. Stored samples stay."""
        self._requirements = requirements

    def add(
        self,
        samples: Iterable[Sample],
        labels: Iterable[tuple[str, Label]] = (),
        *,
        progress: FileProgress | None = None,
        columns: TableColumns | None = None,
        states: Mapping[str, bytes] = _NO_STATES,
    ) -> list[Outcome]:
        """Store samples, and label samples by their names, in one transaction.

        A copy of a stored input is not stored twice, but its label and its name replace the old ones. A label
        for an unknown name is refused and counted.

        Args:
            samples: the samples.
            labels: name and label of earlier samples, or of these.
            progress: how far the samples' file has been read.
            columns: columns of the table that the samples come from.
            states: states of the series that the samples were cut from, by name.

        Returns:
            The outcome of each sample, then of each label.

        Raises:
            StoreError: the store cannot be written; nothing was stored.
        """
        with self._lock, self._transaction() as step:
            outcomes = [self._add(sample, step) for sample in samples]
            outcomes += [self._label(name, label, step) for name, label in labels]
            drift_windows.test_full_windows(self._connection)
            if progress is not None:
                self._put_progress(progress)
            if columns is not None:
                store_values.put(self._connection, columns)
            if states:
                series_states.put(self._connection, states, step.number)
        return outcomes

    def series_state(self, name: str) -> bytes | None:
        """Return the stored state of a series; None if there is none. Raises StoreError."""
        with self._read_errors():
            return series_states.get(self._connection, name)

    def label(self, labels: Iterable[tuple[str, Label]]) -> list[Outcome]:
        """Label samples by their names, see `add`."""
        return self.add((), labels)

    def matching_names(self, selection: SampleFilter) -> list[str | None]:
        """Return the names of the samples that `delete` would remove; None for a sample without a name."""
        with self._read_errors():
            return deletion.matching_names(self._connection, selection)

    def delete(self, selection: SampleFilter) -> int:
        """Delete samples for good: from the file, its log and the snapshot of a round under way.

        After this returns, no power cut brings any of them back.

        Returns:
            Number of deleted samples.

        Raises:
            StoreError: the store cannot be written, and nothing was deleted. Or another process reads the
                log, which still has their bytes.
        """
        with self._lock:
            self._connection.execute("PRAGMA secure_delete = ON")
            try:
                with self._transaction():
                    count = deletion.delete(self._connection, selection)
                    pin = store_values.get(self._connection, PinnedSnapshot)
                    if count and pin is not None:
                        store_values.put(self._connection, msgspec.structs.replace(pin, complete=False))
                busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                self._connection.execute("PRAGMA secure_delete = FAST")
        if busy:
            raise StoreError(
                f"{self.path}: {count} samples are removed, but another process still reads the log that has"
                " their bytes; repeat the command in a minute"
            )
        return count

    def refuse(self, problem: BadSample, count: int = 1) -> None:
        """Count a refused sample, file or message."""
        self.refusals.add(problem.kind, str(problem), count)

    def save_counts(self) -> None:
        """Save the counts, and evict samples that are too old. Raises StoreError."""
        with self._lock, self._transaction():
            pass

    def pin(self, training_round: TrainingRound) -> PinnedSnapshot:
        """Pin the snapshot of a round. The same round gets the same snapshot again, also after a crash.

        Pinning the snapshot of another round releases it.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._read_errors():
            known = store_values.get(self._connection, PinnedSnapshot)
            if known is not None and known.training_round == training_round:
                return known
            with self._transaction() as step:
                delete_held(self._connection)
                pin = PinnedSnapshot(training_round, step.number)
                store_values.put(self._connection, pin)
                drift_windows.save_next_reference(self._connection)
            return pin

    def mark_trained(self, training_round: TrainingRound, losses: NDArray[np.floating] = _NONE) -> None:
        """Mark the samples of a round's snapshot as trained on, and set the references of the drift tests.

        Args:
            training_round: the round.
            losses: losses of the deployed model on held-out samples, shape (n,), for `drift.loss_drift`. If
                they are an alarm, the earlier losses stay the reference for `drift.PATIENCE` trainings: the
                training did not bring the model back to its earlier quality.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._lock, self._transaction():
            pin = store_values.get(self._connection, PinnedSnapshot)
            if pin is not None and pin.training_round == training_round:
                store_values.put_number(self._connection, "trained", pin.change)
                drift_windows.use_next_reference(self._connection, pin.change)
                drift_windows.save_reference_losses(self._connection, losses.astype("<f4"))

    @property
    def drift(self) -> DriftState:
        """Return the results of the last drift tests. Raises StoreError."""
        with self._read_errors():
            return store_values.get(self._connection, DriftState) or DriftState()

    @property
    def reference_losses(self) -> NDArray[np.float32]:
        """Return the reference losses of the loss drift test, shape (n,). Raises StoreError."""
        with self._read_errors():
            return drift_windows.reference_losses(self._connection)

    def save_loss_drift(self, figure: float | None, tested: int) -> None:
        """Save the result of a loss drift test.

        Args:
            figure: result of the test; None if it gave none.
            tested: number of the change up to which samples were tested.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._lock, self._transaction():
            drift = msgspec.structs.replace(self.drift, loss=figure, loss_tested=tested)
            store_values.put(self._connection, drift)

    @property
    def change(self) -> int:
        """Return the number of the last change by any process. Raises StoreError."""
        with self._read_errors():
            return store_values.get_number(self._connection, "change")

    def file_progress(self, path: str) -> FileProgress | None:
        """Return how far a file has been read; None if it was never read. Raises StoreError."""
        with self._read_errors():
            query = "SELECT path, num_bytes, changed_ns, taken, problem FROM file WHERE path = ?"
            row = self._connection.execute(query, (path,)).fetchone()
        return None if row is None else FileProgress(*row)

    def drop_missing_files(self, existing: set[str], folder: str) -> None:
        """Delete the progress of files in a folder that no longer exist.

        Args:
            existing: paths of the files that exist.
            folder: path of the folder.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._read_errors():
            rows = self._connection.execute("SELECT path FROM file").fetchall()
            gone = [(path,) for (path,) in rows if path.startswith(folder) and path not in existing]
            if gone:
                with self._transaction():
                    self._connection.executemany("DELETE FROM file WHERE path = ?", gone)

    def table_columns(self) -> TableColumns | None:
        """Return the columns of the first table that was read; None without one. Raises StoreError."""
        with self._read_errors():
            return store_values.get(self._connection, TableColumns)

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        """Hold the lock, and raise SQLite's errors as StoreError."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as problem:
                raise store_error("read", self.path, problem) from None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a second connection that reads in one transaction, so that other processes can write
        meanwhile.

        Raises:
            StoreError: the store cannot be read.
        """
        try:
            with closing(connect(self.path, mode="ro")) as connection:
                connection.execute("BEGIN")
                yield connection
        except sqlite3.Error as problem:
            raise store_error("read", self.path, problem) from None

    @contextmanager
    def _transaction(self) -> Iterator[_Transaction]:
        """Write everything inside the block, the unsaved counts and the evictions in one transaction, or
        nothing.
        """
        counts = self.refusals.take_unsaved()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                step = self._begin_change()
                yield step
                self._apply_limits(step)
                self._save_counts(counts)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite rolls back by itself when the disk is full
                    self._connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as problem:
            self.refusals.restore(counts)
            raise store_error("write", self.path, problem) from None
        except BaseException:
            self.refusals.restore(counts)
            raise

    def _begin_change(self) -> _Transaction:
        clock, wall = store_values.get(self._connection, StoreClock), self._wall()
        clock = clock or StoreClock(0.0, wall)
        passed = wall - clock.wall
        if not 0 <= passed <= DAY_S:
            jump = f"the device's clock went {passed:+.0f} s since the last change"
            self.refusals.add("clock", f"{jump}; samples age by at most one day")
        now_s = clock.seconds + min(max(0.0, passed), DAY_S)
        store_values.put(self._connection, StoreClock(now_s, wall))
        number = 1 + store_values.get_number(self._connection, "change")
        store_values.put_number(self._connection, "change", number)
        return _Transaction(number, now_s, wall)

    def _apply_limits(self, step: _Transaction) -> None:
        bounds = store_values.get(self._connection, RetentionLimits) or RetentionLimits()
        pin = store_values.get(self._connection, PinnedSnapshot)
        pinned = pin.change if pin is not None and pin.complete else None
        left = evict(self._connection, bounds, step.now_s, step.number, pinned)
        if pin is not None and left != pinned:
            store_values.put(self._connection, msgspec.structs.replace(pin, complete=False))
        step.unchecked_bytes = 0

    def _save_counts(self, counts: dict[str, tuple[int, str]]) -> None:
        for kind, (count, words) in counts.items():
            self._connection.execute(
                "INSERT INTO refusal VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                " SET count = count + excluded.count, last = excluded.last",
                (kind, count, words),
            )

    def _add(self, sample: Sample, step: _Transaction) -> Outcome:
        problem = None if self._requirements is None else self._requirements.rejection(sample)
        if problem is not None:
            self.refuse(problem)
            return "refused"
        form = self._form(sample)
        query = "SELECT number, name FROM sample WHERE digest = ? AND form = ?"
        known = self._connection.execute(query, (sample.digest, form)).fetchone()
        if known is not None:
            return self._take_copy(known[0], known[1], sample, step)
        return self._insert(sample, form, step)

    def _form(self, sample: Sample) -> int:
        key = sample.x.dtype.str, " ".join(map(str, sample.x.shape))
        query = "SELECT number FROM form WHERE dtype = ? AND shape = ?"
        row = self._connection.execute(query, key).fetchone()
        if row is None:
            row = (self._connection.execute("INSERT INTO form (dtype, shape) VALUES (?, ?)", key).lastrowid,)
        return int(row[0])

    def _insert(self, sample: Sample, form: int, step: _Transaction) -> Outcome:
        label, x = sample.label, sample.data
        y = None if label is None else label.data
        num_bytes = stored_bytes(len(x) + len(y or b""))
        if sample.name is not None:  # the newest sample keeps a name that two have
            self._connection.execute("UPDATE sample SET name = NULL WHERE name = ?", (sample.name,))
        row = (
            sample.digest, form, sample.name, UNLABELLED if label is None else label.class_number, y,
            sample.for_test, sample.for_validation, sample.rank, num_bytes, step.number, step.number,
            step.now_s, step.wall, None if label is None else step.wall,
        )  # fmt: skip
        columns = (
            "digest, form, name, class, y, for_test, for_validation, rank, num_bytes, added, changed,"
            " arrived_s, arrived_at, labelled_at"
        )
        query = f"INSERT INTO sample ({columns}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608
        number = self._connection.execute(query, row).lastrowid
        self._connection.execute("INSERT INTO input VALUES (?, ?)", (number, x))
        drift_windows.add_input(self._connection, form, sample.x)
        step.unchecked_bytes += num_bytes
        # an SQLite file never shrinks, so a large batch must not grow it past the limit
        if step.unchecked_bytes > _MAX_UNCHECKED_BYTES:
            self._apply_limits(step)
        return "stored"

    def _take_copy(self, number: int, name: str | None, sample: Sample, step: _Transaction) -> Outcome:
        if sample.name is not None and sample.name != name:
            self._connection.execute("UPDATE sample SET name = NULL WHERE name = ?", (sample.name,))
            self._connection.execute("UPDATE sample SET name = ? WHERE number = ?", (sample.name, number))
        return "known" if sample.label is None else self._relabel(number, sample.label, step)

    def _label(self, name: str, label: Label, step: _Transaction) -> Outcome:
        problem = None if self._requirements is None else self._requirements.label_rejection(label)
        query = "SELECT number FROM sample WHERE name = ? AND dropped IS NULL"
        row = self._connection.execute(query, (name,)).fetchone()
        if row is None:
            problem = BadSample("unknown", f"a label for {name!r}; no sample of this id is stored")
        if problem is not None:
            self.refuse(problem)
            return "refused"
        return self._relabel(row[0], label, step)

    def _relabel(self, number: int, label: Label, step: _Transaction) -> Outcome:
        query = "SELECT class, y, changed, dropped FROM sample WHERE number = ?"
        of, y, changed, dropped = self._connection.execute(query, (number,)).fetchone()
        if (of, y) == (label.class_number, label.data) or dropped is not None:
            return "known"
        pin = store_values.get(self._connection, PinnedSnapshot)
        if pin is not None and changed <= pin.change:
            self._connection.execute("INSERT OR IGNORE INTO label_before VALUES (?, ?, ?)", (number, of, y))
        self._connection.execute(
            "UPDATE sample SET class = ?, y = ?, changed = ?, labelled_at = ? WHERE number = ?",
            (label.class_number, label.data, step.number, step.wall, number),
        )
        return "labelled"

    def _put_progress(self, one: FileProgress) -> None:
        row = one.path, one.num_bytes, one.changed_ns, one.taken, one.problem
        self._connection.execute("INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?)", row)
