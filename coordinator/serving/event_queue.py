"""What waits to be handled: what came over the network, and timers that are due."""

import heapq
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_EVENTS = 256  # handled together


@dataclass(frozen=True)
class Stop:
    """Leave; the run goes on at the next start."""


@dataclass(frozen=True)
class TimerDue:
    """A timer is due; what stands before this in the queue may be the answer it waits for."""


class Timers:
    """Who wants to be woken next, out of thousands, without asking everybody: one time a name, on any clock.

    Moving a time costs nothing when it becomes later: what is on the heap is looked at again when its time
    comes.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._wanted: dict[str, float] = {}
        self._listed: dict[str, float] = {}  # the earliest of a name on the heap; later ones are dead

    def set(self, name: str, at: float | None) -> None:
        """Wake `name` then instead of when it wanted before; None: never."""
        if at is None:
            self._wanted.pop(name, None)
            return
        self._wanted[name] = at
        if at < self._listed.get(name, float("inf")):
            self._list(name, at)

    @property
    def next_at(self) -> float | None:
        """Nobody is due before; None: nobody ever is."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[str]:
        """Each name whose time has come, once; it sleeps until it is set again."""
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
    """Events in the order they came, and the timers of whoever waits for an answer.

    A timer that is due takes its place in the line: under load answers that are here already are read before
    anything is repeated for want of them.

    Args:
        events: the line; others put events there.
        timer: seconds that never jump.

    Attributes:
        timers: of peers, on `timer`.
        stopped: `Stop` was there.
    """

    def __init__(self, events: "queue.SimpleQueue[Any]", timer: Callable[[], float]) -> None:
        self.timers = Timers()
        self.stopped = False
        self._events = events
        self._timer = timer
        self._ringing = False

    def take(self, wait_s: float) -> list[Any]:
        """Up to `MAX_EVENTS`, none after `Stop`; waits for the first, at most `wait_s` and until a timer is
        due.
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
                self.stopped = isinstance(event, Stop)
                taken += [] if self.stopped else [event]
        return taken

    def due(self) -> Iterator[str]:
        """Whose time has come, once `TimerDue` is handled."""
        self._ringing = False
        return self.timers.due(self._timer())
