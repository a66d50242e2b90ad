"""What could not be taken, counted by kind: a line for the first of each, then one an hour with the count."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from fleetune.protocols.wire.messages import readable

QUIET_S = 3600.0

log = logging.getLogger(__name__)


class RefusalCounts:
    """Counts that wait to be kept, and what was said of them. Any thread may note.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._unsaved: dict[str, tuple[int, str]] = {}
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def add(self, kind: str, words: str, count: int = 1) -> None:
        """Count, and log the line unless one of its kind was logged a short while ago."""
        words = readable(words)
        with self._lock:
            self._unsaved[kind] = self._unsaved.get(kind, (0, ""))[0] + count, words
            now = self._clock()
            if now - self._said_at.get(kind, float("-inf")) < QUIET_S:
                self._unsaid[kind] += count
                return
            self._said_at[kind], more = now, self._unsaid.pop(kind, 0)
        beside = f" (and {more} of its kind in the last hour)" if more else ""
        log.warning("not taken, %s: %s%s", kind, words, beside)

    @property
    def is_empty(self) -> bool:
        """Whether no count waits to be kept."""
        return not self._unsaved

    @property
    def unsaved(self) -> dict[str, int]:
        """By kind, how many are counted and not kept yet."""
        with self._lock:
            return {kind: count for kind, (count, _) in self._unsaved.items()}

    def take_unsaved(self) -> dict[str, tuple[int, str]]:
        """The counts since the last time, and the last words, by kind."""
        with self._lock:
            found, self._unsaved = self._unsaved, {}
            return found

    def restore(self, found: dict[str, tuple[int, str]]) -> None:
        """They could not be kept."""
        with self._lock:
            for kind, (count, words) in found.items():
                known, latest = self._unsaved.get(kind, (0, ""))
                self._unsaved[kind] = known + count, latest or words
