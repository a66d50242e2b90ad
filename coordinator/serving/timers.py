"""Who wants to be woken next, out of thousands, without asking everybody."""

import heapq
from collections.abc import Iterator


class Timers:
    """One time for each name, on any clock.

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
