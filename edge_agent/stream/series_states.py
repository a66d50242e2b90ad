"""States of series in a sample store: the rows with which the next windows begin (`datasets.windows`).

They are values of the store whose names begin with `series `. Each begins with the number of the change that
stored it. When they take more than `MAX_BYTES`, the oldest ones are deleted; their series begin a new window.
"""

import sqlite3
from collections.abc import Mapping

from fleetune.edge_agent.stream import store_values

MAX_BYTES = 2**24
_CHECKED_EVERY = 16  # changes
_NUMBER = 8  # bytes of the number of a change
_OURS = "name >= 'series ' AND name < 'series!'"


def put(connection: sqlite3.Connection, states: Mapping[str, bytes], change: int) -> None:
    """Store states by name, in the open transaction."""
    for name, state in states.items():
        store_values.put_bytes(connection, f"series {name}", change.to_bytes(_NUMBER, "big") + state)
    if change % _CHECKED_EVERY:
        return
    query = f"SELECT name, length(data) FROM value WHERE {_OURS} ORDER BY substr(data, 1, {_NUMBER}) DESC"  # noqa: S608
    total = 0
    for name, num_bytes in connection.execute(query).fetchall():
        total += num_bytes
        if total > MAX_BYTES:
            store_values.drop_bytes(connection, name)


def get(connection: sqlite3.Connection, name: str) -> bytes | None:
    """Return the state of a series; None if there is none."""
    data = store_values.get_bytes(connection, f"series {name}")
    return None if data is None else data[_NUMBER:]


def clear(connection: sqlite3.Connection) -> None:
    connection.execute(f"DELETE FROM value WHERE {_OURS}")  # noqa: S608
