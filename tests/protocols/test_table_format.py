"""SQLite files: migrated step by step, refused where the format is unknown, and never left half-way."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from fleetune.protocols.errors import StoreVersion
from fleetune.protocols.table_format import TableFormat

FIRST = TableFormat(first=3, tables="CREATE TABLE sensor (name TEXT PRIMARY KEY, celsius REAL NOT NULL);\n")


def in_kelvin(connection):
    """The synthetic example of a step: another meaning of a stored value, and a new table."""
    connection.execute("ALTER TABLE sensor RENAME COLUMN celsius TO kelvin")
    connection.execute("UPDATE sensor SET kelvin = kelvin + 273.15")
    connection.execute("CREATE TABLE place (name TEXT PRIMARY KEY)")


def fails(connection):
    connection.execute("DELETE FROM sensor")
    connection.execute("CREATE TABLE extra (name TEXT)")
    connection.execute("no SQL")


SECOND = replace(FIRST, steps=(in_kelvin,))


@pytest.fixture
def file(tmp_path):
    """A file in the first format, with one sensor."""
    path = tmp_path / "file.sqlite"
    with opened(path) as connection:
        FIRST.bring_up(connection, path)
        connection.execute("INSERT INTO sensor VALUES ('door', 20.0)")
    return path


def opened(path):
    return closing(sqlite3.connect(path, isolation_level=None))


def dump(path):
    with opened(path) as connection:
        return [*connection.iterdump(), connection.execute("PRAGMA user_version").fetchone()]


def test_an_earlier_format_is_migrated_and_equals_a_new_file(file, tmp_path):
    with opened(file) as connection:
        assert SECOND.check(connection, file) == 3
        SECOND.bring_up(connection, file)
        assert SECOND.check(connection, file) == SECOND.number == 4
        assert connection.execute("SELECT name, kelvin FROM sensor").fetchall() == [("door", 293.15)]
        connection.execute("DELETE FROM sensor")
    new = tmp_path / "new.sqlite"
    with opened(new) as connection:
        assert SECOND.check(connection, new) == 0
        SECOND.bring_up(connection, new)
    assert dump(file) == dump(new)


def test_a_step_that_fails_leaves_the_file_in_the_format_before(file):
    before = dump(file)
    with opened(file) as connection, pytest.raises(sqlite3.Error):
        replace(FIRST, steps=(fails,)).bring_up(connection, file)
    assert dump(file) == before


@pytest.mark.parametrize("reads", [replace(FIRST, first=4), replace(FIRST, first=2), replace(FIRST, first=1)])
def test_another_format_is_refused_and_left_unchanged(file, reads):
    before = file.read_bytes()
    line = f"file.sqlite has format 3; this program reads format {reads.number}: install the version"
    with opened(file) as connection:
        for act in (reads.check, reads.bring_up):
            with pytest.raises(StoreVersion, match=line):
                act(connection, file)
    assert file.read_bytes() == before


def test_tables_without_a_number_are_refused(tmp_path):
    path = tmp_path / "other.sqlite"
    with opened(path) as connection:
        connection.execute("CREATE TABLE sensor (name TEXT)")
        with pytest.raises(StoreVersion, match="has format 0"):
            FIRST.bring_up(connection, path)
