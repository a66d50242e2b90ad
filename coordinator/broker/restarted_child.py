"""Restarts a child process of a run when it ends unexpectedly, e.g. the embedded broker, on the same port."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.one_line import flat

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    0.5,
    30.0,
)  # pause before a restart; it doubles, and each is drawn from 0.5 to 1.0 of it
STEADY_S = 10.0  # a child that ran this long resets the back-off
STOP_S = 5.0


class Child(Protocol):
    """A child process that listens on a port."""

    @property
    def port(self) -> int: ...

    def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        ...

    def close(self) -> None:
        """Stop it; do nothing if it has ended."""
        ...


AnyChild = TypeVar("AnyChild", bound=Child)


class RestartedChild(Generic[AnyChild]):
    """A child process; a thread restarts it until `close`.

    The kernel kills a child when the thread that started it ends (see `tied_child`). The restarting thread
    lives until `close`, so its children can too.

    Args:
        what: name of the child, for messages.
        start: function that starts a child on a port; 0 selects a free one.
        port: port of the first child; restarts use the port that the first child got.

    Attributes:
        child: the running child, or the last one that ran.

    Raises:
        TransportError: the first child does not start.
    """

    def __init__(self, what: str, start: Callable[[int], AnyChild], port: int) -> None:
        self._what = what
        self._start = start
        self._closing = threading.Event()
        self.child = start(port)
        self._thread = threading.Thread(target=self._restart_for_ever, name=what, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the child and do not restart it."""
        self._closing.set()
        self.child.close()
        self._thread.join(STOP_S)
        self.child.close()  # a restart may have been under way

    def _restart_for_ever(self) -> None:
        failures = 0
        while not self._closing.is_set():
            began = time.monotonic()
            code = self.child.wait()
            if self._closing.is_set():
                return
            ended = time.monotonic()
            failures = 0 if ended - began > STEADY_S else failures
            log.warning("the %s ended with exit code %d; restarting it", self._what, code)
            failures = self._restart(failures)
            if not self._closing.is_set():
                log.warning(
                    "the %s accepts connections again after %.1f s", self._what, time.monotonic() - ended
                )

    def _restart(self, failures: int) -> int:
        """Try to start a child until it runs or `close` is called; return the new number of failures.

        `failures` counts attempts since the last child that ran stably.
        """
        said = ""
        while not self._closing.wait(_pause_s(failures)):
            failures += 1
            try:
                self.child = self._start(self.child.port)
            except (FleetuneError, OSError) as problem:
                what = flat(problem)
                # the rest of the message contains times, which would defeat duplicate detection
                if (kind := what.partition(": ")[0]) != said:
                    log.warning(
                        "cannot restart the %s: %s; retrying at least every %g s",
                        self._what,
                        what,
                        LONGEST_PAUSE_S,
                    )
                said = kind
            else:
                break
        return failures


def _pause_s(failures: int) -> float:
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, protects nothing
