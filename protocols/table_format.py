"""The format of a SQLite file: its tables, its number, and the steps from one format to the next.

SQLite stores the number in each file (`PRAGMA user_version`). A change of the stored content needs a new
step: for example another table, another meaning of a value, or another default of a setting. Before the first
release, such a change may raise `first` instead. Files of an earlier format are then refused.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetune.protocols.errors import StoreVersion

# In one statement: between two, another process might make the tables of a new file.
_NUMBER_AND_TABLES = "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"

Step = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True)
class TableFormat:
    """The formats of one kind of file.

    Attributes:
        first: number of the oldest format that is read, at least 1.
        tables: SQL that makes a new file in that format.
        steps: functions; number n converts a file from format `first + n` to the next format.
        remedy: advice in the error message for a file of another format.
    """

    first: int
    tables: str
    steps: tuple[Step, ...] = ()
    remedy: str = "install the version of fleetune that wrote it"

    @property
    def number(self) -> int:
        """The number of the format that is written."""
        return self.first + len(self.steps)

    def check(self, connection: sqlite3.Connection, path: Path) -> int:
        """Return the format of a file; 0 if the file is new.

        Raises:
            StoreVersion: this program does not read the file's format.
            sqlite3.Error: the file is damaged or locked.
        """
        found, num_tables = connection.execute(_NUMBER_AND_TABLES).fetchone()
        if self.first <= found <= self.number:
            return int(found)
        if found == num_tables == 0:
            return 0
        raise StoreVersion.of(path, found, self.number, self.remedy)

    def bring_up(self, connection: sqlite3.Connection, path: Path) -> None:
        """Make the tables of a new file, or upgrade an older file step by step; each step is one transaction.

        Raises:
            StoreVersion, sqlite3.Error: see `check`. The steps before the failed one stay applied.
        """
        while True:
            connection.execute("BEGIN IMMEDIATE")
            try:
                found = self.check(connection, path)  # another process may have taken the step meanwhile
                if found == 0:
                    _run_all(connection, self.tables)
                    connection.execute(f"PRAGMA user_version = {self.first}")
                elif found < self.number:
                    self.steps[found - self.first](connection)
                    connection.execute(f"PRAGMA user_version = {found + 1}")
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            if found == self.number:
                return


def _run_all(connection: sqlite3.Connection, commands: str) -> None:
    """Run SQL commands in the transaction that is open; `executescript` would commit it first."""
    command = ""
    for line in commands.splitlines(keepends=True):
        command += line
        if sqlite3.complete_statement(command):
            connection.execute(command)
            command = ""
