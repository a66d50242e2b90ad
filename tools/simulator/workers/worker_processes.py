"""Worker processes that hear no Ctrl-C, end at once when they shall, and never outlive who began them.

Why not `concurrent.futures.ProcessPoolExecutor`: all its workers answer through one pipe under one lock. A
worker that is killed while it answers leaves the others, and who waits for them, hanging; one that is not
killed finishes its job first; and Ctrl-C, which a terminal sends to all of them, is a traceback of each. Here
each has a channel of its own, whose other end a thread holds.

On Linux they are forks of one process that has imported what they need and has no threads: they are there at
once, and share that memory. Elsewhere libraries of the system do not bear a fork, and each begins by itself.

Unless jobs hold something of the script that begins them, workers do not import it, as those of
`multiprocessing` do: it may call us without `if __name__ == "__main__":`, and import what it likes.
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
from types import TracebackType
from typing import Any

from fleetune.protocols.errors import FleetuneError
from fleetune.tools.simulator.workers.shared_memory_channel import SharedMemoryChannel

WORKER_DIED = "a worker process died, perhaps for lack of memory: try fewer --workers"
_FORKS = sys.platform == "linux"
_IMPORTED = (  # before workers are forked
    "fleetune.tools.simulator.workers.worker",
    "fleetune.edge_agent.training.torch_backend",
    "fleetune.coordinator.export.activation_bytes",
    "fleetune.coordinator.spec.partial_training",
)
_STOPPING = {signal.SIGINT, signal.SIGTERM}
_NEWS, _DONE, _FAILED = "news", "done", "failed"
_hiding = threading.Lock()


def warm_up() -> None:
    """Begin to import what workers need, beside whatever this process does meanwhile."""
    if not _FORKS:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
    with _signals_blocked():
        forkserver.ensure_running()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is begun inside does not hear Ctrl-C, which may come while it imports."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


@contextmanager
def _without_script() -> Iterator[None]:
    """What is begun inside is not told which script this process runs."""
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
    """Nothing is set up in a worker."""


class WorkerProcesses(Executor):
    """At most so many processes, begun when there is something to do, one job at a time each.

    Left by an exception, Ctrl-C's too, it kills them; else it waits for what was submitted.

    Args:
        most: processes.
        start: called first in each, with `arguments`; what it raises is what each job raises.
        arguments: of `start`.
        with_script: whether workers import the script that this process runs.
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
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # what jobs told, see `tell`

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A job: `fn` is a function of a module.

        Its future raises what `fn` raised, the worker's traceback as its cause; FleetuneError where the
        worker died, and another takes its place.
        """
        return self._threads.submit(self._run_job, fn, args, kwargs)

    def kill(self) -> None:
        """End all workers, whatever they are doing, and begin no more."""
        with self._lock:
            self._killed = True
            for process, _ in self._workers:
                process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - Executor's
        """Wait for what was submitted, or, killed or cancelled, for nothing; then the workers are gone."""
        self._threads.shutdown(cancel_futures=cancel_futures)
        for process, channel in self._workers:
            channel.close()
            process.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is not None:
                self.kill()
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # Ctrl-C while waiting
            self.kill()
            raise

    def _run_job(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a thread: a job, done by its worker."""
        channel: SharedMemoryChannel | None = getattr(self._of_thread, "channel", None)
        if channel is None or channel.closed:
            channel = self._of_thread.channel = self._start_worker()
            try:
                self._call(channel, self._start, self._arguments, {})
                with suppress(OSError):  # a dead worker's, as is found below
                    channel.share_memory()  # now: a run's samples would take some for good
            except BaseException:
                channel.close()
                raise
        return self._call(channel, fn, args, kwargs)

    def _start_worker(self) -> SharedMemoryChannel:
        """A worker for this thread."""
        warm_up()
        resource_tracker.ensure_running()  # it would make this thread hear signals again
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
    """In a worker: put something into `WorkerProcesses.news`, long before the job is done."""
    assert _channel is not None, "_serve() runs first in every worker"
    _channel.send_by_pipe((_NEWS, news))


def number() -> int:
    """Of this worker among its like, from 0; those that a worker begins are numbered from its own on, so that
    cards are shared evenly.
    """
    return _number


_channel: SharedMemoryChannel | None = None
_number = 0


def _serve(pipe: Connection, number_of_this: int) -> None:
    """What a worker does: one job after another until its pipe is closed."""
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
    """Whoever began this process is gone, killed perhaps: nobody wants what it does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
