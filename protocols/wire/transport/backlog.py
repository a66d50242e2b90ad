"""The line between a transport's thread and the loop: bounded in bytes, whatever comes in.

When the loop is behind, chunks are let go first: their sender notices and sends them again. What else a peer
says has more room, and that it is there or gone the most: the broker tells that only once.
"""

import queue
import threading
from typing import Any

from fleetune.protocols.wire.transport import Received

OVERHEAD_BYTES = 500  # of one message, beside its text
_ROOM = {"update": 1.0, "task": 1.0, "state": 1.5}  # of which channel; see topics.py
_OTHERS_ROOM = 1.25


class Backlog(queue.SimpleQueue[Any]):
    """A `queue.SimpleQueue` in which messages take at most 1.5 `max_bytes`; chunks have 1.0, others 1.25.

    Attributes:
        held_bytes: of the messages that wait.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Never waits; a message for which there is no room is dropped and counted."""
        if isinstance(item, Received):
            room = self._max_bytes * _ROOM.get(item.topic.rpartition("/")[2], _OTHERS_ROOM)
            with self._lock:
                if self.held_bytes + _size(item) > room:
                    self._dropped += 1
                    return
                self.held_bytes += _size(item)
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Raises queue.Empty."""
        item = super().get(block, timeout)
        if isinstance(item, Received):
            with self._lock:
                self.held_bytes -= _size(item)
        return item

    def take_dropped(self) -> int:
        """How many messages were dropped since this was asked last."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return dropped


def _size(message: Received) -> int:
    return len(message.topic) + len(message.data) + OVERHEAD_BYTES
