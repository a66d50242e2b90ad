"""Who watches a run: observers of one typed stream of events (`coordinator.run.run_events`).

The server and the simulator tell them; what they are told of is durable already, so none of them can harm a
round. The store is no observer: a round waits for it, and a fault of it ends the coordinator.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundClosed, RunEvent, RunLeft
from fleetune.protocols.one_line import unexpected

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Watches a run.

    It is called in the thread that runs the rounds, between two events of the run, which waits meanwhile. So
    it may draw, print, append to a file or change figures of its own; it never waits for a network or
    another thread, and what it does at an event does not grow with the run. What may take longer is done in
    a thread of the observer's own, behind a queue that is bounded and drops what does not fit. Of `Moment`
    alone the server takes care: all observers together get 5 % of its time for these.

    An observer that raises is told `RunLeft` and left out from then on, with one line in the log.
    """

    def observe(self, event: RunEvent) -> None:
        """Take an event in; those that mean nothing to it are passed over."""


class Observers:
    """Those of one run, told in turn."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def tell(self, event: RunEvent) -> None:
        """Let every observer know; one that fails harms neither the run nor the others."""
        for observer in tuple(self._observers):
            try:
                observer.observe(event)
            except Exception as fault:  # noqa: BLE001 - whatever it is, the run goes on
                self._leave_out(observer, fault)

    def _leave_out(self, observer: Observer, fault: Exception) -> None:
        self._observers = [one for one in self._observers if one is not observer]
        log.warning("%s no longer watches the run: %s", type(observer).__name__, unexpected(fault))
        log.debug("%s", type(observer).__name__, exc_info=fault)
        with suppress(Exception):
            observer.observe(RunLeft())  # so that it lets go of what it holds


@dataclass(frozen=True, eq=False)
class ClosedRounds:
    """Passes on the records of closed rounds, and nothing else."""

    hear: Callable[[RoundRecord], None]

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        if isinstance(event, RoundClosed):
            self.hear(event.record)
