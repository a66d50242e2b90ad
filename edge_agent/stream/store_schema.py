"""The SQLite file of a sample store: its tables, and how to open it.

Inputs have a table of their own, so that counting and selecting samples reads no inputs.
"""

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import make_folder, make_private_file
from fleetune.protocols.table_format import TableFormat

BUSY_S = 30.0  # another process may be adding samples, or reading those of a snapshot
LOG_BYTES = 4 * 2**20  # size to which SQLite cuts its own log, a second file

FORMAT = TableFormat(
    first=2,
    tables="""
CREATE TABLE value (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE form (
    number INTEGER PRIMARY KEY, dtype TEXT NOT NULL, shape TEXT NOT NULL, UNIQUE (dtype, shape)
);
CREATE TABLE sample (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL, form INTEGER NOT NULL, name TEXT UNIQUE,
    class INTEGER NOT NULL, y BLOB, for_test REAL NOT NULL, for_validation REAL NOT NULL, rank REAL NOT NULL,
    num_bytes INTEGER NOT NULL, added INTEGER NOT NULL, changed INTEGER NOT NULL, dropped INTEGER,
    arrived_s REAL NOT NULL, arrived_at REAL NOT NULL, labelled_at REAL, UNIQUE (digest, form)
);
CREATE TABLE input (number INTEGER PRIMARY KEY, x BLOB NOT NULL);
CREATE TABLE label_before (number INTEGER PRIMARY KEY, class INTEGER NOT NULL, y BLOB);
CREATE TABLE tally (
    held INTEGER NOT NULL, class INTEGER NOT NULL, count INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    PRIMARY KEY (held, class)
) WITHOUT ROWID;
CREATE TABLE refusal (kind TEXT PRIMARY KEY, count INTEGER NOT NULL, last TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE file (
    path TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, changed_ns INTEGER NOT NULL, taken INTEGER NOT NULL,
    problem TEXT
) WITHOUT ROWID;
CREATE TABLE arrival (
    number INTEGER PRIMARY KEY AUTOINCREMENT, form INTEGER NOT NULL, projections BLOB NOT NULL
);
CREATE INDEX live_rank ON sample (rank) WHERE dropped IS NULL;
CREATE INDEX live_class ON sample (class, rank) WHERE dropped IS NULL;
CREATE INDEX live_class_number ON sample (class, number) WHERE dropped IS NULL;
CREATE INDEX held ON sample (dropped) WHERE dropped IS NOT NULL;
CREATE INDEX by_change ON sample (changed);
CREATE TRIGGER counted AFTER INSERT ON sample BEGIN
    INSERT INTO tally VALUES (NEW.dropped IS NOT NULL, NEW.class, 1, NEW.num_bytes)
    ON CONFLICT DO UPDATE SET count = count + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER uncounted AFTER DELETE ON sample BEGIN
    UPDATE tally SET count = count - 1, num_bytes = num_bytes - OLD.num_bytes
    WHERE held = (OLD.dropped IS NOT NULL) AND class = OLD.class;
    DELETE FROM input WHERE number = OLD.number;
    DELETE FROM label_before WHERE number = OLD.number;
END;
CREATE TRIGGER recounted AFTER UPDATE OF class, dropped, num_bytes ON sample BEGIN
    UPDATE tally SET count = count - 1, num_bytes = num_bytes - OLD.num_bytes
    WHERE held = (OLD.dropped IS NOT NULL) AND class = OLD.class;
    INSERT INTO tally VALUES (NEW.dropped IS NOT NULL, NEW.class, 1, NEW.num_bytes)
    ON CONFLICT DO UPDATE SET count = count + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
""",
    remedy=(
        "install the version of fleetune that wrote it, or remove the agent's folder with edge-agent wipe"
    ),
)


def open_store(path: Path, *, durable: bool = True) -> sqlite3.Connection:
    """Open the file for reading and writing, or create it.

    Args:
        path: path of the file.
        durable: True if changes must survive a power cut. Simulations turn it off.

    Raises:
        StoreVersion: the file has a format that this version does not read; it is left unchanged.
        StoreError: the file cannot be opened or is damaged.
    """
    make_folder(path.parent)
    connection = None
    try:
        make_private_file(path)  # SQLite creates its other files with the same permissions
        connection = connect(path)
        FORMAT.check(connection, path)
        _write_ahead(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        connection.execute("PRAGMA secure_delete = FAST")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        FORMAT.bring_up(connection, path)
        if durable:
            disk.DISK.sync_folder(path.parent)
    except (sqlite3.Error, OSError, StoreError) as problem:
        if connection is not None:
            connection.close()
        if isinstance(problem, StoreError):
            raise
        raise store_error("open", path, problem) from None
    with suppress(OSError):
        path.chmod(0o600)  # only the owner may read samples
    return connection


def connect(path: Path, *, mode: str = "rwc") -> sqlite3.Connection:
    """Connect to the file. Transactions begin with an explicit `BEGIN`. Raises sqlite3.Error."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S, cached_statements=64
    )


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Turn on SQLite's write-ahead log. Raises sqlite3.Error.

    If two processes turn it on at once in a new file, SQLite reports "busy" to one of them without waiting.
    So this function waits and tries again.
    """
    give_up_at = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as problem:
            if problem.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)
        else:
            return


def store_error(verb: str, path: Path, problem: sqlite3.Error | OSError) -> StoreError:
    """Return the error for a failure of SQLite or of the disk, with a remedy."""
    if isinstance(problem, OSError):
        return StoreError(f"cannot {verb} {path}: {os.strerror(problem.errno or 0)}")
    code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        advice = "the file is damaged: restore it, or remove it to start without samples"
    elif code == sqlite3.SQLITE_FULL:
        advice = "free some space, or lower --keep-mb; no stored sample is lost"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        advice = "another process is using it; this is tried again"
    else:
        advice = "check the permissions of its folder and the free space"
    return StoreError(f"cannot {verb} {path}: {problem}; {advice}")
