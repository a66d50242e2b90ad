"""Threads that meet whenever each of them asks for something, so that one of them does it for all."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from fleetune.protocols.errors import TrainingStopped

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Barrier(Generic[_Asked, _Answer]):
    """Everybody at the barrier waits until all of them have asked, or left: what is done together is decided by
    what they do, and never by who is quicker. Only one of them moves at a time, as if there were no threads.

    Args:
        carry_out: does what was asked, by the numbers of slots, ascending; an exception is that of its slot.
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
        """All who are there, before the first of them moves."""
        with self._condition:
            self._active = set(slots)
            self._requests, self._answers = {}, {}

    @contextmanager
    def slot(self, slot: int) -> Iterator[None]:
        """Inside, in a thread of its own, it moves while no other does, and may ask; then it leaves."""
        with self._condition:
            try:
                yield
            finally:
                self._active.discard(slot)
                self._carry_out_if_complete()

    def cancel(self) -> None:
        """Nobody is waited for any more: who asks is told to stop."""
        with self._condition:
            self._active.clear()
            self._condition.notify_all()

    def request(self, slot: int, what: _Asked) -> _Answer:
        """Have something done, once all have asked. Others move meanwhile.

        Raises:
            TrainingStopped: `cancel` was called.
            Exception: that of this slot.
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
