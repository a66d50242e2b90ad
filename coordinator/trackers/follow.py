"""Feeds a run's figures to its trackers, each in its own thread behind a bounded queue.

The run never waits for a tracker. A tracker receives plain numbers by name. Names start with `score/`,
`cost/`, `round/` or `summary/`, followed by the name in data frames and CSV files. `diagnostics/NAME` is the
mean of a method's diagnostic over a round's updates and parts. `diagnostics/NAME/PART` is the value of one
part, if there are few parts.

A tracker that failed or was too slow receives the rounds it missed once the run's report is written.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.diagnostics import values_in
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, METRICS, metrics_of_rounds
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.run_events import RoundClosed, RunBegan, RunEvent
from fleetune.coordinator.trackers.tracker import (
    Make,
    Outcome,
    Parameter,
    RoundFigures,
    TrackedRun,
    Tracker,
)
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.one_line import flat
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of

log = logging.getLogger(__name__)

MAX_PARTS = 32  # parts of a diagnostic that trackers receive one by one
MOST_WAITING = 1000  # rounds that a tracker may lag behind
LAST_WORDS_S = 60.0  # how long a finished run waits for its trackers
STOPPED_S = 15.0  # how long a stopped run waits for its trackers
_ALWAYS = ("run.seed", "run.rounds")
_OF_OTHERS = ("compare", "paper")  # sections that a run does not use


@dataclass(frozen=True)
class _Finished:
    """Message: the run is over and its report is written."""

    summary: Summary
    records: Sequence[RoundRecord]
    files: Sequence[Path]


class Following:
    """Observes one run for its trackers. As a context manager it ends when the report is written or the run
    stopped.

    Args:
        makers: functions that make the trackers, by name.
        folder: the run's folder.
        name: name that distinguishes the run from others.
    """

    def __init__(self, makers: Mapping[str, Make], folder: Path, name: str) -> None:
        self._followers = [_Follower(tracker, make, folder, name) for tracker, make in makers.items()]
        self._finished = False

    def observe(self, event: RunEvent) -> None:
        """Process an event."""
        if isinstance(event, RoundClosed) and event.record.final_evaluation:
            return
        if isinstance(event, RunBegan | RoundClosed):
            for one in self._followers:
                one.take(event if isinstance(event, RunBegan) else event.record)

    def finish(self, summary: Summary, records: Sequence[RoundRecord], files: Sequence[Path]) -> None:
        """Send the run's results to all trackers after training; `files` are the files that the run wrote."""
        self._finished = True
        for one in self._followers:
            one.take(_Finished(summary, records, files))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._followers:
            one.take(None)
        for one in self._followers:
            one.wait(LAST_WORDS_S if self._finished else STOPPED_S)


_News = RunBegan | RoundRecord | _Finished | None


class _Follower:
    """The thread of one tracker, started with the run."""

    def __init__(self, tracker: str, make: Make, folder: Path, name: str) -> None:
        self._label = tracker
        self._make, self._folder, self._name = make, folder, name
        self._waiting: SimpleQueue[_News] = SimpleQueue()
        self._thread = Thread(target=self._follow, name=f"tracker-{tracker}", daemon=True)
        self._began: RunBegan | None = None
        self._tracker: Tracker | None = None
        self._history: RoundHistory | None = None
        self._missed = False

    def take(self, news: _News) -> None:
        """Put news into the queue; drop a round if the queue is full."""
        if isinstance(news, RoundRecord) and self._waiting.qsize() >= MOST_WAITING:
            self._missed = True
            return
        self._waiting.put(news)
        if isinstance(news, RunBegan):
            self._began = news
            self._thread.start()

    def wait(self, most_s: float) -> None:
        """Wait until the tracker has processed everything, at most `most_s` seconds."""
        if self._began is None:
            return
        self._thread.join(most_s)
        if self._thread.is_alive():
            log.warning("%s does not have all of the run: it took more than %.0f s", self._label, most_s)

    def _follow(self) -> None:
        while (news := self._waiting.get()) is not None:
            try:
                self._pass_on(news)
            except Exception as fault:
                at_the_end = isinstance(news, _Finished)
                then = "" if at_the_end else "; it is told the rest when the run is over"
                line = f"{type(fault).__name__}: {flat(fault)[:200]}"
                log.warning("%s does not follow the run: %s%s", self._label, line, then)
                log.debug("%s", self._label, exc_info=fault)
                self._close()
        self._close()

    def _pass_on(self, news: RunBegan | RoundRecord | _Finished) -> None:
        match news:
            case RunBegan():
                self._open(news, news.closed)
            case RoundRecord():
                if self._tracker is not None and self._history is not None:
                    self._tracker.hear(self._history.add(news))
            case _Finished():
                if self._tracker is None or self._missed:
                    self._close()
                    assert self._began is not None
                    self._open(self._began, news.records)
                assert self._tracker is not None
                figures = figures_of_run(news.summary, news.records)
                self._tracker.finish(Outcome(news.summary.rounds, figures, news.files))

    def _open(self, began: RunBegan, closed: Sequence[RoundRecord]) -> None:
        """Make a tracker for a run that has already closed these rounds."""
        history = RoundHistory(began.settings)
        before = tuple(history.add(record) for record in closed if not record.final_evaluation)
        parameters = parameters_of(began.settings)
        run = TrackedRun(
            began.run, self._name, self._folder, began.settings, parameters, before, began.simulated
        )
        self._tracker, self._history = self._make(run), history

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with suppress(Exception):  # the tracker failed before, or the run is over
                tracker.close()


