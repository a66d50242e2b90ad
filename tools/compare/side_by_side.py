"""Contenders side by side: what is not finished is played, and all is reported."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.readable import duration
from fleetune.coordinator.metrics.registry import DURATION, PERSONAL_MEAN
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.cells import Cell, RoundDone, again, edited, finished, forget, play_all
from fleetune.tools.compare.comparison import Comparison, Contender, target_of
from fleetune.tools.compare.contenders import Give, cells_of, check_methods, check_target, nothing_given
from fleetune.tools.simulator.show import progress_bar
from fleetune.tools.stop_signals import ToldInterrupt

log = logging.getLogger(__name__)

Hear = Callable[[RoundDone], None]
FEW = 3  # failures that all are told once more in the end


@dataclass(frozen=True)
class Question:
    """What is compared.

    Attributes:
        settings: of the run file.
        contenders: in the order of the tables.
        seeds: of each.
        target: score (accuracy in (0, 1)) whose cost is asked for; None: see `comparison.target_of`.
        each: what a contender is.
    """

    settings: RunSettings
    contenders: Sequence[Contender]
    seeds: Sequence[int]
    target: float | None
    each: str = "method"


@dataclass(frozen=True)
class Work:
    """How it is played.

    Attributes:
        folder: each run in it is kept in LABEL/seed-N.
        workers: processes in all; 0: none but this one.
        fresh: play finished runs again, too.
        console: to show it on.
        give: what the caller gives a run instead of what [data] names.
        hear: told of every closed round.
        trackers: experiment trackers that follow each run.
        cluster: see `cells.play_all`.
    """

    folder: Path
    workers: int
    _: KW_ONLY
    fresh: bool
    console: Console
    give: Give = nothing_given
    hear: Hear | None = None
    trackers: tuple[str | Make, ...] = ()
    cluster: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What there is to report.

    Attributes:
        comparison: of all that is finished.
        failed: a line for each run that could not be played.
        stopped: it was interrupted: pictures, which take their time, are left for later.
    """

    comparison: Comparison
    failed: Sequence[str]
    stopped: bool


Report = Callable[[Outcome], None]


def side_by_side(question: Question, work: Work, report: Report) -> Comparison:
    """Play what is not finished yet, then report it.

    Interrupted, it says so and does the same with what is finished; asked again, it goes on from there.

    Raises:
        SettingError: a method's setting or the target is wrong; nothing was played.
        FleetuneError: runs could not be played; all others are in the report.
        KeyboardInterrupt: interrupted; what is finished is in the report.
    """
    settings, contenders, console = question.settings, question.contenders, work.console
    check_target(question.target, task_of(settings.task).score)
    makers_of(work.trackers)
    cells = [
        replace(cell, trackers=work.trackers)
        for cell in cells_of(settings, contenders, question.seeds, work.folder, work.give)
    ]
    missing = [cell for cell in cells if work.fresh or not finished(cell)]
    _say_edited(missing, len(cells), work)
    if missing:
        check_methods(missing)
    for cell in missing:
        forget(cell, fresh=work.fresh)
    if len(missing) < len(cells):
        done = f"{len(cells) - len(missing)} of {len(cells)}"
        console.print(f"{done} runs are finished already, in {work.folder}")
    watch = _Watch(console, cells, missing, work.hear)
    stopped = _play(missing, work, watch)
    comparison = _comparison(question, cells)
    runs = comparison.runs
    if stopped:
        where, how = watch.under_way(), again(fresh=work.fresh)
        console.print(f"stopped{where} with {len(runs)} of {len(cells)} runs finished; {how}")
    try:
        if runs:
            report(Outcome(comparison, watch.failed, stopped))
    except KeyboardInterrupt:
        if not stopped:
            console.print(f"stopped in the report; all runs are finished, and {again(fresh=work.fresh)}")
        raise ToldInterrupt from None
    if stopped:
        raise ToldInterrupt
    if watch.failed:
        raise FleetuneError(_not_played(watch.failed, len(cells)))
    return comparison


