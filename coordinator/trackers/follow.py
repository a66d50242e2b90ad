"""A run followed by trackers, each in a thread of its own behind a bounded queue: the run never waits.

What a tracker missed, because it failed or was too slow, it is told when the run has its report.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundClosed, RunBegan, RunEvent
from fleetune.coordinator.trackers.figures import Course, figures_of_run, parameters_of
from fleetune.coordinator.trackers.tracker import Make, Outcome, TrackedRun, Tracker
from fleetune.protocols.one_line import flat

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # rounds that a tracker may be behind
LAST_WORDS_S = 60.0  # so long a run that is over waits for its trackers
STOPPED_S = 15.0  # likewise one that was stopped


@dataclass(frozen=True)
class _Finished:
    """The run is over, and its report written."""

    summary: Summary
    records: Sequence[RoundRecord]
    files: Sequence[Path]


class Following:
    """Observes one run for its trackers; a context that ends when the run has its report, or was stopped.

    Args:
        makers: of trackers, by name.
        folder: of the run.
        name: of the run among others.
    """

    def __init__(self, makers: Mapping[str, Make], folder: Path, name: str) -> None:
        self._followers = [_Follower(tracker, make, folder, name) for tracker, make in makers.items()]
        self._finished = False

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        match event:
            case RunBegan():
                for one in self._followers:
                    one.begin(event)
            case RoundClosed(record) if not record.final_evaluation:
                for one in self._followers:
                    one.hear(record)

    def finish(self, summary: Summary, records: Sequence[RoundRecord], files: Sequence[Path]) -> None:
        """Training is over, and `files` are what it left."""
        self._finished = True
        for one in self._followers:
            one.finish(_Finished(summary, records, files))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._followers:
            one.end()
        for one in self._followers:
            one.wait(LAST_WORDS_S if self._finished else STOPPED_S)


class _Follower:
    """One tracker's thread."""

    def __init__(self, tracker: str, make: Make, folder: Path, name: str) -> None:
        self._told = tracker
        self._make, self._folder, self._name = make, folder, name
        self._waiting: SimpleQueue[RunBegan | RoundRecord | _Finished | None] = SimpleQueue()
        self._thread = Thread(target=self._follow, name=f"tracker-{tracker}", daemon=True)
        self._began: RunBegan | None = None
        self._tracker: Tracker | None = None
        self._course: Course | None = None
        self._missed = False

    def begin(self, began: RunBegan) -> None:
        self._began = began
        self._waiting.put(began)
        self._thread.start()

    def hear(self, record: RoundRecord) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(record)
        else:
            self._missed = True

    def finish(self, finished: _Finished) -> None:
        self._waiting.put(finished)

    def end(self) -> None:
        self._waiting.put(None)

    def wait(self, most_s: float) -> None:
        if self._began is None:
            return
        self._thread.join(most_s)
        if self._thread.is_alive():
            log.warning("%s does not have all of the run: it took more than %.0f s", self._told, most_s)

    def _follow(self) -> None:
        while (told := self._waiting.get()) is not None:
            try:
                self._take(told)
            except Exception as fault:
                at_the_end = isinstance(told, _Finished)
                then = "" if at_the_end else "; it is told the rest when the run is over"
                log.warning("%s does not follow the run: %s%s", self._told, _words(fault), then)
                log.debug("%s", self._told, exc_info=fault)
                self._close()
        self._close()

    def _take(self, told: RunBegan | RoundRecord | _Finished) -> None:
        match told:
            case RunBegan():
                self._open(told.closed)
            case RoundRecord():
                if self._tracker is not None and self._course is not None:
                    self._tracker.hear(self._course.take(told))
            case _Finished():
                if self._tracker is None or self._missed:
                    self._close()
                    self._open(told.records)
                assert self._tracker is not None
                figures = figures_of_run(told.summary, told.records)
                self._tracker.finish(Outcome(told.summary.rounds, figures, told.files))

    def _open(self, closed: Sequence[RoundRecord]) -> None:
        """A tracker for the run, which has closed these rounds."""
        assert self._began is not None
        settings = self._began.settings
        course = Course(settings)
        before = tuple(course.take(record) for record in closed if not record.final_evaluation)
        run = TrackedRun(
            self._began.run,
            self._name,
            self._folder,
            settings,
            parameters_of(settings),
            before,
            self._began.simulated,
        )
        self._tracker, self._course = self._make(run), course

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with suppress(Exception):  # it has failed before, or nobody asks any more
                tracker.close()


def _words(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {flat(fault)[:200]}"
