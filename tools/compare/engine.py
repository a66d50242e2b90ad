"""The engine of all comparisons: executes an experiment's missing runs, then reports all finished runs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from rich.console import Console

from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.readable import duration
from fleetune.coordinator.metrics.registry import DURATION, PERSONAL_MEAN
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.comparison import Comparison, Configuration, target_of
from fleetune.tools.compare.configurations import (
    SamplesOf,
    check_methods,
    check_target,
    no_samples,
    planned_runs,
)
from fleetune.tools.compare.runs import (
    OnRound,
    PlannedRun,
    RoundClosed,
    edited_sources,
    execute_all,
    forget,
    how_to_continue,
    read_finished,
)
from fleetune.tools.simulator.progress_view import progress_bar
from fleetune.tools.stop_signals import ReportedInterrupt

log = logging.getLogger(__name__)

FEW = 3  # number of failures that the final error repeats in full


@dataclass(frozen=True)
class Execution:
    """Options for executing an experiment.

    Attributes:
        folder: folder of the experiment; each run is stored in LABEL/seed-N.
        workers: total number of processes; 0 if this process does all the work.
        fresh: True executes finished runs again.
        console: console for progress and tables.
        samples_of: function that returns the caller's samples for a run.
        on_round: called for each closed round.
        trackers: experiment trackers that follow each run.
        cluster: see `runs.execute_all`.
    """

    folder: Path
    workers: int
    _: KW_ONLY
    fresh: bool
    console: Console
    samples_of: SamplesOf = no_samples
    on_round: OnRound | None = None
    trackers: tuple[str | Make, ...] = ()
    cluster: str | None = None


@dataclass(frozen=True)
class Experiment:
    """Configurations, each with several seeds.

    Attributes:
        settings: settings of the run file.
        configurations: configurations in the order of the tables.
        seeds: seeds of each configuration.
        target: score (accuracy in (0, 1)) for which costs are reported; None: see `comparison.target_of`.
        keys: settings in which the configurations of a sweep differ.
    """

    settings: RunSettings
    configurations: Sequence[Configuration]
    seeds: Sequence[int]
    target: float | None = None
    keys: tuple[str, ...] = ()

    def planned(self, execution: Execution) -> list[PlannedRun]:
        """Return all runs, finished or not."""
        runs = planned_runs(
            self.settings, self.configurations, self.seeds, execution.folder, execution.samples_of
        )
        return [replace(run, trackers=execution.trackers) for run in runs]

    def results(self, runs: Sequence[PlannedRun]) -> Comparison:
        """Return the results of those runs that are finished."""
        finished = tuple(found for run in runs if (found := read_finished(run)))
        return Comparison(
            self.settings.run.name,
            tuple(self.configurations),
            tuple(self.seeds),
            finished,
            target_of(finished, self.target, "combination" if self.keys else "method"),
            self.keys,
        )


@dataclass(frozen=True)
class Outcome:
    """The content of a report.

    Attributes:
        comparison: results of all finished runs.
        failed: one line for each failed run.
        stopped: True if the user interrupted the experiment; pictures are then left out, because they take
            time.
    """

    comparison: Comparison
    failed: Sequence[str]
    stopped: bool


Report = Callable[[Outcome], None]


def run_experiment(experiment: Experiment, execution: Execution, report: Report) -> Comparison:
    """Execute the runs that are not finished yet, then report all finished runs.

    After an interruption, the report covers the finished runs; the next call continues with the others.

    Raises:
        SettingError: a method's setting or the target is wrong; nothing was executed.
        FleetuneError: some runs failed; all others are in the report.
        KeyboardInterrupt: the user interrupted the experiment; all finished runs are in the report.
    """
    console = execution.console
    check_target(experiment.target, task_of(experiment.settings.task).score)
    makers_of(execution.trackers)
    runs = experiment.planned(execution)
    missing = [run for run in runs if execution.fresh or not read_finished(run)]
    _report_edited(missing, len(runs), execution)
    check_methods(missing)
    for run in missing:
        forget(run, fresh=execution.fresh)
    if len(missing) < len(runs):
        done = f"{len(runs) - len(missing)} of {len(runs)}"
        console.print(f"{done} runs are finished already, in {execution.folder}")
    progress = _Progress(console, len(runs), missing, execution.on_round)
    stopped = _execute(missing, execution, progress)
    comparison = experiment.results(runs)
    finished, how = len(comparison.runs), how_to_continue(fresh=execution.fresh)
    if stopped:
        console.print(f"stopped{progress.in_progress} with {finished} of {len(runs)} runs finished; {how}")
    try:
        if finished:
            report(Outcome(comparison, progress.failed, stopped))
    except KeyboardInterrupt:
        if not stopped:
            console.print(f"stopped in the report; all runs are finished, and {how}")
        raise ReportedInterrupt from None
    if stopped:
        raise ReportedInterrupt
    if progress.failed:
        raise FleetuneError(_failure(progress.failed, len(runs)))
    return comparison


def _report_edited(missing: Sequence[PlannedRun], num_runs: int, execution: Execution) -> None:
    """Log which finished runs are executed again because the user's code was edited."""
    edits = [files for run in missing if not execution.fresh and (files := edited_sources(run))]
    if not edits:
        return
    line = f"{len(edits)} of {num_runs} finished runs are run again: {', '.join(dict.fromkeys(edits))}"
    if execution.console.quiet:
        log.warning("%s", line)
    else:
        execution.console.print(line, soft_wrap=True)


