"""The layout of a run's store, version by version; SQLite keeps the number (`PRAGMA user_version`).

Step n brings a store of version n - 1 to version n, in one transaction. A release that stores anything
otherwise than the one before (another table, another meaning of a stored value, another default of a key of
run.toml) adds a step at the end; a step that was released never changes.
"""

import sqlite3
from pathlib import Path

from protocols.errors import StoreVersion

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
    """Of a new store; the first ones had no number, and have these tables already."""
    for table in _TABLES.split(";"):  # executescript would commit what is open
        connection.execute(table)


STEPS = (_first_tables,)
VERSION = len(STEPS)


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """The version of a store; 0: new, or from before versions were numbered.

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
