"""Restarts a run's embedded broker when it ends unexpectedly, with the same port, passwords and rules."""

import logging
import random
import threading
import time
from collections.abc import Callable

from fleetune.coordinator.broker.embedded_broker import STOP_S, EmbeddedBroker
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.one_line import flat

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    0.5,
    30.0,
)  # pause before a restart; it doubles, and each is drawn from 0.5 to 1.0 of it
STEADY_S = 10.0  # a broker that ran this long resets the back-off


class RestartedBroker:
    """The embedded broker of a run; a thread restarts it until `close`.

    The kernel kills a broker when the thread that started it ends (see `tied_child`). The restarting thread
    lives until `close`, so its brokers can too.

    Args:
        start: function that starts a broker on a port; 0 selects a free one.
        port: port of the first broker; restarts use the port that the first broker got.

    Attributes:
        broker: the running broker, or the last one that ran.

    Raises:
        TransportError: the first broker does not start.
    """

    def __init__(self, start: Callable[[int], EmbeddedBroker], port: int) -> None:
        self._start = start
        self._closing = threading.Event()
        self.broker = start(port)
        self._thread = threading.Thread(target=self._restart_for_ever, name="broker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the broker and do not restart it."""
        self._closing.set()
        self.broker.close()
        self._thread.join(STOP_S)
        self.broker.close()  # a restart may have been under way

    def _restart_for_ever(self) -> None:
        failures = 0
        while not self._closing.is_set():
            began = time.monotonic()
            code = self.broker.wait()
            if self._closing.is_set():
                return
            ended = time.monotonic()
            failures = 0 if ended - began > STEADY_S else failures
            log.warning(
                "the embedded broker (%s) ended with exit code %d; restarting it", self.broker.which, code
            )
            failures = self._restart(failures)
            if not self._closing.is_set():
                log.warning(
                    "the embedded broker accepts connections again after %.1f s",
                    time.monotonic() - ended,
                )

    def _restart(self, failures: int) -> int:
        """Try to start a broker until it runs or `close` is called; return the new number of failures.

        `failures` counts attempts since the last broker that ran stably.
        """
        said = ""
        while not self._closing.wait(_pause_s(failures)):
            failures += 1
            try:
                self.broker = self._start(self.broker.port)
            except (FleetuneError, OSError) as problem:
                what = flat(problem)
                # the rest of the message contains times, which would defeat duplicate detection
                if (kind := what.partition(": ")[0]) != said:
                    log.warning(
                        "cannot restart the embedded broker: %s; retrying at least every %g s",
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
