"""Retention: decides which samples the store evicts when it is full, or when samples are too old.

**reservoir** evicts the samples with the highest rank. A rank is a number in [0, 1) that depends only on the
sample's content. So the store keeps a uniform draw of all samples that ever arrived, whatever their order
(a bottom-k sketch). **newest** evicts the oldest samples. **balanced** evicts samples of the class that takes
the most space. Samples without a label have a limited share of the space.

A sample that a pinned snapshot still needs is *held* when it is evicted. It no longer counts, but its row
stays until the snapshot is released. An eighth of the space is for held samples. If they need more, the
snapshot is released early.
"""

import sqlite3
from typing import Annotated, Literal

from msgspec import Meta

from fleetune.edge_agent.stream.sample import UNLABELLED
from fleetune.protocols.bounds import Positive
from fleetune.protocols.settings.section import Settings

DAY_S = 86_400.0
HELD_SHARE = 1 / 8
_PAGE = 4096
_ROW = 16  # bytes of a row of `input` besides the input
_HEAD = 512  # bytes of the sample's row in `sample`, and of its index entries


class RetentionLimits(Settings, frozen=True):
    """The owner's limits on what the store keeps.

    Attributes:
        keep_mb: size of the file in 1e6 bytes: samples with all that belongs to them. SQLite's log takes a
            few MB more.
        keep_days: age in days at which samples are evicted; None to ignore age.
        keep: which samples a full store evicts.
        keep_balanced: True if a full store evicts samples of the largest class first.
        keep_unlabelled: share of the space that samples without a label may take.
    """

    keep_mb: Annotated[float, Meta(ge=1, le=1e7)] = 200.0
    keep_days: Positive | None = None
    keep: Literal["reservoir", "newest"] = "reservoir"
    keep_balanced: bool = False
    keep_unlabelled: Annotated[float, Meta(ge=0, le=1)] = 0.5

    @property
    def live_bytes(self) -> int:
        """Space for samples that count, in bytes."""
        return int(self.keep_mb * 1e6 * (1 - HELD_SHARE))

    @property
    def held_bytes(self) -> int:
        """Space for held samples, in bytes."""
        return int(self.keep_mb * 1e6 * HELD_SHARE)


def stored_bytes(num_bytes: int) -> int:
    """Return the bytes of the file that a sample takes, with its rows and the unused ends of pages.

    This follows SQLite's file format. Short rows share a page. Of a long row, a part is in a shared page, and
    the rest fills pages of its own.

    Args:
        num_bytes: bytes of the input and the label.
    """
    local, pages = num_bytes + _ROW, 0
    if local > _PAGE - 35:
        least = (_PAGE - 12) * 32 // 255 - 23
        long, local = local, least + (local - least) % (_PAGE - 4)
        local = local if local <= _PAGE - 35 else least
        pages = -(-(long - local) // (_PAGE - 4))
    beside = max(1, (_PAGE - 12) // (local + 2))
    return pages * _PAGE + _PAGE // beside + _HEAD


def evict(
    connection: sqlite3.Connection, bounds: RetentionLimits, now_s: float, change: int, pinned: int | None
) -> int | None:
    """Evict samples until the store is within its limits, in the open transaction.

    Args:
        connection: the store's connection.
        bounds: the owner's limits.
        now_s: time by the store's clock, in seconds.
        change: number of the transaction's change.
        pinned: change of the pinned snapshot; None if there is none.

    Returns:
        `pinned`; None if the snapshot had to be released.
    """
    eviction = _Eviction(connection, change, pinned)
    if bounds.keep_days is not None:
        since = now_s - bounds.keep_days * DAY_S
        while (oldest := _oldest(connection)) and oldest[2] < since:
            eviction.drop(oldest[0], oldest[1])
    unlabelled = int(bounds.keep_unlabelled * bounds.live_bytes)
    while _bytes(connection, "held = 0 AND class = ?", UNLABELLED) > unlabelled:
        eviction.drop(*_next_to_evict(connection, bounds, UNLABELLED))
    while _bytes(connection, "held = 0") > bounds.live_bytes:
        eviction.drop(
            *_next_to_evict(connection, bounds, _largest_class(connection) if bounds.keep_balanced else None)
        )
    if eviction.pinned is not None and _bytes(connection, "held = 1") > bounds.held_bytes:
        delete_held(connection)
        eviction.pinned = None
    return eviction.pinned


def delete_held(connection: sqlite3.Connection) -> None:
    """Delete the samples and earlier labels that were held for a snapshot."""
    connection.execute("DELETE FROM sample WHERE dropped IS NOT NULL")
    connection.execute("DELETE FROM label_before")


class _Eviction:
    """Evicts samples: deletes them, or marks them as held if the pinned snapshot needs them."""

    def __init__(self, connection: sqlite3.Connection, change: int, pinned: int | None) -> None:
        self._connection, self._change, self.pinned = connection, change, pinned

    def drop(self, number: int, added: int) -> None:
        if self.pinned is not None and added <= self.pinned:
            self._connection.execute("UPDATE sample SET dropped = ? WHERE number = ?", (self._change, number))
        else:
            self._connection.execute("DELETE FROM sample WHERE number = ?", (number,))


def _next_to_evict(
    connection: sqlite3.Connection, bounds: RetentionLimits, of: int | None
) -> tuple[int, int]:
    order = "rank DESC, number DESC" if bounds.keep == "reservoir" else "number"
    where, key = ("", ()) if of is None else (" AND class = ?", (of,))
    query = f"SELECT number, added FROM sample WHERE dropped IS NULL{where} ORDER BY {order} LIMIT 1"  # noqa: S608
    number, added = connection.execute(query, key).fetchone()
    return number, added


def _largest_class(connection: sqlite3.Connection) -> int:
    query = "SELECT class FROM tally WHERE held = 0 ORDER BY num_bytes DESC, class LIMIT 1"
    return int(connection.execute(query).fetchone()[0])


def _bytes(connection: sqlite3.Connection, where: str, *key: int) -> int:
    query = f"SELECT coalesce(sum(num_bytes), 0) FROM tally WHERE {where}"  # noqa: S608 - words of our own
    return int(connection.execute(query, key).fetchone()[0])


def _oldest(connection: sqlite3.Connection) -> tuple[int, int, float] | None:
    query = "SELECT number, added, arrived_s FROM sample WHERE dropped IS NULL ORDER BY number LIMIT 1"
    found: tuple[int, int, float] | None = connection.execute(query).fetchone()
    return found
