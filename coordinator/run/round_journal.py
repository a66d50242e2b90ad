"""Writes rounds.jsonl, one line as each round closes.

The store is authoritative. The file is rewritten from it when a coordinator starts and when the run ends, so
a crash neither repeats nor loses a line. Figures that devices report after a round closed are included then.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetune.coordinator.rounds.records import RoundRecord, lines_of
from fleetune.coordinator.run.run_events import RoundClosed, RunEvent
from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically

log = logging.getLogger(__name__)

ROUNDS = "rounds.jsonl"


class RoundJournal:
    """Writes the rounds.jsonl of one run. If the disk is full, only the file suffers, not the run.

    Args:
        folder: the run's folder.
        records: returns all closed rounds in the store, ascending.
        most_lines: number of new lines after which the file is rewritten, because an open run drops old
            records; None if the run drops none.
    """

    def __init__(
        self, folder: Path, records: Callable[[], Sequence[RoundRecord]], most_lines: int | None = None
    ) -> None:
        self._path = folder / ROUNDS
        self._records = records
        self._is_whole = False
        self._newest = 0
        self._most_lines, self._added = most_lines, 0
        if records() or self._path.exists():
            self._write_anew()

    def observe(self, event: RunEvent) -> None:
        """Process an event."""
        if isinstance(event, RoundClosed):
            self._add(event.record)

    def _add(self, record: RoundRecord) -> None:
        """Append the round that has just closed; replace one that was rolled back."""
        self._added += 1
        full = self._most_lines is not None and self._added > self._most_lines
        if full or not self._is_whole or record.number <= self._newest:
            self._write_anew()
            return
        try:
            disk.DISK.append(self._path, lines_of([record]))
            self._newest = record.number
        except OSError as problem:
            self._is_whole = False
            log.warning("cannot write %s: %s; its lines follow", self._path, problem.strerror)

    def _write_anew(self) -> None:
        try:
            records = self._records()
            write_atomically(self._path, lines_of(records), durable=False)
            self._is_whole, self._newest = True, max((record.number for record in records), default=0)
            self._added = 0
        except StoreError as problem:
            log.warning("%s; the run goes on without it", problem)
