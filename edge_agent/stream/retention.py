"""What the store keeps when it is full or samples grow old: the owner's bounds, and who has to go.

**reservoir**: those with the highest rank go first. A rank is a number in [0, 1) of the sample's own content,
so what stays is a uniform draw of all that ever came, and the same one in whatever order it came (a bottom-k
sketch). **newest**: the oldest go first. **balanced**: whoever goes is of the class that takes the most room.
Samples without a label may take a share of the room at most.

A sample that goes while a round's snapshot still needs it is *held*: it counts no longer, but its row stays
until the snapshot is let go. An eighth of the room is for that; where it does not do, the snapshot is let go.
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
_ROW = 16  # what a row of inputs has beside them
_HEAD = 512  # of the row with all else, and of its places in the indices


class RetentionLimits(Settings, frozen=True):
    """What the owner lets the store keep.

    Attributes:
        keep_mb: 1e6 bytes of the file, rows of samples with all that belongs to them; SQLite's log of a few
            MB stands beside it.
        keep_days: samples older than that go; None: age is no reason.
        keep: who goes when the room is full.
        keep_balanced: whoever goes is of the class with the most bytes.
        keep_unlabelled: share of the room that samples without a label may take.
    """

    keep_mb: Annotated[float, Meta(ge=1, le=1e7)] = 200.0
    keep_days: Positive | None = None
    keep: Literal["reservoir", "newest"] = "reservoir"
    keep_balanced: bool = False
    keep_unlabelled: Annotated[float, Meta(ge=0, le=1)] = 0.5

    @property
    def live_bytes(self) -> int:
        """Of the samples that count."""
        return int(self.keep_mb * 1e6 * (1 - HELD_SHARE))

    @property
    def held_bytes(self) -> int:
        """Of those that are only held for a snapshot."""
        return int(self.keep_mb * 1e6 * HELD_SHARE)


def stored_bytes(num_bytes: int) -> int:
    """What a sample of `num_bytes` of input and label takes of the file, rows and ends of pages too.

    By SQLite's file format: a row stands in a page with others of its kind; of a long one a part does, and
    the rest fills pages of its own.
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
    """Bring the store within its bounds, in the transaction that is open.

    Args:
        connection: to the store.
        bounds: of its owner.
        now_s: by the store's clock.
        change: number of the transaction's change.
        pinned: change of the snapshot that may still be needed; None: there is none.

    Returns:
        `pinned`; or None, where the snapshot had to be let go.
    """
    going = _Eviction(connection, change, pinned)
    if bounds.keep_days is not None:
        since = now_s - bounds.keep_days * DAY_S
        while (oldest := _oldest(connection)) and oldest[2] < since:
            going.drop(oldest[0], oldest[1])
    unlabelled = int(bounds.keep_unlabelled * bounds.live_bytes)
    while _bytes(connection, "held = 0 AND class = ?", UNLABELLED) > unlabelled:
        going.drop(*_victim(connection, bounds, UNLABELLED))
    while _bytes(connection, "held = 0") > bounds.live_bytes:
        going.drop(*_victim(connection, bounds, _largest_class(connection) if bounds.keep_balanced else None))
    if going.pinned is not None and _bytes(connection, "held = 1") > bounds.held_bytes:
        delete_held(connection)
        going.pinned = None
    return going.pinned


def delete_held(connection: sqlite3.Connection) -> None:
    """No snapshot needs them any more, nor labels as they were."""
    connection.execute("DELETE FROM sample WHERE dropped IS NOT NULL")
    connection.execute("DELETE FROM label_before")


class _Eviction:
    """Drops samples: for good, or for now where a snapshot needs them."""

    def __init__(self, connection: sqlite3.Connection, change: int, pinned: int | None) -> None:
        self._connection, self._change, self.pinned = connection, change, pinned

    def drop(self, number: int, added: int) -> None:
        if self.pinned is not None and added <= self.pinned:
            self._connection.execute("UPDATE sample SET dropped = ? WHERE number = ?", (self._change, number))
        else:
            self._connection.execute("DELETE FROM sample WHERE number = ?", (number,))


def _victim(connection: sqlite3.Connection, bounds: RetentionLimits, of: int | None) -> tuple[int, int]:
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