class RoundHistory:
    """Computes the figures of each round as it closes.

    `..._of_fleet` is the mean over the latest replies of all devices that have taken part; `devices_so_far`
    is the number of these devices.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._score = task_of(settings.task).score
        self._diagnostics = tuple(diagnostics_of(settings.method))
        self._fleet = {metric.name: _LatestMean() for metric in (BEFORE, AFTER)}
        self._devices: set[str] = set()

    def add(self, record: RoundRecord) -> RoundFigures:
        """Return the figures of a training round that has just closed."""
        self._devices |= record.devices.keys()
        found: dict[str, float | None] = {
            "round/participants": len(record.participants),
            "round/replies": len(record.devices),
            "round/closed_s": record.closed_s,
            "round/devices_so_far": len(self._devices),
        }
        for metric in metrics_of_rounds():
            group = "score" if metric.judges else "cost"
            found[f"{group}/{metric.column(self._score)}"] = metric.of_round(record)
        for metric in (BEFORE, AFTER):
            latest = self._fleet[metric.name]
            for device, reply in record.devices.items():
                latest.put(device, metric.of_reply(reply))
            found[f"score/{metric.column(self._score)}_of_fleet"] = latest.mean
        for diagnostic in self._diagnostics:
            found |= _diagnostic_figures(record, diagnostic)
        return RoundFigures(record.number, _known(found.items()))


class _LatestMean:
    """Running mean of each device's latest value; an update does not visit all devices."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._total = 0.0

    def put(self, device: str, value: float | None) -> None:
        if value is not None:
            self._total += value - self._values.get(device, 0.0)
            self._values[device] = value

    @property
    def mean(self) -> float | None:
        return self._total / len(self._values) if self._values else None


def _diagnostic_figures(record: RoundRecord, diagnostic: Diagnostic) -> dict[str, float | None]:
    figures = values_in(record, diagnostic)
    if not figures:
        return {}
    name = f"diagnostics/{diagnostic.name}"
    found = {name: mean(value for parts in figures for value in parts.values())}
    parts = list(dict.fromkeys(part for one in figures for part in one if part))
    if len(parts) <= MAX_PARTS:
        found |= {f"{name}/{part}": mean(one[part] for one in figures if part in one) for part in parts}
    return found


def figures_of_run(summary: Summary, records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the metrics of the whole run, by their names in data frames."""
    whole = with_personal(summary, records)
    return _known((f"summary/{one.column(whole.judged_by)}", one.of_run(whole)) for one in METRICS)


def parameters_of(settings: RunSettings) -> dict[str, Parameter]:
    """Return settings that differ from their defaults, by `section.key`; the seed is always included."""
    found: dict[str, Parameter] = {}
    for section in fields(settings):
        if section.name not in _OF_OTHERS:
            found |= _changed(section.name, getattr(settings, section.name))
    return found


def _changed(path: str, value: Any) -> Iterator[tuple[str, Parameter]]:
    """Yield settings of a section, or of a table inside it, that differ from their defaults."""
    if isinstance(value, Struct):
        defaults = {one.name: _default(one) for one in fields(value)}
        for key in value.__struct_fields__:
            own = getattr(value, key)
            if own != defaults[key] or f"{path}.{key}" in _ALWAYS:
                yield from _changed(f"{path}.{key}", own)
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _changed(f"{path}.{key}", own)
    elif isinstance(value, Parameter):
        yield path, value
    elif value is not None:
        yield path, msgspec.json.encode(value).decode()


def _default(one: Any) -> Any:
    return one.default_factory() if one.default_factory is not NODEFAULT else one.default


def _known(found: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    return {name: float(value) for name, value in found if value is not None}
