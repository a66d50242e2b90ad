"""A run's durable state: one SQLite file, each step of the run one transaction, or part of a larger one."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

import msgspec
from msgspec.structs import replace

from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.coordinator.store.folder_lock import claim
from fleetune.coordinator.store.run_tables import FORMAT
from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import keep_private, make_folder, make_private_file
from fleetune.protocols.freed_memory import LARGE_BYTES

Rows = Literal["member", "traffic", "held"]
Pieces = Sequence[bytes | memoryview]  # the data of a row, which are written one after the other

_OUTER = "BEGIN", ("ROLLBACK",), "COMMIT"
_INNER = "SAVEPOINT inner", ("ROLLBACK TO inner", "RELEASE inner"), "RELEASE inner"
_device_round = msgspec.json.Decoder(DeviceRound)
_record = msgspec.json.Decoder(RoundRecord)


class RunStore:
    """A run's state in its SQLite file.

    It holds named values, rows of devices, the replies of the round that runs, tasks of open windows, records
    of closed rounds, and large arrays of the method's state (see `coordinator.store.method_state`).
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, lock: IO[bytes] | None = None) -> None:
        self._connection = connection
        self._lock = lock
        self.path = path

    @classmethod
    def open(cls, path: Path, *, durable: bool = True) -> Self:
        """Open the file for writing, or create it.

        Args:
            path: the file.
            durable: survive a power cut too; simulations do not need it.

        Raises:
            StoreVersion: this version cannot read its format.
            StoreError: it cannot be opened, is no run's state, or another coordinator holds its folder.
        """
        make_folder(path.parent, durable=durable)
        keep_private(path.parent)
        with _opening(path) as opened:
            lock = opened.enter_context(claim(path.parent))
            make_private_file(path)  # SQLite gives its other files the same permissions
            connection = opened.enter_context(closing(_connect(path.absolute().as_uri())))
            _set_up(connection, path, durable=durable)
        return cls(connection, path, lock)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open the file for reading its present state, also while a coordinator writes it.

        All reads share one transaction, so they are consistent. Until `close` the writer's log grows.

        Raises:
            StoreVersion: this version cannot read its format.
            StoreError: it cannot be opened, or is no run's state.
        """
        with _opening(path) as opened:
            connection = opened.enter_context(closing(_connect(_read_only(path))))
            connection.execute("BEGIN")
            is_current = FORMAT.check(connection, path) == FORMAT.number
        if not is_current:
            connection.close()
            cls.open(path).close()
            return cls.read(path)
        return cls(connection, path)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a transaction: all writes in this context are stored, or none. Nested steps belong to the outer
        one.

        Raises:
            StoreError: the transaction cannot be written, e.g. because the disk is full.
        """
        inner = self._connection.in_transaction
        begin, undo, commit = _INNER if inner else _OUTER
        try:
            self._connection.execute(begin)
            try:
                yield
            except BaseException:
                for command in undo:
                    self._connection.execute(command)
                raise
            self._connection.execute(commit)
        except sqlite3.Error as problem:
            raise StoreError(f"cannot write {self.path}: {problem}") from None

    def put(self, name: str, data: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO value VALUES (?, ?)", (name, data))

    def get(self, name: str) -> bytes | None:
        return self._one("SELECT data FROM value WHERE name = ?", name)

    def drop(self, name: str) -> None:
        self._connection.execute("DELETE FROM value WHERE name = ?", (name,))

    def clear(self) -> None:
        """Delete all content of the store."""
        for (table,) in self._rows("SELECT name FROM sqlite_master WHERE type = 'table'"):
            self._connection.execute(f'DELETE FROM "{table}"')  # noqa: S608 - names of our own

    def put_rows(self, table: Rows, rows: Iterable[tuple[str, bytes]]) -> None:
        """Replace the rows of some devices."""
        self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows)  # noqa: S608

    def rows(self, table: Rows) -> list[tuple[str, bytes]]:
        """Return the rows of all devices, ascending."""
        return self._rows(f"SELECT device, data FROM {table} ORDER BY device")  # noqa: S608

    def add_reply(self, device: str, pieces: Pieces) -> None:
        self._add("reply", device, pieces)

    @contextmanager
    def reply(self, device: str) -> Iterator[IO[bytes]]:
        """Open a device's reply in the open round for reading.

        Raises:
            StoreError: there is none.
        """
        rows = self._rows("SELECT rowid FROM reply WHERE device = ?", device)
        if not rows:
            raise StoreError(f"{self.path}: the reply of {device} is missing")
        with self._connection.blobopen("reply", "data", rows[0][0], readonly=True) as blob:
            yield cast("IO[bytes]", blob)

    def drop_replies(self) -> None:
        self._connection.execute("DELETE FROM reply")

    def add_task(self, device: str, number: int, attempt: int, data: bytes) -> None:
        """Store the task that a device works on, in place of its previous one."""
        self._connection.execute(
            "INSERT OR REPLACE INTO task VALUES (?, ?, ?, ?)", (device, number, attempt, data)
        )

    def task(self, device: str, number: int, attempt: int) -> bytes | None:
        query = "SELECT data FROM task WHERE device = ? AND number = ? AND attempt = ?"
        return self._one(query, device, number, attempt)

    def drop_task(self, device: str) -> None:
        self._connection.execute("DELETE FROM task WHERE device = ?", (device,))

    def drop_tasks(self) -> None:
        self._connection.execute("DELETE FROM task")

    def add_held_model(self, digest: str, pieces: Pieces) -> None:
        self._add("held_model", digest, pieces)

    def held_model(self, digest: str) -> bytes:
        """Return a model that some devices hold, by its digest.

        Raises:
            StoreError: it is missing.
        """
        return self._needed(
            f"what devices hold ({digest[:12]}) is missing",
            "SELECT data FROM held_model WHERE digest = ?",
            digest,
        )

    def drop_held_model(self, digest: str) -> None:
        self._connection.execute("DELETE FROM held_model WHERE digest = ?", (digest,))

    def drop_row(self, table: Rows, device: str) -> None:
        """Delete the row of a device."""
        self._connection.execute(f"DELETE FROM {table} WHERE device = ?", (device,))  # noqa: S608

    def knows(self, device: str) -> bool:
        """True if a row belongs to this device."""
        tables = ("member", "traffic", "reply", "task", "device_round", "held")
        queries = (f"SELECT 1 FROM {table} WHERE device = ? LIMIT 1" for table in tables)  # noqa: S608
        return any(self._rows(query, device) for query in queries)

    def drop_device(self, device: str) -> dict[str, int]:
        """Delete a device's rows and its name in records of rounds; return the number of each.

        Its row in `held` stays, because models that no device holds any more must go with it.
        """
        removed = {
            table: self._connection.execute(f"DELETE FROM {table} WHERE device = ?", (device,)).rowcount  # noqa: S608
            for table in ("member", "traffic", "reply", "task", "device_round")
        }
        named = 0
        for number, data in self._rows("SELECT number, record FROM round"):
            record = _record.decode(data)
            if device in record.participants:
                rest = tuple(one for one in record.participants if one != device)
                self.add_record(replace(record, number=number, participants=rest))
                named += 1
        return removed | {"round": named}

    def compact(self) -> None:
        """Write the file anew, so that it holds no deleted data.

        Raises:
            StoreError: the disk is full, or another process reads the store for too long.
        """
        try:
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as problem:
            raise StoreError(f"cannot compact {self.path}: {problem}") from None

    def array_names(self) -> set[bytes]:
        return {name for (name,) in self._rows("SELECT name FROM array")}

    def add_array(self, name: bytes, pieces: Pieces) -> None:
        self._add("array", name, pieces)

    def array(self, name: bytes) -> bytes:
        """Return an array by its name.

        Raises:
            StoreError: there is none.
        """
        return self._needed(
            f"array {name.hex()[:12]} is missing", "SELECT data FROM array WHERE name = ?", name
        )

    def drop_arrays(self, names: Iterable[bytes]) -> None:
        self._connection.executemany("DELETE FROM array WHERE name = ?", [(name,) for name in names])

    def put_device_rounds(self, number: int, attempt: int, replies: Mapping[str, DeviceRound]) -> None:
        """Store the records of these devices' replies in a round, open or closed."""
        encode = msgspec.json.encode
        rows = [(number, device, attempt, encode(reply)) for device, reply in replies.items()]
        self._connection.executemany("INSERT OR REPLACE INTO device_round VALUES (?, ?, ?, ?)", rows)

    def device_rounds(self, number: int) -> dict[str, DeviceRound]:
        """Return the records of the replies in a round, by device, ascending."""
        rows = self._rows("SELECT device, data FROM device_round WHERE number = ? ORDER BY device", number)
        return {device: _device_round.decode(data) for device, data in rows}

    def device_round(self, device: str, number: int, attempt: int) -> DeviceRound | None:
        """Return the record of one device's reply; None if it has no part in this attempt at the round."""
        query = "SELECT data FROM device_round WHERE number = ? AND device = ? AND attempt = ?"
        data = self._one(query, number, device, attempt)
        return None if data is None else _device_round.decode(data)

    def drop_device_rounds(self, number: int) -> None:
        """Delete the records of the replies in an abandoned round."""
        self._connection.execute("DELETE FROM device_round WHERE number = ?", (number,))

    def add_record(self, record: RoundRecord) -> None:
        """Store the record of a closed round; its devices are already stored (`put_device_rounds`)."""
        row = record.number, msgspec.json.encode(replace(record, devices={}))
        self._connection.execute("INSERT OR REPLACE INTO round VALUES (?, ?)", row)

    def drop_record(self, number: int) -> None:
        """Delete the record of a rolled-back round, and those of its replies."""
        self._connection.execute("DELETE FROM round WHERE number = ?", (number,))
        self.drop_device_rounds(number)

    def records(self) -> list[RoundRecord]:
        """Return the records of all closed rounds, ascending."""
        rows = self._rows("SELECT number, record FROM round ORDER BY number")
        return [replace(_record.decode(data), devices=self.device_rounds(number)) for number, data in rows]

    def records_up_to(self, last: int, *, after: int = 0, but_every: int = 0) -> Iterator[RoundRecord]:
        """Yield the records of rounds `after + 1` to `last`, ascending, read one by one.

        Args:
            last: number of the last round.
            after: number of the round before the first.
            but_every: leave out rounds whose number it divides; 0: leave out none.
        """
        query = "SELECT number FROM round WHERE number > ? AND number <= ? ORDER BY number"
        for (number,) in self._rows(query, after, last):
            if not but_every or number % but_every:
                (row,) = self._rows("SELECT record FROM round WHERE number = ?", number)
                yield replace(_record.decode(row[0]), devices=self.device_rounds(number))

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def _add(self, table: str, key: str | bytes, pieces: Pieces) -> None:
        """Insert or replace a row whose data are these pieces."""
        length = sum(map(len, pieces))
        if length < LARGE_BYTES:
            command = f"INSERT OR REPLACE INTO {table} VALUES (?, ?)"  # noqa: S608 - names of our own
            self._connection.execute(command, (key, b"".join(pieces)))
            return
        # written one by one, because SQLite and the connection's cache of statements would keep copies
        command = f"INSERT OR REPLACE INTO {table} VALUES (?, zeroblob(?))"  # noqa: S608 - names of our own
        row = self._connection.execute(command, (key, length)).lastrowid
        assert row is not None, "a row was inserted"
        with self._connection.blobopen(table, "data", row) as blob:
            for piece in pieces:
                blob.write(piece)

    def _needed(self, what: str, query: str, *key: Any) -> bytes:
        data = self._one(query, *key)
        if data is None:
            raise StoreError(f"{self.path}: {what}")
        return data

    def _one(self, query: str, *key: Any) -> bytes | None:
        rows = self._rows(query, *key)
        return bytes(rows[0][0]) if rows else None

    def _rows(self, query: str, *key: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, key).fetchall()
        except sqlite3.Error as problem:
            raise StoreError(f"cannot read {self.path}: {problem}") from None


