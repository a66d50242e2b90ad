"""Worker processes that ignore Ctrl-C, end immediately on request, and never outlive their parent.

`concurrent.futures.ProcessPoolExecutor` does not fit. All its workers answer through one pipe under one lock,
so a worker that is killed while it answers blocks the others. It also waits for running jobs, and Ctrl-C
prints a traceback of each worker. Here each worker has a channel of its own, whose other end belongs to one
thread.

On Linux the workers are forks of one process that has imported their modules and has no threads. So they
start immediately and share that memory. Other systems have libraries that break after a fork, so there each
worker is a new process.

Workers do not import the caller's script, unless a job needs an object of it. The script may lack
`if __name__ == "__main__":`, and may import anything.
"""

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from typing import Any

from fleetune.protocols.errors import FleetuneError
from fleetune.tools.simulator.workers.shared_memory_channel import SharedMemoryChannel

WORKER_DIED = "a worker process died, perhaps for lack of memory: try fewer --workers"
_FORKS = sys.platform == "linux"
_IMPORTED = (  # imported once, before workers are forked
    "fleetune.tools.simulator.workers.worker",
    "fleetune.edge_agent.training.torch_backend",
    "fleetune.coordinator.export.activation_bytes",
    "fleetune.coordinator.spec.partial_training",
)
_STOPPING = {signal.SIGINT, signal.SIGTERM}
_NEWS, _DONE, _FAILED = "news", "done", "failed"
_hiding = threading.Lock()


def warm_up() -> None:
    """Start to import the workers' modules in the background."""
    if not _FORKS:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
    with _signals_blocked():
        forkserver.ensure_running()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes that are started inside, because it may come while they import."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


@contextmanager
def _without_script() -> Iterator[None]:
    """Hide this process's script from processes that are started inside."""
    with _hiding:
        script = vars(sys.modules["__main__"])
        names: tuple[str, ...] = ("__file__", "__spec__")
        saved = {name: script[name] for name in names if name in script}
        script.update(dict.fromkeys(names))
        try:
            yield
        finally:
            del script["__file__"], script["__spec__"]
            script.update(saved)


def _no_start() -> None:
    """Do nothing: the default set-up of a worker."""


class WorkerProcesses(Executor):
    """An executor with worker processes; each starts when it is needed, and has one job at a time.

    On an exception inside the block (Ctrl-C too) it kills the workers. Otherwise it waits for all jobs.

    Args:
        most: maximum number of processes.
        start: called first in each process, with `arguments`; every job raises its exception.
        arguments: arguments of `start`.
        with_script: True if workers import the script that this process runs.
    """

    def __init__(
        self,
        most: int,
        start: Callable[..., object] = _no_start,
        arguments: tuple[Any, ...] = (),
        *,
        with_script: bool = False,
    ) -> None:
        self._hide_script = nullcontext if with_script else _without_script
        self._start = start
        self._arguments = arguments
        self._threads = ThreadPoolExecutor(most)
        self._of_thread = threading.local()
        self._workers: list[tuple[BaseProcess, SharedMemoryChannel]] = []
        self._killed = False
        self._lock = threading.Lock()
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages of running jobs, see `tell`

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a job; `fn` is a function of a module.

        The future raises the exception of `fn`, with the worker's traceback as its cause. If the worker dies,
        the future raises FleetuneError, and another worker replaces the dead one.
        """
        return self._threads.submit(self._run_job, fn, args, kwargs)

    def kill(self) -> None:
        """End all workers in the middle of their work, and start no more."""
        with self._lock:
            self._killed = True
            for process, _ in self._workers:
                process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - Executor's
        """Wait for all submitted jobs and for the end of the workers; after `kill`, do not wait for jobs."""
        self._threads.shutdown(cancel_futures=cancel_futures)
        for process, channel in self._workers:
            channel.close()
            process.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.kill()
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # Ctrl-C while waiting
            self.kill()
            raise

    def _run_job(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a job in this thread's worker, which is started first if necessary; return its result."""
        channel: SharedMemoryChannel | None = getattr(self._of_thread, "channel", None)
        if channel is None or channel.closed:
            channel = self._of_thread.channel = self._start_worker()
            try:
                self._call(channel, self._start, self._arguments, {})
                with suppress(OSError):  # the worker is dead; the call below reports it
                    # only now: the arguments of `start` may be large, and the memory never shrinks
                    channel.share_memory()
            except BaseException:
                channel.close()
                raise
        return self._call(channel, fn, args, kwargs)

    def _start_worker(self) -> SharedMemoryChannel:
        """Start a worker for this thread, and return the channel to it."""
        warm_up()
        resource_tracker.ensure_running()  # started later, it would unblock signals in this thread
        context = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
        ours, theirs = context.Pipe()
        with self._lock, theirs, _signals_blocked(), self._hide_script():
            if self._killed:
                raise FleetuneError(WORKER_DIED)
            arguments = theirs, number() + len(self._workers)
            process: BaseProcess = context.Process(target=_serve, args=arguments)  # type: ignore[attr-defined]
            process.start()
            channel = SharedMemoryChannel(ours)
            self._workers.append((process, channel))
        return channel

    def _call(
        self,
        channel: SharedMemoryChannel,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            channel.send((fn, args, kwargs))
            kind, what = channel.receive()
            while kind == _NEWS:
                self.news.put(what)
                kind, what = channel.receive()
        except (EOFError, OSError):
            channel.close()
            raise FleetuneError(WORKER_DIED) from None
        if kind == _FAILED:
            raise what
        return what


def tell(news: object) -> None:
    """In a worker: send a message to `WorkerProcesses.news` while the job is running."""
    assert _channel is not None, "_serve() runs first in every worker"
    _channel.send_by_pipe((_NEWS, news))


def number() -> int:
    """Return the number of this worker, from 0.

    If a worker starts workers itself, their numbers begin at its own number, so that GPUs are shared evenly.
    """
    return _number


_channel: SharedMemoryChannel | None = None
_number = 0


def _serve(pipe: Connection, number_of_this: int) -> None:
    """The main function of a worker: run one job after another until its pipe is closed."""
    global _channel, _number
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _channel, _number = SharedMemoryChannel(pipe), number_of_this
    with suppress(EOFError, OSError):
        while True:
            fn, args, kwargs = _channel.receive()
            try:
                _channel.send((_DONE, fn(*args, **kwargs)))
            except Exception as fault:  # noqa: BLE001 - raised where it was asked for
                _channel.send((_FAILED, ExceptionWithTraceback(fault, fault.__traceback__)))


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
