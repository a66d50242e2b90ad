"""Executes a whole simulated run, from run.toml to its folder."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.report import summary_of, write_figures, write_report
from fleetune.coordinator.run.observers import Observer, Observers
from fleetune.coordinator.run.round_journal import RoundJournal
from fleetune.coordinator.run.run_events import Notice, RunBegan, RunLeft
from fleetune.coordinator.run.stored_run import BUNDLE, Run, mark_finished, save_shared_model
from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.build_simulation import build_simulation
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun, find_existing_run
from fleetune.tools.simulator.device_specs import device_specs, with_group_devices
from fleetune.tools.simulator.open_simulated_run import open_new, open_stopped
from fleetune.tools.simulator.pending_work import PendingWork
from fleetune.tools.simulator.simulation import OnRound
from fleetune.tools.simulator.workers import worker
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses, warm_up


class Inline(Executor):
    """Executes each job at once in this process, for runs that are too small for worker processes."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def open_executor(
    run: Run, workers: int, caller_samples: CallerSamples, cluster: str | None, tell: Callable[[str], None]
) -> Iterator[Executor]:
    """Yield an executor for functions of `workers.worker`.

    Args:
        run: run whose devices train.
        workers: number of processes; 0 trains in this process.
        caller_samples: samples that the caller passed.
        cluster: address of a Ray cluster; None for this machine.
        tell: called with a line about each worker that died on the cluster.
    """
    bundle = run.store.get(BUNDLE) if run.settings.fleet.trainer == "onnx" else None
    arguments = run.settings, bytes(run.payload), run.folder / DEVICES, caller_samples, bundle
    if cluster is not None:
        from fleetune.tools.simulator.ray_engine.ray_workers import RayWorkers
        from fleetune.tools.simulator.ray_engine.run_package import pack_run

        with RayWorkers(cluster, max(1, workers), pack_run(*arguments), arguments[2], tell) as nodes:
            yield nodes
    elif workers:
        with WorkerProcesses(workers, worker.set_up, arguments) as pool:
            yield pool
    else:
        worker.set_up(*arguments)
        yield Inline()


def simulate(
    settings: RunSettings,
    folder: Path,
    *,
    workers: int,
    fresh: bool,
    observers: Iterable[Observer] = (),
    runs: Path | None = None,
    caller_samples: CallerSamples = NO_CALLER_SAMPLES,
    on_round: OnRound | None = None,
    cluster: str | None = None,
) -> tuple[Run, Summary]:
    """Simulate a run, or continue one that was interrupted.

    Args:
        settings: settings of the run.
        folder: folder of the run.
        workers: number of processes that train devices, one torch thread each; 0 trains in this process.
        fresh: True replaces an earlier run in the folder.
        observers: receive the run's events, and lines about how it started.
        runs: the folder of runs from which this one may continue; None for the parent of `folder`.
        caller_samples: samples that the caller passed; `settings` name them already.
        on_round: see `Simulation`.
        cluster: address of a Ray cluster whose nodes train; None for this machine.

    Returns:
        The run, still open, and its summary.

    Raises:
        FleetuneError: settings, data or model are wrong, or the folder holds a finished or another run.
        StoreError: the disk is full, or another process simulates this run now.
    """
    if workers:
        warm_up()
    if not settings.fleet.devices:
        settings = with_group_devices(settings, caller_samples.samples(settings))
    if cluster is not None and settings.fleet.cards:
        train_on = settings.fleet.train_on
        raise SettingError(
            f"fleet.train_on {train_on}: on a Ray cluster only processors train; set it to cpu"
        )
    found = None if fresh else find_existing_run(settings, folder)
    if found is not None and found.finished:
        raise SettingError(f"{folder} already holds this run, finished; --fresh simulates it again")
    if found is None or found.restart_reason:
        anew = fresh or found is not None
        opened = open_new(settings, folder, runs or folder.parent, caller_samples, workers, fresh=anew)
    else:
        opened = open_stopped(found, folder, caller_samples)
    run = opened.run
    watching = Observers([RoundJournal(folder, run.controller.records), *observers])

    def tell(line: str) -> None:
        watching.tell(Notice(line))

    watching.tell(RunBegan(run.enrolment.run, run.settings, run.controller.records(), simulated=True))
    for line in filter(None, (_what_happens_with(found, folder), opened.notices)):
        tell(line)
    try:
        with open_executor(run, workers, caller_samples, cluster, tell) as executor:
            work = PendingWork(executor, max(2, 2 * workers), run.enrolment.spec.size)
            build_simulation(
                run,
                opened.devices,
                work,
                executor,
                opened.arrivals,
                observers=watching,
                on_round=on_round,
                num_enrolment_bytes=opened.sent_bytes,
            ).run()
    except BaseException:
        run.processor.note()
        run.store.close()
        raise
    finally:
        watching.tell(RunLeft())
    run.processor.note()
    return run, opened.completed(summary_of(run, simulated=True))


def _what_happens_with(found: ExistingRun | None, folder: Path) -> str:
    """Return a line for the user about the run that was found in the folder."""
    if found is None:
        return ""
    if found.edited:
        return f"{folder} was begun with other code ({found.edited}): it begins anew"
    if found.restart_reason:
        return f"{folder} was stopped: it begins anew ({found.restart_reason}), and comes to the same figures"
    return f"{folder} was stopped: it goes on after round {found.rounds}"


def write_results(run: Run, summary: Summary, *, finished: bool = True, report: bool = True) -> list[Path]:
    """Write a simulated run's figures, shared model and report, and close the run.

    The report takes longest and comes last, so that a run whose report is interrupted is finished.

    Args:
        run: the open run; it is closed.
        summary: summary of the run.
        finished: False if the caller ended the run early and may continue it.
        report: True also writes pictures and report.html.

    Returns:
        The written files.

    Raises:
        StoreError: a file cannot be written.
    """
    records = run.controller.records()
    with closing(run.store):
        files = write_figures(run.folder, summary, records)
        model = save_shared_model(run)
        if finished:
            mark_finished(run)
        if report:
            specs = device_specs(run.settings.fleet, run.settings.run.seed)
            boards = {device.name: device.board.name for device in specs}
            files = write_report(run.folder, run.settings, summary, records, boards=boards, durable=False)
    return [*files, model]
