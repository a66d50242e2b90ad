"""Observers of a run: they receive one typed stream of events (`coordinator.run.run_events`).

The server and the simulator send each event after it is durable, so no observer can harm a round. The store
is no observer: a round waits for it, and its failure ends the coordinator.
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

    `observe` is called in the thread that runs the rounds, which waits meanwhile. So it may draw, print,
    append to a file or change its own figures. It must not wait for a network or another thread, and its cost
    must not grow with the run. Slower work belongs in a thread of the observer's own, behind a bounded queue
    that drops what does not fit. The server limits only `Moment`: all observers together get 5 % of its time
    for it.

    An observer that raises receives `RunLeft` and no further event; the log gets one line.
    """

    def observe(self, event: RunEvent) -> None:
        """Process an event; ignore those that do not concern this observer."""


class Observers:
    """The observers of one run, called in order."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def tell(self, event: RunEvent) -> None:
        """Send the event to every observer; one that fails harms neither the run nor the others."""
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
            observer.observe(RunLeft())  # so that it releases its resources


@dataclass(frozen=True, eq=False)
class ClosedRounds:
    """Passes on the records of closed rounds, and nothing else."""

    hear: Callable[[RoundRecord], None]

    def observe(self, event: RunEvent) -> None:
        """Process an event."""
        if isinstance(event, RoundClosed):
            self.hear(event.record)
