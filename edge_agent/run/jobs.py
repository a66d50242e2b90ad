"""Runs an agent's long work in a separate thread: joining a run and working on its tasks.

One job runs after another, and each result is an event.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.messages import TransferKey

PROGRESS_EVERY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """Event: joining a run has ended, with a result or an exception."""

    run: str
    joined: Future[JoinedRun]


@dataclass(frozen=True)
class Worked:
    """Event: the work on a task has ended, with a result or an exception."""

    key: TransferKey
    seconds: float
    reply: Future[bytes]


@dataclass(frozen=True)
class Progress:
    """Event: finished fraction of local training, 0..1."""

    fraction: float


class Jobs:
    """The jobs' thread and its queue.

    Args:
        put: receives the events; the jobs' thread calls it.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, put: Callable[[Any], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._put = put
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._closing = threading.Event()
        self._reported_at = float("-inf")

    @property
    def closing(self) -> bool:
        """True if jobs should end at once."""
        return self._closing.is_set()

    def join(self, run: str, do: Callable[[], JoinedRun]) -> None:
        """Queue joining a run; a `Joined` event follows."""
        self._thread.submit(do).add_done_callback(lambda joined: self._put(Joined(run, joined)))

    def work(self, key: TransferKey, do: Callable[[], bytes]) -> None:
        """Queue the work on a task; a `Worked` event follows."""
        began = self._clock()
        self._thread.submit(do).add_done_callback(
            lambda reply: self._put(Worked(key, self._clock() - began, reply))
        )

    def run(self, do: Callable[[], None]) -> None:
        """Queue other work; a failure is logged in one line."""
        self._thread.submit(do).add_done_callback(_log_failure)

    def progress(self, fraction: float) -> None:
        """Put a progress event, at most once a second. Called after every batch."""
        now = self._clock()
        if now - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = now
            self._put(Progress(fraction))

    def close(self) -> None:
        """Stop the current job and drop the queued ones; return when the thread has ended."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _log_failure(done: Future[None]) -> None:
    problem = None if done.cancelled() else done.exception()
    if problem is not None:
        log.error("%s", problem if isinstance(problem, FleetuneError) else unexpected(problem))
        log.debug("", exc_info=problem)
