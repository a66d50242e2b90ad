"""The samples that a device keeps: one SQLite file, each change one transaction, durable when it returns.

Several processes may have it open at once: the agent, a sensor's own program, `edge-agent add`. A power cut
leaves what was returned, and nothing of what was not. Any thread may call anything.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import deletion, drift_windows, store_values
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
"""What became of a sample: it was taken in (for how long, the bounds decide), it was there, it was and its
label is new, or it cannot be kept."""

_UNCHECKED_BYTES = 100_000
_NONE = np.zeros(0, np.float32)


@dataclass
class _Transaction:
    """A transaction that is open: its number, the time by the store's clock and by the device's, and the
    bytes that were added since the bounds were looked after.
    """

    number: int
    now_s: float
    wall: float
    unchecked_bytes: int = 0


class SampleStore:
    """A device's samples.

    Args:
        connection: to the file.
        path: of the file.
        wall: the device's clock, seconds since 1970.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._connection, self.path, self._wall = connection, path, wall
        self._lock = threading.RLock()
        self.refusals = RefusalCounts()
        self._expected: SampleRequirements | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        bounds: RetentionLimits | None = None,
        *,
        wall: Callable[[], float] = time.time,
        durable: bool = True,
    ) -> Self:
        """Open the file, or make it.

        Args:
            path: the file.
            bounds: the owner's, from now on; None: as they were given last.
            wall: the device's clock.
            durable: what was returned of survives a power cut; simulations do without.

        Raises:
            StoreVersion: it has a format that is not read here.
            StoreError: it cannot be opened, or is damaged.
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
        """Keep the counts; the file is closed."""
        with self._lock, closing(self._connection), suppress(StoreError):  # a full disk loses counts only
            self.save_counts()

    def require(self, wanted: SampleRequirements) -> None:
        """From now on, what the model can do nothing with is refused; what is there stays."""
        self._expected = wanted

    def add(
        self,
        samples: Iterable[Sample],
        taken: FileProgress | None = None,
        columns: TableColumns | None = None,
    ) -> list[Outcome]:
        """Keep samples, and perhaps what their feeder has to remember, all in one transaction.

        A copy of an input that is there is not kept twice; its label, where it brings one, and its name are.

        Raises:
            StoreError: it cannot be written; nothing of it is kept.
        """
        with self._lock, self._transaction() as step:
            outcomes = [self._add(sample, step) for sample in samples]
            drift_windows.test_full_windows(self._connection)
            if taken is not None:
                self._put_taken(taken)
            if columns is not None:
                store_values.put(self._connection, columns)
        return outcomes

    def label(self, labels: Sequence[tuple[str, Label]]) -> list[Outcome]:
        """Give samples their labels, by name; one that is not there is refused and counted.

        Raises:
            StoreError: it cannot be written; nothing of it is kept.
        """
        with self._lock, self._transaction() as step:
            return [self._label(name, label, step) for name, label in labels]

    def matching_names(self, chosen: SampleFilter) -> list[str | None]:
        """Names of the samples that `forget` would remove, None where one has none."""
        with self._read_errors():
            return deletion.matching_names(self._connection, chosen)

    def delete(self, chosen: SampleFilter) -> int:
        """Remove samples for good: from the file, its log and the snapshot of a round under way.

        Returns how many there were. When it returns, a power cut brings none of them back.

        Raises:
            StoreError: it cannot be written, and nothing is removed; or another process reads the log, which
                still has the bytes.
        """
        with self._lock:
            self._connection.execute("PRAGMA secure_delete = ON")
            try:
                with self._transaction():
                    count = deletion.delete(self._connection, chosen)
                    pin = store_values.get(self._connection, PinnedSnapshot)
                    if count and pin is not None:
                        store_values.put(self._connection, msgspec.structs.replace(pin, whole=False))
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
        """Count what a feeder could not take."""
        self.refusals.add(problem.kind, str(problem), count)

    def save_counts(self) -> None:
        """Write counts that wait, and let go what has grown too old. Raises StoreError."""
        with self._lock, self._transaction():
            pass

    def pin(self, turn: TrainingRound) -> PinnedSnapshot:
        """The snapshot of a round: the same for the same turn, also after a crash, until there is another.

        Raises:
            StoreError: it cannot be written.
        """
        with self._read_errors():
            known = store_values.get(self._connection, PinnedSnapshot)
            if known is not None and known.turn == turn:
                return known
            with self._transaction() as step:
                delete_held(self._connection)
                pin = PinnedSnapshot(turn, step.number)
                store_values.put(self._connection, pin)
                drift_windows.save_next_reference(self._connection)
            return pin

    def mark_trained(self, turn: TrainingRound, losses: NDArray[np.floating] = _NONE) -> None:
        """The round's work is done: what its snapshot held is new no longer.

        Args:
            turn: of the round.
            losses: of the served model on held-out samples, shape (n,), for `drift.loss_drift`. Where they
                are an alarm against those of before, those of before stay for `drift.PATIENCE` trainings:
                one that did not get the model back to where it was is no reason to be content.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock, self._transaction():
            pin = store_values.get(self._connection, PinnedSnapshot)
            if pin is not None and pin.turn == turn:
                store_values.put_number(self._connection, "trained", pin.change)
                drift_windows.use_next_reference(self._connection, pin.change)
                drift_windows.save_reference_losses(self._connection, losses.astype("<f4"))

    @property
    def drift(self) -> DriftState:
        """What is known of it."""
        with self._read_errors():
            return store_values.get(self._connection, DriftState) or DriftState()

    @property
    def reference_losses(self) -> NDArray[np.float32]:
        """Those that the next ones are held against, shape (n,)."""
        with self._read_errors():
            return drift_windows.reference_losses(self._connection)

    def save_loss_drift(self, figure: float | None, tested: int) -> None:
        """Keep what the test of the loss came to, on samples up to the change `tested`. Raises StoreError."""
        with self._lock, self._transaction():
            drift = msgspec.structs.replace(self.drift, loss=figure, loss_tested=tested)
            store_values.put(self._connection, drift)

    @property
    def change(self) -> int:
        """Number of the last change, by whatever process."""
        with self._read_errors():
            return store_values.get_number(self._connection, "change")

    @property
    def trained_until(self) -> int:
        """Number of the change up to which samples were trained on."""
        with self._read_errors():
            return store_values.get_number(self._connection, "trained")

    def file_progress(self, path: str) -> FileProgress | None:
        """How far a file was taken; None: not at all."""
        with self._read_errors():
            query = "SELECT path, num_bytes, changed_ns, taken, problem FROM file WHERE path = ?"
            row = self._connection.execute(query, (path,)).fetchone()
        return None if row is None else FileProgress(*row)

    def drop_missing_files(self, but: set[str], below: str) -> None:
        """Files below this folder that are there no longer need not be remembered. Raises StoreError."""
        with self._read_errors():
            rows = self._connection.execute("SELECT path FROM file").fetchall()
            gone = [(path,) for (path,) in rows if path.startswith(below) and path not in but]
            if gone:
                with self._transaction():
                    self._connection.executemany("DELETE FROM file WHERE path = ?", gone)

    def table_columns(self) -> TableColumns | None:
        """Column names of the first table that was read; None: no table was."""
        with self._read_errors():
            return store_values.get(self._connection, TableColumns)

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        """What is read inside is of this connection. Raises StoreError: it cannot be read."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as problem:
                raise store_error("read", self.path, problem) from None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own, which reads all in one transaction, while others write.

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
        """All that is written inside is written, with counts that wait, within the bounds; or nothing is."""
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
                if self._connection.in_transaction:  # a full disk rolls back by itself
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
            jump = f"the device's clock went {passed:+.0f} s since samples were looked at last"
            self.refusals.add("clock", f"{jump}; they age by a day at most")
        now_s = clock.seconds + min(max(0.0, passed), DAY_S)
        store_values.put(self._connection, StoreClock(now_s, wall))
        number = 1 + store_values.get_number(self._connection, "change")
        store_values.put_number(self._connection, "change", number)
        return _Transaction(number, now_s, wall)

    def _apply_limits(self, step: _Transaction) -> None:
        bounds = store_values.get(self._connection, RetentionLimits) or RetentionLimits()
        pin = store_values.get(self._connection, PinnedSnapshot)
        pinned = pin.change if pin is not None and pin.whole else None
        left = evict(self._connection, bounds, step.now_s, step.number, pinned)
        if pin is not None and left != pinned:
            store_values.put(self._connection, msgspec.structs.replace(pin, whole=False))
        step.unchecked_bytes = 0

    def _save_counts(self, counts: dict[str, tuple[int, str]]) -> None:
        for kind, (count, words) in counts.items():
            self._connection.execute(
                "INSERT INTO refusal VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                " SET count = count + excluded.count, last = excluded.last",
                (kind, count, words),
            )

    def _add(self, sample: Sample, step: _Transaction) -> Outcome:
        problem = None if self._expected is None else self._expected.rejection(sample)
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
        if sample.name is not None:  # a name is of the newest that bears it
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
        if step.unchecked_bytes > _UNCHECKED_BYTES:  # a file does not shrink: a batch shall not swell it
            self._apply_limits(step)
        return "stored"

    def _take_copy(self, number: int, name: str | None, sample: Sample, step: _Transaction) -> Outcome:
        if sample.name is not None and sample.name != name:
            self._connection.execute("UPDATE sample SET name = NULL WHERE name = ?", (sample.name,))
            self._connection.execute("UPDATE sample SET name = ? WHERE number = ?", (sample.name, number))
        return "known" if sample.label is None else self._relabel(number, sample.label, step)

    def _label(self, name: str, label: Label, step: _Transaction) -> Outcome:
        problem = None if self._expected is None else self._expected.label_rejection(label)
        query = "SELECT number FROM sample WHERE name = ? AND dropped IS NULL"
        row = self._connection.execute(query, (name,)).fetchone()
        if row is None:
            problem = BadSample("unknown", f"a label for {name!r}, which is not kept, or not any more")
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

    def _put_taken(self, one: FileProgress) -> None:
        row = one.path, one.num_bytes, one.changed_ns, one.taken, one.problem
        self._connection.execute("INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?)", row)