def _say_edited(missing: Sequence[Cell], num_runs: int, work: Work) -> None:
    """Say which finished runs are played again because the user's code was edited."""
    edits = [words for cell in missing if not work.fresh and (words := edited(cell))]
    if not edits:
        return
    line = f"{len(edits)} of {num_runs} finished runs are played again: {', '.join(dict.fromkeys(edits))}"
    if work.console.quiet:
        log.warning("%s", line)
    else:
        work.console.print(line, soft_wrap=True)


def comparison_of(question: Question, work: Work) -> Comparison:
    """Of the runs that are finished; nothing is played."""
    return _comparison(
        question, cells_of(question.settings, question.contenders, question.seeds, work.folder, work.give)
    )


def _comparison(question: Question, cells: Sequence[Cell]) -> Comparison:
    runs = tuple(run for cell in cells if (run := finished(cell)))
    target = target_of(runs, question.target, question.each)
    name, seeds = question.settings.run.name, tuple(question.seeds)
    return Comparison(name, tuple(question.contenders), seeds, runs, target, question.each)


def _not_played(failed: Sequence[str], num_runs: int) -> str:
    """Why, of each; of many, of the first: each was told when it failed."""
    if len(failed) <= FEW:
        return "; ".join(failed)
    return f"{len(failed)} of {num_runs} runs could not be played; the first: {failed[0]}"


def _play(missing: Sequence[Cell], work: Work, watch: "_Watch") -> bool:
    """Whether it was interrupted."""
    try:
        with watch.bar:
            play_all(
                missing,
                workers=work.workers,
                on_round=watch.round_done,
                on_done=watch.run_done,
                cluster=work.cluster,
            )
    except KeyboardInterrupt:
        return True
    return False


class _Watch:
    """One bar over the rounds of all runs, and a line for each run that is over."""

    def __init__(
        self, console: Console, cells: Sequence[Cell], missing: Sequence[Cell], hear: Hear | None
    ) -> None:
        self._console = console
        self._hear = hear
        self._rounds = {cell.title: 0 for cell in missing}
        self._ended: set[str] = set()
        self._over = len(cells) - len(missing)
        self._num_runs = len(cells)
        self.failed: list[str] = []
        self.bar: Progress = progress_bar(console)
        rounds = [cell.settings.run.last_round for cell in missing]
        total = None if None in rounds else sum(filter(None, rounds))
        self._task: TaskID = self.bar.add_task(self._title(), total=total, score="", visible=bool(missing))

    def round_done(self, news: RoundDone) -> None:
        if self._hear is not None:
            self._hear(news)
        title, most = news.cell.title, news.cell.settings.run.last_round
        self._rounds[title] = max(self._rounds[title], min(news.number, most or news.number))
        told = unit_of(task_of(news.cell.settings.task).score).text(news.score)
        self._update(f"{title} {told}")

    def run_done(self, cell: Cell, problem: FleetuneError | None) -> None:
        self._rounds[cell.title] = cell.settings.run.last_round or self._rounds[cell.title]
        self._over += 1
        self._ended.add(cell.title)
        if problem:
            self.failed.append(f"{cell.title}: {problem}")
            self._console.print(f"[red]{cell.title}: {problem}[/red]")
        elif run := finished(cell):
            score, time_s = PERSONAL_MEAN.of_run(run.summary), DURATION.of_run(run.summary)
            rounds, told = run.summary.rounds, unit_of(run.summary.judged_by).text(score)
            self._console.print(f"{cell.title}: {told} after {rounds} rounds, {duration(time_s)} simulated")
        self._update("")

    def under_way(self) -> str:
        """Which runs are, in words."""
        begun = {title: number for title, number in self._rounds.items() if title not in self._ended}
        rounds = ", ".join(f"{title}, round {number + 1}" for title, number in begun.items() if number)
        return f" in {rounds}" if rounds else ""

    def _title(self) -> str:
        return f"{self._over} of {self._num_runs} runs"

    def _update(self, score: str) -> None:
        self.bar.update(
            self._task,
            description=self._title(),
            completed=sum(self._rounds.values()),
            score=score,
        )
