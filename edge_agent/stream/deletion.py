"""Removing samples that an owner names from a store: for good, whatever snapshot or log still has them."""

import datetime as dt
import sqlite3
from dataclasses import dataclass
from typing import Self

from fleetune.edge_agent.stream import drift_windows


@dataclass(frozen=True)
class SampleFilter:
    """Which samples: those with one of these names, or those that arrived from `since_s` until `until_s`.

    Attributes:
        names: that their owner gave them.
        since_s, until_s: by the device's clock, seconds since 1970.
    """

    names: tuple[str, ...] = ()
    since_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def of_day(cls, day: dt.date) -> Self:
        """The samples that arrived on this day, local time."""
        ends = (day, day + dt.timedelta(days=1))
        since, until = (dt.datetime.combine(one, dt.time()).timestamp() for one in ends)
        return cls(since_s=since, until_s=until)

    @property
    def where(self) -> tuple[str, tuple[object, ...]]:
        """The condition on rows of `sample`, and its values."""
        if self.names:
            return f"name IN ({', '.join('?' * len(self.names))})", self.names
        return "arrived_at >= ? AND arrived_at < ?", (self.since_s, self.until_s)


def matching_names(connection: sqlite3.Connection, chosen: SampleFilter) -> list[str | None]:
    """The names of the samples that are chosen, None where one has none."""
    where, values = chosen.where
    return [name for (name,) in connection.execute(f"SELECT name FROM sample WHERE {where}", values)]  # noqa: S608


def delete(connection: sqlite3.Connection, chosen: SampleFilter) -> int:
    """Delete samples, also those that a snapshot holds, and what the test of drift made of inputs.

    The transaction is open, and `secure_delete` is on: freed pages are overwritten. Returns how many went.
    """
    where, values = chosen.where
    count = connection.execute(f"DELETE FROM sample WHERE {where}", values).rowcount  # noqa: S608
    if count:
        drift_windows.clear(connection)
    return count
