"""What edge-sim shows: a bar with the time left while it runs, then tables, files and pictures."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.diagnostics import diagnostics_line
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import AFTER
from fleetune.coordinator.metrics.summary import SUMMARY, Summary, read_summary
from fleetune.coordinator.reports.tables import device_table, diagnostics_table, run_table
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.run_events import Notice, RoundClosed, RunBegan, RunEvent
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.run_folder import SHARED
from fleetune.coordinator.trackers.follow import Following
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun, find_existing_run
from fleetune.tools.simulator.runner import simulate, write_results
from fleetune.tools.simulator.simulated_fleet import device_specs
from fleetune.tools.stop_signals import ToldInterrupt

PLAIN_WIDTH = 100  # of a file or pipe
PLAINLY: Any = {"highlight": False, "markup": False, "soft_wrap": True}  # a line for people, as it is
console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def show_run(
    settings: RunSettings,
    folder: Path,
    *,
    workers: int,
    fresh: bool,
    follow: bool = False,
    trackers: Sequence[str | Make] = (),
    cluster: str | None = None,
) -> Summary:
    """Simulate a run with a progress bar, leave its report in `folder`; its summary.

    One that was stopped goes on; one that is finished there is shown.

    Args:
        settings: of the run.
        folder: of the run.
        workers: see `simulate`.
        fresh: see `simulate`.
        follow: a line a round, for a log or a pipe, instead of the bar.
        trackers: experiment trackers that follow the run.
        cluster: see `simulate`.

    Raises:
        FleetuneError: see `simulate`.
        KeyboardInterrupt: interrupted; where and what to do is said, unless it had not begun yet.
    """
    makers = makers_of(trackers)
    there = None if fresh else find_existing_run(settings, folder)
    if there is not None and there.finished:
        return _show_finished(there, folder, makers)
    with Following(makers, folder, folder.name) as following:
        return _play(
            settings, folder, following, workers=workers, fresh=fresh, follow=follow, cluster=cluster
        )


def _play(
    settings: RunSettings,
    folder: Path,
    following: Following,
    *,
    workers: int,
    fresh: bool,
    follow: bool,
    cluster: str | None,
) -> Summary:
    method = settings.method["name"]
    diagnostics = diagnostics_of(settings.method)
    bar = progress_bar(console, shown=not follow)
    task = bar.add_task(method, total=settings.run.last_round, score="")
    watching = RoundBar(bar, task, method, diagnostics, task_of(settings.task).score)
    lines = [RoundLines(console, settings.run.last_round, watching.score)] if follow else []
    try:
        with bar:
            run, summary = simulate(
                settings,
                folder,
                workers=workers,
                fresh=fresh,
                observers=[watching, *lines, following],
                cluster=cluster,
            )
            bar.inside = ""
    except KeyboardInterrupt:
        if watching.under_way is None:
            raise
        again = "goes on there" if watching.closed else "begins anew"
        so_far = f"; edge-coordinator report {folder} shows what came before" if watching.closed else ""
        console.print(f"stopped in {watching.under_way}: the same command {again}{so_far}", **PLAINLY)
        raise ToldInterrupt from None
    records = run.controller.records()
    try:
        files = write_results(run, summary)
    except KeyboardInterrupt:
        line = f"stopped in its report; all rounds are kept, and edge-coordinator report {folder} writes it"
        console.print(line, **PLAINLY)
        raise ToldInterrupt from None
    following.finish(summary, records, files)
    _show(run.settings, summary, records)
    _list(files)
    return summary


def _show_finished(there: ExistingRun, folder: Path, makers: Mapping[str, Make]) -> Summary:
    """A run that was played before; trackers are told what they do not have of it."""
    summary = read_summary(folder)
    with stored_run(folder) as kept:
        records = kept.store.records()
    files = [folder / name for name in (SUMMARY, ROUNDS, "report.html", SHARED) if (folder / name).exists()]
    with Following(makers, folder, folder.name) as following:
        following.observe(RunBegan(there.enrolment.run, there.settings, records, simulated=True))
        following.finish(summary, records, files)
    _show(there.settings, summary, records)
    console.print(f"{folder} was finished before; --fresh plays it again", **PLAINLY)
    _list(files)
    return summary


def _show(settings: RunSettings, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """What a run came to, as tables."""
    boards = {device.name: device.board.name for device in device_specs(settings)}
    shown = with_personal(summary, records)
    console.print(run_table(shown))
    console.print(device_table(shown, boards=boards, limit=10))
    if inside := diagnostics_table(shown):
        console.print(inside)


class RoundsProgress(Progress):
    """Bars over rounds, and under them a line: what the method told of its inner workings last."""

    inside = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.inside:
            line = f"diagnostics: {readable.printable(self.inside)}"
            yield Text(line, "dim", overflow="ellipsis", no_wrap=True)


@dataclass(eq=False)
class RoundBar:
    """Observes a run as a task of a progress bar, and prints lines for people above it.

    Attributes:
        under_way: the round that is played, in words; None: the run has not begun.
        closed: whether a round has ended.
    """

    bar: RoundsProgress
    task: TaskID
    method: str
    diagnostics: Sequence[Diagnostic] = ()
    score: Score = ACCURACY
    under_way: str | None = None
    closed: bool = False

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        match event:
            case Notice(line):
                self.bar.console.print(line, **PLAINLY)
            case RunBegan():
                self.under_way = "round 1"
                for record in event.closed:
                    self.observe(RoundClosed(record))
            case RoundClosed(record) if record.final_evaluation:
                self.bar.update(self.task, description=f"{self.method}, final evaluation")
            case RoundClosed(record):
                self.closed = True
                after = AFTER.for_score(self.score)
                told = f"{self.score.title} {after.unit.text(after.of_round(record))}"
                self.bar.inside = diagnostics_line(record, self.diagnostics)
                self.bar.update(self.task, completed=record.number, score=told)
                self.under_way = f"round {record.number + 1}"
                if record.number == self.bar.tasks[self.task].total:
                    self.under_way = "the final evaluation"


@dataclass(eq=False)
class RoundLines:
    """Observes a run and prints a line a round, at once.

    Attributes:
        console: to print on.
        last_round: of the run; None: it has no end.
        score: of the run's task.
    """

    console: Console
    last_round: int | None
    score: Score
    _began: float = field(default_factory=time.monotonic)
    _closed: int = 0

    def observe(self, event: RunEvent) -> None:
        """Take an event in."""
        if isinstance(event, RoundClosed):
            self._closed += 1
            line = self._of_evaluation if event.record.final_evaluation else self._of_round
            self.console.print(line(event.record), **PLAINLY)
            self.console.file.flush()

    def _of_round(self, record: RoundRecord) -> str:
        after = AFTER.for_score(self.score)
        told = f"{self.score.title} {after.unit.text(after.of_round(record))}"
        up = readable.size(sum(device.bytes_up for device in record.devices.values()))
        took = readable.duration(record.closed_s - record.opened_s)
        number, left = f"round {record.number}", ""
        if self.last_round is not None:
            a_round = (time.monotonic() - self._began) / self._closed
            left = f", {readable.duration(a_round * (self.last_round - record.number))} left here"
            number += f" of {self.last_round}"
        return f"{number}: {told} of {len(record.devices)} devices, {up} up in {took}{left}"

    def _of_evaluation(self, record: RoundRecord) -> str:
        return f"final evaluation: {len(record.devices)} devices"


def progress_bar(console: Console, *, shown: bool = True) -> RoundsProgress:
    """A bar over rounds, with the time left; its tasks have a field `score`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return RoundsProgress(*columns, console=console, speed_estimate_period=600, disable=not shown)


def _list(files: list[Path]) -> None:
    for file in files:
        if file.suffix in (".html", ".json", ".safetensors"):
            console.print(f"  {file}")
