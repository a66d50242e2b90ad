"""The runs of a comparison, one for each contender and seed: played several at a time, kept when finished.

Each run has its folder with summary.json, rounds.jsonl and, written last, run.json: the settings it was
played with. A folder whose run.json equals the settings asked for is not played again.
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
from fleetune.tools.compare.played import Played
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.checkpoint.existing_run import find_existing_run
from fleetune.tools.simulator.checkpoint.snapshot import STOPPED
from fleetune.tools.simulator.energy import idle_watts
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses, tell

SETTINGS = "run.json"
RUNS_A_CORE = 4  # whose devices work on a cluster: of a run, an eighth of the work is done here


@dataclass(frozen=True)
class Cell:
    """One run of the comparison: a contender with a seed, where it is kept, and where other runs are.

    Attributes:
        given: what the caller gives it instead of what [data] names; `settings` say so already.
        trackers: experiment trackers that follow it.
        sources: digests of the user's code that it needs, see `user_sources`.
        within: once these are finished, it ends with the first round that closes later than all of them did;
            (): it plays all its rounds.
    """

    label: str
    settings: RunSettings
    folder: Path
    runs: Path
    given: CallerSamples = NO_CALLER_SAMPLES
    trackers: tuple[str | Make, ...] = ()
    within: "tuple[Cell, ...]" = ()
    sources: Sources = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.settings.run.seed}"


@dataclass(frozen=True)
class RoundDone:
    """A run of the comparison closed a round, perhaps the final evaluation; the score is that of the round's
    participants.
    """

    cell: Cell
    number: int
    score: float | None
    final_evaluation: bool = False


def finished(cell: Cell) -> Played | None:
    """The run as it was kept; None if it was not finished, or was played with other settings or code."""
    try:
        summary = _kept(cell)
        if summary is None or _edited(cell, summary):
            return None
        lines = (cell.folder / ROUNDS).read_bytes().splitlines()
        records = [msgspec.json.decode(line, type=RoundRecord) for line in lines]
    except (OSError, msgspec.MsgspecError, StoreError):
        return None
    training = [record for record in records if not record.final_evaluation]
    if summary.ended == STOPPED and not _over(cell)(training[-1]):
        return None  # it was ended when what it is held against was shorter
    idle_w = idle_watts(cell.settings)
    return Played(cell.label, cell.settings.run.seed, with_personal(summary, records), training, idle_w)


def edited(cell: Cell) -> str:
    """Which files of the user's code differ from those that a finished run was played with, in words; "":
    none does, or it was not finished with these settings.
    """
    with suppress(OSError, msgspec.MsgspecError, StoreError):
        summary = _kept(cell)
        return "" if summary is None else _edited(cell, summary)
    return ""


def _kept(cell: Cell) -> Summary | None:
    """What a run of these settings came to; None: it was played with others."""
    kept = msgspec.json.decode((cell.folder / SETTINGS).read_bytes(), type=RunSettings)
    return read_summary(cell.folder) if kept == cell.settings else None


def _edited(cell: Cell, summary: Summary) -> str:
    made = summary.provenance
    return "" if made is msgspec.UNSET else changed(made.sources, cell.sources)


def ends_s(cell: Cell) -> float | None:
    """When the last round of all that it is played within closed; None: of none, or one is not finished."""
    runs = [finished(one) for one in cell.within]
    ends = [run.records[-1].closed_s for run in runs if run is not None and run.records]
    return max(ends) if ends and len(ends) == len(runs) else None


def _over(cell: Cell) -> Callable[[RoundRecord], bool]:
    """Whether the run has had its time when a round closes; what it is played within may finish meanwhile."""
    end_s: float | None = None

    def over(record: RoundRecord) -> bool:
        nonlocal end_s
        end_s = ends_s(cell) if end_s is None else end_s
        return end_s is not None and record.closed_s > end_s

    return over


def again(*, fresh: bool) -> str:
    """How to go on with runs that were interrupted."""
    return "the same command without --fresh goes on" if fresh else "the same command goes on"


def forget(cell: Cell, *, fresh: bool) -> None:
    """The run is not finished, whatever was kept of it; `fresh`: nor has it begun."""
    (cell.folder / SETTINGS).unlink(missing_ok=True)
    if fresh:
        clear(cell.folder, durable=False)


def play(
    cell: Cell, *, workers: int, on_closed: Callable[[RoundRecord], None], cluster: str | None = None
) -> None:
    """Simulate a run, or go on with it, and keep its figures; the state of its devices is not kept.

    Raises:
        FleetuneError: see `runner.simulate`.
    """
    from fleetune.tools.simulator.runner import simulate

    name = str(cell.folder.relative_to(cell.runs)) if cell.folder.is_relative_to(cell.runs) else cell.title
    with Following(makers_of(cell.trackers), cell.folder, name) as following:
        run, summary = simulate(
            cell.settings,
            cell.folder,
            workers=workers,
            fresh=_is_other(cell),
            observers=[ClosedRounds(on_closed), following],
            runs=cell.runs,
            caller_samples=cell.given,
            cluster=cluster,
            on_round=_over(cell),
        )
        records = run.controller.records()
        run.store.close()
        clear(cell.folder, durable=False)
        files = {**figures(summary, records), SETTINGS: msgspec.json.encode(cell.settings)}
        for file, data in files.items():
            write_atomically(cell.folder / file, data, durable=False, mode=None)
        following.finish(summary, records, [cell.folder / file for file in files])


def _is_other(cell: Cell) -> bool:
    """Whether what was begun in the run's folder cannot be gone on with."""
    try:
        there = find_existing_run(cell.settings, cell.folder)
    except (SettingError, StoreError):  # what it must not remove it does not
        return True
    return there is not None and there.finished


