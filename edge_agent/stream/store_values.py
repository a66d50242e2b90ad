"""Named values in a sample store's file: what it remembers beside its samples."""

import sqlite3
from typing import TypeVar

import msgspec
from msgspec import Struct

from fleetune.edge_agent.stream.retention import RetentionLimits

T = TypeVar("T")


class StoreClock(Struct):
    """The store's own clock, which a clock that jumps cannot make jump.

    Attributes:
        seconds: since the store was made.
        wall: what the device's clock said then, seconds since 1970.
    """

    seconds: float = 0.0
    wall: float = 0.0


class TrainingRound(Struct, frozen=True):
    """What a snapshot is for: a round of a run, and the attempt at it."""

    run: str
    round: int
    attempt: int


class PinnedSnapshot(Struct, frozen=True):
    """The snapshot of a round: all that counted after this change of the store.

    Attributes:
        turn: of the round; the same turn has the same snapshot, however often it is asked for.
        change: number of the change.
        whole: nothing of it was let go for want of room.
    """

    turn: TrainingRound
    change: int
    whole: bool = True


class DriftState(Struct):
    """What is known of drift.

    Attributes:
        tested: number of the last arrival that was tested.
        inputs: figure of the last test of inputs; None: there was none since the last training.
        loss: likewise, of the loss.
        loss_tested: change of the store up to which the loss on samples was tested.
    """

    tested: int = 0
    inputs: float | None = None
    loss: float | None = None
    loss_tested: int = 0

    @property
    def figure(self) -> float | None:
        """The larger of the two."""
        return max((one for one in (self.inputs, self.loss) if one is not None), default=None)


class TableColumns(Struct):
    """What the feeders agreed on: names of a table's columns, in the order of the first one seen."""

    columns: tuple[str, ...] = ()


class FileProgress(Struct, frozen=True):
    """How far a file was taken.

    Attributes:
        path: of the file.
        num_bytes, changed_ns: as it was then; the same again, and nothing in it is new.
        taken: bytes of it, where it may grow.
        problem: why it could not be taken; None: it was.
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
    """The value of this kind; None: there is none, or it is of a program that knew another one."""
    data = get_bytes(connection, NAMES[kind])
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None


def put(connection: sqlite3.Connection, value: Struct) -> None:
    put_bytes(connection, NAMES[type(value)], msgspec.json.encode(value))


def drop(connection: sqlite3.Connection, kind: type) -> None:
    connection.execute("DELETE FROM value WHERE name = ?", (NAMES[kind],))


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
