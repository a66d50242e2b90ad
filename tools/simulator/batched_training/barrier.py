"""A barrier for threads: each waits with a request until all have one; then one thread carries out all of
them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from fleetune.protocols.errors import TrainingStopped

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Barrier(Generic[_Asked, _Answer]):
    """A barrier for threads. A request waits until every other active slot has a request, or has ended.

    So the requests that are carried out together depend only on the work, never on the speed of threads. One
    thread runs at a time, as if there were no threads.

    Args:
        carry_out: carries out the requests by slot number, ascending. An exception among its answers is
            raised in the slot to which it belongs.
    """

    def __init__(
        self, carry_out: Callable[[Mapping[int, _Asked]], Mapping[int, _Answer | Exception]]
    ) -> None:
        self._carry_out = carry_out
        self._condition = threading.Condition()
        self._active: set[int] = set()
        self._requests: dict[int, _Asked] = {}
        self._answers: dict[int, _Answer | Exception] = {}

    def begin(self, slots: Iterable[int]) -> None:
        """Set the active slots, before any of them runs."""
        with self._condition:
            self._active = set(slots)
            self._requests, self._answers = {}, {}

    @contextmanager
    def slot(self, slot: int) -> Iterator[None]:
        """Run the block as this slot, in a thread of its own, while no other slot runs. The slot ends with
        the block.
        """
        with self._condition:
            try:
                yield
            finally:
                self._active.discard(slot)
                self._carry_out_if_complete()

    def cancel(self) -> None:
        """End all waiting; every further request raises TrainingStopped."""
        with self._condition:
            self._active.clear()
            self._condition.notify_all()

    def request(self, slot: int, what: _Asked) -> _Answer:
        """Return the answer to a request once all active slots have one. Other slots run meanwhile.

        Raises:
            TrainingStopped: `cancel` was called.
            Exception: the exception of this slot's request.
        """
        self._requests[slot] = what
        self._carry_out_if_complete()
        self._condition.wait_for(lambda: slot in self._answers or slot not in self._active)
        if slot not in self._answers:
            raise TrainingStopped("the simulation is being stopped")
        answer = self._answers.pop(slot)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _carry_out_if_complete(self) -> None:
        if not self._requests or self._requests.keys() != self._active:
            return
        asked, self._requests = dict(sorted(self._requests.items())), {}
        try:
            self._answers.update(self._carry_out(asked))
        except Exception as fault:  # noqa: BLE001 - nobody may be left waiting
            self._answers.update(dict.fromkeys(asked, fault))
        self._condition.notify_all()
