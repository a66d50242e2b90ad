"""The observers of a served run: rounds.jsonl, the console and the log.

To add an observer (such as an exporter of metrics), write a `coordinator.run.observers.Observer` in a file
and add a line here. Trackers of experiments are in `coordinator.trackers`.
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
    """Logs details for developers. Problems are logged where they occur."""

    def observe(self, event: RunEvent) -> None:
        """Handle one event."""
        if isinstance(event, ReplyDropped):
            log.info("%s: its reply does not count: %s", event.device, event.rejection)


def journal_of(run: Run) -> RoundJournal:
    """Return the observer that writes rounds.jsonl of a run."""
    return RoundJournal(run.folder, run.controller.records, MOST_WHOLE if run.settings.run.is_open else None)


OBSERVERS: tuple[Callable[[Run, Console], Observer], ...] = (
    lambda run, _: journal_of(run),
    lambda run, console: LiveScreen(run, console) if console.is_terminal else LogLines(run, console),
    lambda _, __: EventLog(),
)


def observers_of(run: Run, console: Console, *more: Observer) -> Observers:
    """Return all observers of a run, with those in `more`; output for people goes to `console`."""
    return Observers([*(make(run, console) for make in OBSERVERS), *more])
