"""Executors for training: this process, worker processes, or a Ray cluster."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from fleetune.coordinator.run.stored_run import BUNDLE, Run
from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.workers import worker
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses


class Inline(Executor):
    """Executes each job immediately in this process, for runs that are too small for worker processes."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def open_executor(
    run: Run, workers: int, caller_samples: CallerSamples, cluster: str | None, tell: Callable[[str], None]
) -> Iterator[Executor]:
    """An executor for functions of `workers.worker`.

    Args:
        run: run whose devices train.
        workers: number of processes; 0: this process trains.
        caller_samples: samples that the caller passed.
        cluster: address of a Ray cluster; None: this machine.
        tell: called with a line about each worker that died on the cluster.
    """
    bundle = run.store.get(BUNDLE) if run.settings.fleet.trainer == "onnx" else None
    arguments = run.settings, run.payload, run.folder / DEVICES, caller_samples, bundle
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
