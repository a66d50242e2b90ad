"""Deletes samples that an owner selects, for good: also from the pinned snapshot and from SQLite's log."""

import datetime as dt
import sqlite3
from dataclasses import dataclass
from typing import Self

from fleetune.edge_agent.stream import drift_windows, series_states


@dataclass(frozen=True)
class SampleFilter:
    """Selects samples: by name if there are names, else by time of arrival.

    Attributes:
        names: names that the owner gave them.
        since_s, until_s: begin and end of the time of arrival, by the device's clock, in seconds since 1970.
    """

    names: tuple[str, ...] = ()
    since_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def of_day(cls, day: dt.date) -> Self:
        """Select the samples that arrived on a day, in local time."""
        ends = (day, day + dt.timedelta(days=1))
        since, until = (dt.datetime.combine(one, dt.time()).timestamp() for one in ends)
        return cls(since_s=since, until_s=until)

    @property
    def where(self) -> tuple[str, tuple[object, ...]]:
        """Return an SQL condition on rows of the table `sample`, and its parameters."""
        if self.names:
            return f"name IN ({', '.join('?' * len(self.names))})", self.names
        return "arrived_at >= ? AND arrived_at < ?", (self.since_s, self.until_s)


def matching_names(connection: sqlite3.Connection, selection: SampleFilter) -> list[str | None]:
    """Return the names of the selected samples; None for a sample without a name."""
    where, values = selection.where
    return [name for (name,) in connection.execute(f"SELECT name FROM sample WHERE {where}", values)]  # noqa: S608


def delete(connection: sqlite3.Connection, selection: SampleFilter) -> int:
    """Delete the selected samples, and all data that the drift test derived from any inputs.

    The caller has opened a transaction and turned `secure_delete` on, so that SQLite overwrites freed pages.

    Returns:
        Number of deleted samples.
    """
    where, values = selection.where
    count = connection.execute(f"DELETE FROM sample WHERE {where}", values).rowcount  # noqa: S608
    if count:
        drift_windows.clear(connection)
    series_states.clear(connection)  # they hold rows of the sensors that may be among the selected ones
    return count