@contextmanager
def _opening(path: Path) -> Iterator[ExitStack]:
    """Close all entered resources if this context fails; otherwise they stay open.

    Raises:
        StoreError: the file cannot be opened.
    """
    with ExitStack() as opened:
        try:
            yield opened
        except OSError as problem:
            raise StoreError(f"cannot open {path}: {problem.strerror}") from None
        except sqlite3.Error as problem:
            raise StoreError(f"cannot open {path}: {problem}; {_advice(problem)}") from None
        opened.pop_all()


def _connect(name: str) -> sqlite3.Connection:
    return sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False, timeout=1)


def _read_only(path: Path) -> str:
    """Return the SQLite address that opens a file for reading only.

    In a folder without write permission SQLite can read only a database without a log. The address then says
    that no process writes it.
    """
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if frozen else "")


def _set_up(connection: sqlite3.Connection, path: Path, *, durable: bool) -> None:
    FORMAT.check(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
    # Debian's SQLite overwrites deleted data with zeros, which doubles the writes
    connection.execute("PRAGMA secure_delete = FAST")
    FORMAT.bring_up(connection, path)
    if durable:
        disk.DISK.sync_folder(path.parent)


def _advice(problem: sqlite3.Error) -> str:
    if problem.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "is another coordinator running it?"
    if problem.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return "it is damaged, or no run's state"
    return "may this folder be written, and is there room?"
