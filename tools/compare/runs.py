"""Planned runs: each is executed in its own folder, several at a time, and stored when it is finished.

The folder of a finished run has summary.json, rounds.jsonl and, written last, run.json: the settings of the
run. A run whose run.json equals the planned settings is not executed again.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import msgspec

from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import AFTER
from fleetune.coordinator.metrics.summary import Summary, read_summary
from fleetune.coordinator.reports.report import figures
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.observers import ClosedRounds
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.store.run_folder import clear
from fleetune.coordinator.trackers.follow import Following
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.errors import FleetuneError, SettingError, StoreError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.user_sources import Sources, changed
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.checkpoint.existing_run import find_existing_run
from fleetune.tools.simulator.checkpoint.snapshot import STOPPED
from fleetune.tools.simulator.energy import idle_watts
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses, tell

SETTINGS = "run.json"
RUNS_A_CORE = 4  # with a cluster, because this machine does an eighth of a run's work


@dataclass(frozen=True)
class PlannedRun:
    """A planned run: a configuration with a seed.

    Attributes:
        label: label of the configuration.
        settings: settings of the run; with samples of the caller, [data] has their digest.
        folder: folder of the run.
        runs: the folder of all runs.
        samples: the caller's samples, which replace those that [data] names.
        trackers: experiment trackers that follow the run.
        within: runs that limit the simulated time, see `Configuration.within`.
        sources: digests of the user's code that the run needs, see `user_sources`.
    """

    label: str
    settings: RunSettings
    folder: Path
    runs: Path
    samples: CallerSamples = NO_CALLER_SAMPLES
    trackers: tuple[str | Make, ...] = ()
    within: "tuple[PlannedRun, ...]" = ()
    sources: Sources = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The run's name for people."""
        return f"{self.label}, seed {self.settings.run.seed}"


@dataclass(frozen=True)
class RoundClosed:
    """Reports that a run closed a round; `score` is that of the round's participants."""

    run: PlannedRun
    number: int
    score: float | None
    final_evaluation: bool = False


OnRound = Callable[[RoundClosed], None]
OnDone = Callable[[PlannedRun, FleetuneError | None], None]


def read_finished(run: PlannedRun) -> FinishedRun | None:
    """Return the finished run in the folder; None if it is not finished, or its settings or code differ."""
    try:
        summary = _summary(run)
        if summary is None or _edited(run, summary):
            return None
        lines = (run.folder / ROUNDS).read_bytes().splitlines()
        records = [msgspec.json.decode(line, type=RoundRecord) for line in lines]
    except (OSError, msgspec.MsgspecError, StoreError):
        return None
    training = [record for record in records if not record.final_evaluation]
    if summary.ended == STOPPED and not _time_check(run)(training[-1]):
        return None  # the runs that limit its time were shorter when it ended
    idle_w = idle_watts(run.settings)
    return FinishedRun(run.label, run.settings.run.seed, with_personal(summary, records), training, idle_w)


def edited_sources(run: PlannedRun) -> str:
    """Return the files of the user's code that changed since the run finished; "" if none did."""
    with suppress(OSError, msgspec.MsgspecError, StoreError):
        summary = _summary(run)
        return "" if summary is None else _edited(run, summary)
    return ""


def _summary(run: PlannedRun) -> Summary | None:
    stored = msgspec.json.decode((run.folder / SETTINGS).read_bytes(), type=RunSettings)
    return read_summary(run.folder) if stored == run.settings else None


def _edited(run: PlannedRun, summary: Summary) -> str:
    made = summary.provenance
    return "" if made is msgspec.UNSET else changed(made.sources, run.sources)


def time_limit_s(run: PlannedRun) -> float | None:
    """Return the end of the last run that limits a run's time.

    None means that the run has no limit, or that one of the limiting runs is not finished.
    """
    runs = [read_finished(one) for one in run.within]
    ends = [one.records[-1].closed_s for one in runs if one is not None and one.records]
    return max(ends) if ends and len(ends) == len(runs) else None


def _time_check(run: PlannedRun) -> Callable[[RoundRecord], bool]:
    """Return a function that is True if a run's time is over when a round closes.

    The function reads the limit at each call, because the limiting runs may finish meanwhile.
    """
    limit_s: float | None = None

    def is_over(record: RoundRecord) -> bool:
        nonlocal limit_s
        limit_s = time_limit_s(run) if limit_s is None else limit_s
        return limit_s is not None and record.closed_s > limit_s

    return is_over


def how_to_continue(*, fresh: bool) -> str:
    """Return instructions for continuing interrupted runs."""
    return "the same command without --fresh goes on" if fresh else "the same command goes on"


