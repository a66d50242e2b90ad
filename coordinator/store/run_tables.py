"""The tables of a run's store."""

from fleetune.protocols.table_format import TableFormat

FORMAT = TableFormat(
    first=4,
    tables="""
CREATE TABLE value (name TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE reply (device TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE task (
    device TEXT PRIMARY KEY, number INTEGER NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE TABLE array (name BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE round (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE member (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE traffic (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE device_round (
    number INTEGER NOT NULL, device TEXT NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (number, device)
) WITHOUT ROWID;
CREATE TABLE held (device TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE held_model (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
""",
    remedy=(
        "install the version of fleetune that wrote it, or set another run.name (--fresh deletes the run)"
    ),
)
