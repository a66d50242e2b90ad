"""The queue between a transport's thread and the event loop, with a limit in bytes.

When the loop is too slow, chunks are dropped first, because their sender notices and repeats them. Other
messages have a higher limit. Presence messages have the highest, because the broker sends them only once.
"""

import queue
import threading
from typing import Any

from fleetune.protocols.wire.transport import Received

OVERHEAD_BYTES = 500  # memory of one message in addition to its text
_ROOM = {"update": 1.0, "task": 1.0, "state": 1.5}  # share of `max_bytes` by channel; see topics.py
_OTHERS_ROOM = 1.25


class Backlog(queue.SimpleQueue[Any]):
    """A `queue.SimpleQueue` with limits in bytes: chunks up to `max_bytes`, other messages up to 1.25 times
    as many.

    Presence messages are accepted up to 1.5 times `max_bytes`.

    Attributes:
        held_bytes: bytes of the waiting messages.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item without waiting; drop and count a message that exceeds its limit."""
        if isinstance(item, Received):
            room = self._max_bytes * _ROOM.get(item.topic.rpartition("/")[2], _OTHERS_ROOM)
            with self._lock:
                if self.held_bytes + _size(item) > room:
                    self._dropped += 1
                    return
                self.held_bytes += _size(item)
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the next item. Raises queue.Empty."""
        item = super().get(block, timeout)
        if isinstance(item, Received):
            with self._lock:
                self.held_bytes -= _size(item)
        return item

    def take_dropped(self) -> int:
        """Return the number of messages dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return dropped


def _size(message: Received) -> int:
    return len(message.topic) + len(message.data) + OVERHEAD_BYTES
