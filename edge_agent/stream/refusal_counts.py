"""Counts of refused samples, files and messages by kind, with one log line per kind and hour."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from fleetune.protocols.wire.messages import readable

QUIET_S = 3600.0

log = logging.getLogger(__name__)


class RefusalCounts:
    """Counts that are not saved yet, with the last message of each kind. Any thread may add one.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._unsaved: dict[str, tuple[int, str]] = {}
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def add(self, kind: str, words: str, count: int = 1) -> None:
        """Add to the count of a kind, and log the message unless this kind was logged within an hour."""
        words = readable(words)
        with self._lock:
            self._unsaved[kind] = self._unsaved.get(kind, (0, ""))[0] + count, words
            now = self._clock()
            if now - self._said_at.get(kind, float("-inf")) < QUIET_S:
                self._unsaid[kind] += count
                return
            self._said_at[kind], more = now, self._unsaid.pop(kind, 0)
        beside = f" (and {more} more of this kind in the last hour)" if more else ""
        log.warning("not taken, %s: %s%s", kind, words, beside)

    @property
    def is_empty(self) -> bool:
        """True if all counts are saved."""
        return not self._unsaved

    @property
    def unsaved(self) -> dict[str, int]:
        """Return the unsaved counts by kind."""
        with self._lock:
            return {kind: count for kind, (count, _) in self._unsaved.items()}

    def take_unsaved(self) -> dict[str, tuple[int, str]]:
        """Remove and return the unsaved counts: count and last message by kind."""
        with self._lock:
            found, self._unsaved = self._unsaved, {}
            return found

    def restore(self, found: dict[str, tuple[int, str]]) -> None:
        """Add counts again that could not be saved."""
        with self._lock:
            for kind, (count, words) in found.items():
                known, latest = self._unsaved.get(kind, (0, ""))
                self._unsaved[kind] = known + count, latest or words
