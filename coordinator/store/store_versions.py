"""The layout of a run's store, version by version; SQLite keeps the number (`PRAGMA user_version`).

Step n brings a store of version n - 1 to version n, in one transaction. A release that stores anything
otherwise than the one before (another table, another meaning of a stored value, another default of a key of
run.toml) adds a step at the end; a step that was released never changes.
"""

import sqlite3
from pathlib import Path

import msgspec

from fleetune.protocols.errors import StoreVersion

_TABLES = """
CREATE TABLE IF NOT EXISTS value (name TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reply (device TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS task (
    device TEXT PRIMARY KEY, number INTEGER NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS array (name BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS round (number INTEGER PRIMARY KEY, record BLOB NOT NULL)
"""


def _first_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of a new store. The first stores had no number, and have these tables already."""
    for table in _TABLES.split(";"):  # executescript would commit what is open
        connection.execute(table)


_Rows = dict[str, msgspec.Raw]

_DEVICE_TABLES = """
CREATE TABLE member (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE traffic (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE device_round (
    number INTEGER NOT NULL, device TEXT NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (number, device)
) WITHOUT ROWID
"""


def _rows_of_devices(connection: sqlite3.Connection) -> None:
    """Give each device a row of its own for what is kept of it; it stood in the values of the whole run."""
    for table in _DEVICE_TABLES.split(";"):
        connection.execute(table)
    values = dict(connection.execute("SELECT name, data FROM value"))
    if "ledger" in values:
        ledger = msgspec.json.decode(values["ledger"], type=dict[str, msgspec.Raw])
        _put_rows(connection, "traffic", msgspec.json.decode(ledger.pop("traffic"), type=_Rows))
        _put_value(connection, "ledger", msgspec.json.encode(ledger))
    if "engine" in values:
        engine = msgspec.msgpack.decode(values["engine"], type=dict[str, msgspec.Raw])
        _put_rows(connection, "member", msgspec.msgpack.decode(engine.pop("members"), type=_Rows))
        _put_value(connection, "participants", bytes(engine.pop("participants")))
        _put_value(connection, "engine", msgspec.msgpack.encode(engine))
        turn = 1 + msgspec.msgpack.decode(engine["rounds_done"]), msgspec.msgpack.decode(engine["attempt"])
        _put_replies(connection, turn, msgspec.json.decode(values["arrived"], type=_Rows))
        connection.execute("DELETE FROM value WHERE name = 'arrived'")
    for number, data in connection.execute("SELECT number, record FROM round").fetchall():
        record = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        replies = msgspec.json.decode(record["devices"], type=_Rows)
        _put_replies(connection, (number, msgspec.json.decode(record["attempt"])), replies)
        record["devices"] = msgspec.Raw(b"{}")
        row = msgspec.json.encode(record), number
        connection.execute("UPDATE round SET record = ? WHERE number = ?", row)


def _put_value(connection: sqlite3.Connection, name: str, data: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO value VALUES (?, ?)", (name, data))


def _put_rows(connection: sqlite3.Connection, table: str, rows: _Rows) -> None:
    values = [(device, bytes(data)) for device, data in rows.items()]
    connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", values)  # noqa: S608 - a name of ours


def _put_replies(connection: sqlite3.Connection, turn: tuple[int, int], replies: _Rows) -> None:
    number, attempt = turn
    rows = [(number, device, attempt, bytes(data)) for device, data in replies.items()]
    connection.executemany("INSERT INTO device_round VALUES (?, ?, ?, ?)", rows)


_HELD_TABLES = """
CREATE TABLE held (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE held_model (digest TEXT PRIMARY KEY, data BLOB NOT NULL)
"""


def _what_devices_hold(connection: sqlite3.Connection) -> None:
    """Make the tables of it. A run that began before `lossless` was the default goes on without encodings."""
    for table in _HELD_TABLES.split(";"):
        connection.execute(table)
    for (data,) in connection.execute("SELECT data FROM value WHERE name = 'settings'").fetchall():
        settings = msgspec.json.decode(data)
        settings["encoding"] = {"up": "raw", "down": "raw", **settings.get("encoding", {})}
        _put_value(connection, "settings", msgspec.json.encode(settings))


STEPS = (_first_tables, _rows_of_devices, _what_devices_hold)
VERSION = len(STEPS)


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Read the version of a store; 0: it is new, or from before versions were numbered.

    Raises:
        StoreVersion: it is newer than this coordinator.
        sqlite3.Error: the file is damaged or locked.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise StoreVersion.of(path, version, VERSION)
    return int(version)


def bring_up(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a store to the present version, step by step.

    Raises:
        StoreVersion, sqlite3.Error: as `version_of`; the store is as it was, or some steps further.
    """
    for number in range(version_of(connection, path) + 1, VERSION + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            STEPS[number - 1](connection)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
