"""Named values in a sample store's file: all stored data other than samples."""

import sqlite3
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from fleetune.edge_agent.stream.retention import RetentionLimits

T = TypeVar("T")


class StoreClock(Struct):
    """The store's own clock, which follows the device's clock but never jumps.

    Attributes:
        seconds: time since the store was created, in seconds.
        wall: the device's clock at the same moment, in seconds since 1970.
    """

    seconds: float = 0.0
    wall: float = 0.0


class TrainingRound(Struct, frozen=True):
    """One attempt at a round of a run. A snapshot is pinned for it."""

    run: str
    round: int
    attempt: int


class PinnedSnapshot(Struct, frozen=True):
    """The pinned snapshot of a round: all samples that counted after one change of the store.

    Attributes:
        training_round: the round. It gets the same snapshot again, until another round pins one.
        change: number of the change.
        complete: True if no sample of it had to be deleted.
    """

    training_round: TrainingRound = field(name="turn")
    change: int
    complete: bool = field(default=True, name="whole")


class DriftState(Struct):
    """State of the drift tests.

    Attributes:
        tested: number of the last arrival that was tested for input drift.
        inputs: result of the last test for input drift; None if there was none since the last training.
        loss: result of the last test for loss drift; None if there was none since the last training.
        loss_tested: number of the change up to which samples were tested for loss drift.
    """

    tested: int = 0
    inputs: float | None = None
    loss: float | None = None
    loss_tested: int = 0

    @property
    def figure(self) -> float | None:
        """The larger result of both tests; None if there is no result."""
        return max((one for one in (self.inputs, self.loss) if one is not None), default=None)


class TableColumns(Struct):
    """Names of the columns of tables, in the order of the first table. All intakes use this order."""

    columns: tuple[str, ...] = ()


class FileProgress(Struct, frozen=True):
    """How far a file has been read.

    Attributes:
        path: path of the file.
        num_bytes, changed_ns: size and time of change when it was read. While they are equal, it has nothing
            new.
        taken: bytes that were read of a file that may grow.
        problem: why the file could not be read; None if it was read.
    """

    path: str
    num_bytes: int
    changed_ns: int
    taken: int = 0
    problem: str | None = None


NAMES: dict[type, str] = {
    StoreClock: "clock",
    PinnedSnapshot: "pin",
    DriftState: "drift",
    TableColumns: "feed",
    RetentionLimits: "bounds",
}


def get(connection: sqlite3.Connection, kind: type[T]) -> T | None:
    """Return the stored value of a type; None if none is stored, or another version wrote it."""
    data = get_bytes(connection, NAMES[kind])
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None


def put(connection: sqlite3.Connection, value: Struct) -> None:
    put_bytes(connection, NAMES[type(value)], msgspec.json.encode(value))


def get_bytes(connection: sqlite3.Connection, name: str) -> bytes | None:
    row = connection.execute("SELECT data FROM value WHERE name = ?", (name,)).fetchone()
    return None if row is None else bytes(row[0])


def put_bytes(connection: sqlite3.Connection, name: str, data: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO value VALUES (?, ?)", (name, data))


def drop_bytes(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM value WHERE name = ?", (name,))


def get_number(connection: sqlite3.Connection, name: str) -> int:
    data = get_bytes(connection, name)
    return 0 if data is None else int(data)


def put_number(connection: sqlite3.Connection, name: str, number: int) -> None:
    put_bytes(connection, name, b"%d" % number)