def forget(run: PlannedRun, *, fresh: bool) -> None:
    """Mark a run as not finished; `fresh` also deletes its files."""
    (run.folder / SETTINGS).unlink(missing_ok=True)
    if fresh:
        clear(run.folder, durable=False)


def execute(
    run: PlannedRun, *, workers: int, on_closed: Callable[[RoundRecord], None], cluster: str | None = None
) -> None:
    """Simulate or continue a run, and store its figures, but not the state of its devices.

    Raises:
        FleetuneError: see `runner.simulate`.
    """
    from fleetune.tools.simulator.runner import simulate

    name = str(run.folder.relative_to(run.runs)) if run.folder.is_relative_to(run.runs) else run.title
    with Following(makers_of(run.trackers), run.folder, name) as following:
        simulated, summary = simulate(
            run.settings,
            run.folder,
            workers=workers,
            fresh=_is_other(run),
            observers=[ClosedRounds(on_closed), following],
            runs=run.runs,
            caller_samples=run.samples,
            cluster=cluster,
            on_round=_time_check(run),
        )
        records = simulated.controller.records()
        simulated.store.close()
        clear(run.folder, durable=False)
        files = {**figures(summary, records), SETTINGS: msgspec.json.encode(run.settings)}
        for file, data in files.items():
            write_atomically(run.folder / file, data, durable=False, mode=None)
        following.finish(summary, records, [run.folder / file for file in files])


def _is_other(run: PlannedRun) -> bool:
    """True if the unfinished run in the folder cannot be continued."""
    try:
        there = find_existing_run(run.settings, run.folder)
    except (SettingError, StoreError):  # it removes nothing that it must not remove
        return True
    return there is not None and there.finished


def execute_all(
    runs: Sequence[PlannedRun],
    *,
    workers: int,
    on_round: OnRound,
    on_done: OnDone,
    cluster: str | None = None,
) -> None:
    """Execute runs, as many at a time as there are workers; spare workers share the devices of a run.

    Args:
        runs: runs in the order of execution.
        workers: total number of processes; 0 if this process does all the work.
        on_round: called for each closed round.
        on_done: called for each finished or failed run.
        cluster: address of a Ray cluster whose nodes have the workers. The rounds of each run are driven by a
            process of this machine; each core has `RUNS_A_CORE` such processes.

    Raises:
        KeyboardInterrupt: the user interrupted the call; the workers ended in the middle of their work.
    """
    if workers < 1:
        for run in runs:
            problem = None
            try:
                execute(run, workers=0, on_closed=lambda record, run=run: on_round(_closed(run, record)))  # type: ignore[misc]
            except FleetuneError as error:
                problem = error
            on_done(run, problem)
        return
    if not runs:
        return
    at_once, share = _shared(len(runs), workers, cluster)
    with WorkerProcesses(at_once, with_script=_needs_script(runs)) as pool:

        def pass_on() -> None:
            with suppress(Empty):
                while True:
                    number, *closed = pool.news.get_nowait()
                    on_round(RoundClosed(runs[number], *closed))

        running = {
            pool.submit(_execute_in_worker, number, run, share, cluster): run
            for number, run in enumerate(runs)
        }
        while running:
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            pass_on()
            for one in done:
                on_done(running.pop(one), _problem(one))


def _needs_script(runs: Sequence[PlannedRun]) -> bool:
    """True if a tracker comes from the running script. Trackers are sent to the workers, so these need the
    script.
    """
    with suppress(Exception):  # an object that cannot be pickled is reported when it is sent
        return any(b"__main__" in pickle.dumps(run.trackers) for run in runs)
    return True


def _closed(run: PlannedRun, record: RoundRecord) -> RoundClosed:
    return RoundClosed(run, record.number, AFTER.of_round(record), record.final_evaluation)


def _problem(done: Future[None]) -> FleetuneError | None:
    """Return the error of a run if a user can fix it; raise any other error."""
    try:
        done.result()
    except FleetuneError as problem:
        return problem
    return None


def _shared(num_runs: int, workers: int, cluster: str | None) -> tuple[int, int]:
    """Return the number of parallel runs, and of workers for each; 0 workers means the run's own process."""
    drivers = workers if cluster is None else RUNS_A_CORE * (os.cpu_count() or 1)
    at_once = min(workers, num_runs, drivers)
    share = workers // at_once
    return at_once, share if share > 1 or cluster is not None else 0


def _execute_in_worker(number: int, run: PlannedRun, workers: int, cluster: str | None) -> None:
    """Execute a run in a worker process, which sends the closed rounds with the run's number."""

    def on_closed(record: RoundRecord) -> None:
        tell((number, record.number, AFTER.of_round(record), record.final_evaluation))

    execute(run, workers=workers, on_closed=on_closed, cluster=cluster)