def _failure(failed: Sequence[str], num_runs: int) -> str:
    if len(failed) <= FEW:
        return "; ".join(failed)
    return f"{len(failed)} of {num_runs} runs failed; the first: {failed[0]}"


def _execute(missing: Sequence[PlannedRun], execution: Execution, progress: "_Progress") -> bool:
    """Execute the missing runs; True if the user interrupted them."""
    try:
        with progress.bar:
            execute_all(
                missing,
                workers=execution.workers,
                on_round=progress.on_round,
                on_done=progress.on_done,
                cluster=execution.cluster,
            )
    except KeyboardInterrupt:
        return True
    return False


class _Progress:
    """A progress bar over the rounds of all runs, and a line for each run that ends."""

    def __init__(
        self, console: Console, num_runs: int, missing: Sequence[PlannedRun], on_round: OnRound | None
    ) -> None:
        self._console = console
        self._on_round = on_round
        self._rounds = {run.title: 0 for run in missing}
        self._ended: set[str] = set()
        self._done, self._num_runs = num_runs - len(missing), num_runs
        self.failed: list[str] = []
        self.bar = progress_bar(console)
        rounds = [run.settings.run.last_round for run in missing]
        total = None if None in rounds else sum(filter(None, rounds))
        self._task = self.bar.add_task(self._title, total=total, score="", visible=bool(missing))

    def on_round(self, closed: RoundClosed) -> None:
        """Show a closed round."""
        if self._on_round is not None:
            self._on_round(closed)
        title, last = closed.run.title, closed.run.settings.run.last_round
        self._rounds[title] = max(self._rounds[title], min(closed.number, last or closed.number))
        score = unit_of(task_of(closed.run.settings.task).score).text(closed.score)
        self._update(f"{title} {score}")

    def on_done(self, run: PlannedRun, problem: FleetuneError | None) -> None:
        """Show that a run has ended."""
        self._rounds[run.title] = run.settings.run.last_round or self._rounds[run.title]
        self._done += 1
        self._ended.add(run.title)
        if problem:
            self.failed.append(f"{run.title}: {problem}")
            self._console.print(f"[red]{run.title}: {problem}[/red]")
        elif found := read_finished(run):
            summary = found.summary
            score = unit_of(summary.judged_by).text(PERSONAL_MEAN.of_run(summary))
            time = duration(DURATION.of_run(summary))
            self._console.print(f"{run.title}: {score} after {summary.rounds} rounds, {time} simulated")
        self._update("")

    @property
    def in_progress(self) -> str:
        """Return the runs in progress, in words."""
        begun = {title: number for title, number in self._rounds.items() if title not in self._ended}
        rounds = ", ".join(f"{title}, round {number + 1}" for title, number in begun.items() if number)
        return f" in {rounds}" if rounds else ""

    @property
    def _title(self) -> str:
        return f"{self._done} of {self._num_runs} runs"

    def _update(self, score: str) -> None:
        self.bar.update(
            self._task, description=self._title, completed=sum(self._rounds.values()), score=score
        )
