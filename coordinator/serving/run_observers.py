"""Who watches a run that is served, a line each: rounds.jsonl, what is shown, the log.

A new one (an exporter of metrics) is a file with a `coordinator.run.observers.Observer`, and a line here.
Experiment trackers have a room of their own (`coordinator.trackers`).
"""

import logging
from collections.abc import Callable

from rich.console import Console

from fleetune.coordinator.extensions.downsampling import MOST_WHOLE
from fleetune.coordinator.run.observers import Observer, Observers
from fleetune.coordinator.run.round_journal import RoundJournal
from fleetune.coordinator.run.run_events import ReplyDropped, RunEvent
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.console_output import LiveScreen, LogLines

log = logging.getLogger(__name__)


class EventLog:
    """Writes what is of interest to an engineer alone to the log; what goes wrong is logged where it does."""

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        if isinstance(event, ReplyDropped):
            log.info("%s: reply does not count: %s", event.device, event.rejection)


def journal_of(run: Run) -> RoundJournal:
    """Writes rounds.jsonl of a run."""
    return RoundJournal(run.folder, run.controller.records, MOST_WHOLE if run.settings.run.is_open else None)


OBSERVERS: tuple[Callable[[Run, Console], Observer], ...] = (
    lambda run, _: journal_of(run),
    lambda run, console: LiveScreen(run, console) if console.is_terminal else LogLines(run, console),
    lambda _, __: EventLog(),
)


def observers_of(run: Run, console: Console, *more: Observer) -> Observers:
    """All who watch `run`, `more` that were asked for among them; people see it on `console`."""
    return Observers([*(make(run, console) for make in OBSERVERS), *more])
