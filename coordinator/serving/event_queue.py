"""The queue of events from the network, and the timers of device sessions."""

import heapq
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_EVENTS = 256  # the most events in one transaction


@dataclass(frozen=True)
class Stop:
    """Event: stop serving. The run continues at the next start."""


@dataclass(frozen=True)
class Reopen(Stop):
    """Event: stop serving for a moment, because the stored run is to be changed."""


@dataclass(frozen=True)
class TimerDue:
    """Event: a timer is due. Answers that the timer waits for may stand before this event in the queue."""


class Timers:
    """Finds the next due timer among thousands. Each name has one timer.

    Moving a timer to a later time costs nothing: its heap entry is corrected when it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._wanted: dict[str, float] = {}
        self._listed: dict[str, float] = {}  # the earliest heap entry of each name; later entries are ignored

    def set(self, name: str, at: float | None) -> None:
        """Set the timer of `name`, and replace an earlier one; None removes the timer."""
        if at is None:
            self._wanted.pop(name, None)
            return
        self._wanted[name] = at
        if at < self._listed.get(name, float("inf")):
            self._list(name, at)

    @property
    def next_at(self) -> float | None:
        """Return a time before which no timer is due; None if there is no timer."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[str]:
        """Yield each name whose timer is due at `now`, and remove the timer."""
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._listed.get(name) != at:
                continue
            del self._listed[name]
            wanted = self._wanted.get(name)
            if wanted is not None and wanted > now:
                self._list(name, wanted)
            elif wanted is not None:
                del self._wanted[name]
                yield name

    def _list(self, name: str, at: float) -> None:
        heapq.heappush(self._heap, (at, name))
        self._listed[name] = at


class EventQueue:
    """Events in the order of arrival, and the timers of sessions that wait for an answer.

    A due timer is put at the end of the queue. So under load, answers that have already arrived are read
    before a message is repeated because its answer seems to be missing.

    Args:
        events: the queue into which transport and other threads put events.
        timer: a monotonic clock, in seconds.

    Attributes:
        timers: one timer for each device session.
        stopped: True once `Stop` was taken from the queue.
        reopens: True if that was `Reopen`.
    """

    def __init__(self, events: "queue.SimpleQueue[Any]", timer: Callable[[], float]) -> None:
        self.timers = Timers()
        self.stopped = self.reopens = False
        self._events = events
        self._timer = timer
        self._ringing = False

    def take(self, wait_s: float) -> list[Any]:
        """Return up to `MAX_EVENTS` events, none after `Stop`.

        This call waits for the first event, for at most `wait_s` seconds or until a timer is due.
        """
        next_at = self.timers.next_at
        if next_at is not None and not self._ringing:
            wait_s = min(wait_s, next_at - self._timer())
            if next_at <= self._timer():
                self._ringing = True
                self._events.put(TimerDue())
        taken: list[Any] = []
        with suppress(queue.Empty):
            while len(taken) < MAX_EVENTS and not self.stopped:
                event = self._events.get(timeout=0 if taken else max(0.0, wait_s))
                self.stopped, self.reopens = isinstance(event, Stop), isinstance(event, Reopen)
                taken += [] if self.stopped else [event]
        return taken

    def due(self) -> Iterator[str]:
        """Yield the names whose timers are due; called when `TimerDue` is handled."""
        self._ringing = False
        return self.timers.due(self._timer())
