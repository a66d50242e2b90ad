"""Threads that meet whenever each of them asks for something, so that one of them does it for all."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from fleetune.protocols.errors import TrainingStopped

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Barrier(Generic[_Asked, _Answer]):
    """Everybody at the table waits until all of them have asked, or left: what is done together is decided by
    what they do, and never by who is quicker. Only one of them moves at a time, as if there were no threads.

    Args:
        carry_out: does what was asked, by the numbers of seats, ascending; an exception is that of its seat.
    """

    def __init__(
        self, carry_out: Callable[[Mapping[int, _Asked]], Mapping[int, _Answer | Exception]]
    ) -> None:
        self._carry_out = carry_out
        self._moves = threading.Condition()
        self._there: set[int] = set()
        self._asked: dict[int, _Asked] = {}
        self._answers: dict[int, _Answer | Exception] = {}

    def sit_down(self, seats: Iterable[int]) -> None:
        """All who are there, before the first of them moves."""
        with self._moves:
            self._there = set(seats)
            self._asked, self._answers = {}, {}

    @contextmanager
    def at(self, seat: int) -> Iterator[None]:
        """Inside, in a thread of its own, it moves while no other does, and may ask; then it leaves."""
        with self._moves:
            try:
                yield
            finally:
                self._there.discard(seat)
                self._look()

    def break_up(self) -> None:
        """Nobody is waited for any more: who asks is told to stop."""
        with self._moves:
            self._there.clear()
            self._moves.notify_all()

    def ask(self, seat: int, what: _Asked) -> _Answer:
        """Have something done, once all have asked. Others move meanwhile.

        Raises:
            TrainingStopped: `break_up` was called.
            Exception: that of this seat.
        """
        self._asked[seat] = what
        self._look()
        self._moves.wait_for(lambda: seat in self._answers or seat not in self._there)
        if seat not in self._answers:
            raise TrainingStopped("the simulation is being stopped")
        answer = self._answers.pop(seat)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _look(self) -> None:
        if not self._asked or self._asked.keys() != self._there:
            return
        asked, self._asked = dict(sorted(self._asked.items())), {}
        try:
            self._answers.update(self._carry_out(asked))
        except Exception as fault:  # noqa: BLE001 - nobody may be left waiting
            self._answers.update(dict.fromkeys(asked, fault))
        self._moves.notify_all()