def play_all(
    cells: Sequence[Cell],
    *,
    workers: int,
    on_round: Callable[[RoundDone], None],
    on_done: Callable[[Cell, FleetuneError | None], None],
    cluster: str | None = None,
) -> None:
    """Play runs side by side, as many as there are workers; spare workers share a run's devices.

    Args:
        cells: to play, in this order.
        workers: processes in all; 0: none but this one.
        on_round: told of every closed round.
        on_done: told of every run that is finished or cannot be.
        cluster: address of a Ray cluster on whose nodes the workers are; each run's rounds are those of a
            process of this machine, of which there are `RUNS_A_CORE` a core.

    Raises:
        KeyboardInterrupt: interrupted; the workers are gone, in the middle of what they did.
    """
    if not cells:
        return
    if workers < 1:
        _play_here(cells, on_round, on_done)
        return
    crew, share = _crew(len(cells), workers, cluster)
    with WorkerProcesses(crew, with_script=_hold_of_script(cells)) as pool:

        def pass_on() -> None:
            with suppress(Empty):
                while True:
                    number, *closed = pool.news.get_nowait()
                    on_round(RoundDone(cells[number], *closed))

        running = {
            pool.submit(_perform, number, cell, share, cluster): cell for number, cell in enumerate(cells)
        }
        while running:
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            pass_on()
            for one in done:
                on_done(running.pop(one), _problem(one))


def _hold_of_script(cells: Sequence[Cell]) -> bool:
    """Whether a tracker, the one thing of a caller's that travels as it is, is of the script that runs."""
    with suppress(Exception):  # what cannot travel is told of where it is sent
        return any(b"__main__" in pickle.dumps(cell.trackers) for cell in cells)
    return True


def _play_here(
    cells: Sequence[Cell],
    on_round: Callable[[RoundDone], None],
    on_done: Callable[[Cell, FleetuneError | None], None],
) -> None:
    for cell in cells:

        def on_closed(record: RoundRecord, cell: Cell = cell) -> None:
            on_round(RoundDone(cell, *_of_round(record)))

        try:
            play(cell, workers=0, on_closed=on_closed)
        except FleetuneError as problem:
            on_done(cell, problem)
        else:
            on_done(cell, None)


def _of_round(record: RoundRecord) -> tuple[int, float | None, bool]:
    """What `RoundDone` has of it."""
    return record.number, AFTER.of_round(record), record.final_evaluation


def _problem(done: Future[None]) -> FleetuneError | None:
    """What a user can mend; anything else is raised."""
    try:
        done.result()
    except FleetuneError as problem:
        return problem
    return None


def _crew(num_runs: int, workers: int, cluster: str | None) -> tuple[int, int]:
    """How many runs are played at a time, and the workers of each; 0: none but the process that plays it."""
    if cluster is not None:
        crew = min(workers, num_runs, RUNS_A_CORE * (os.cpu_count() or 1))
        return crew, workers // crew
    crew = min(workers, num_runs)
    share = workers // crew
    return crew, share if share > 1 else 0


def _perform(number: int, cell: Cell, workers: int, cluster: str | None) -> None:
    """In a worker; what it tells of a closed round begins with the cell's number."""

    def on_closed(record: RoundRecord) -> None:
        tell((number, *_of_round(record)))

    play(cell, workers=workers, on_closed=on_closed, cluster=cluster)
