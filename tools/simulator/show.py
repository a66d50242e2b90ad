"""The terminal output of edge-sim: a progress bar during the run, then tables, files and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.summary import SUMMARY, Summary, read_summary
from fleetune.coordinator.reports.tables import device_table, run_table
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.run_events import RunBegan
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.run_folder import SHARED
from fleetune.coordinator.trackers.follow import Following
from fleetune.coordinator.trackers.tracker import Make, makers_of
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun, find_existing_run
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.progress_view import PLAINLY, RoundBar, RoundLines, console, progress_bar
from fleetune.tools.simulator.runner import simulate, write_results
from fleetune.tools.stop_signals import ReportedInterrupt


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
    """Simulate a run with a progress bar, write its report to `folder`, and return its summary.

    An interrupted run continues; a finished run is shown.

    Args:
        settings: settings of the run.
        folder: folder of the run.
        workers: see `simulate`.
        fresh: see `simulate`.
        follow: True prints a line for each round instead of the bar, for a log or a pipe.
        trackers: experiment trackers that follow the run.
        cluster: see `simulate`.

    Raises:
        FleetuneError: see `simulate`.
        KeyboardInterrupt: interrupted; if the run had begun, a line says how to continue.
    """
    makers = makers_of(trackers)
    there = None if fresh else find_existing_run(settings, folder)
    if there is not None and there.finished:
        return _show_finished(there, folder, makers)
    with Following(makers, folder, folder.name) as following:
        return _simulate(
            settings, folder, following, workers=workers, fresh=fresh, follow=follow, cluster=cluster
        )


def _simulate(
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
    lines = [RoundLines(console, settings)] if follow else []
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
        if watching.current is None:
            raise
        again = "goes on there" if watching.closed else "begins anew"
        so_far = f"; edge-coordinator report {folder} shows what came before" if watching.closed else ""
        console.print(f"stopped in {watching.current}: the same command {again}{so_far}", **PLAINLY)
        raise ReportedInterrupt from None
    records = run.controller.records()
    try:
        files = write_results(run, summary)
    except KeyboardInterrupt:
        line = f"stopped in its report; all rounds are kept, and edge-coordinator report {folder} writes it"
        console.print(line, **PLAINLY)
        raise ReportedInterrupt from None
    following.finish(summary, records, files)
    _show(run.settings, summary, records)
    _list(files)
    return summary


def _show_finished(there: ExistingRun, folder: Path, makers: Mapping[str, Make]) -> Summary:
    """Show a finished run, and send its missing rounds to the trackers."""
    summary = read_summary(folder)
    with stored_run(folder) as stored:
        records = stored.store.records()
    files = [folder / name for name in (SUMMARY, ROUNDS, "report.html", SHARED) if (folder / name).exists()]
    with Following(makers, folder, folder.name) as following:
        following.observe(RunBegan(there.enrolment.run, there.settings, records, simulated=True))
        following.finish(summary, records, files)
    _show(there.settings, summary, records)
    console.print(f"{folder} was finished before; --fresh simulates it again", **PLAINLY)
    _list(files)
    return summary


def _show(settings: RunSettings, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """Print the results of a run as tables."""
    boards = {device.name: device.board.name for device in device_specs(settings.fleet, settings.run.seed)}
    shown = with_personal(summary, records)
    console.print(run_table(shown))
    console.print(device_table(shown, boards=boards, limit=10))


def _list(files: list[Path]) -> None:
    for file in files:
        if file.suffix in (".html", ".json", ".safetensors"):
            console.print(f"  {file}")
