"""Counts every rejected message, and logs a limited number of them.

A device may cause `LINES` log lines at once and one more every ten seconds; all devices together may cause
ten times as many. A line reports how many lines were left out before it. So the log names the sender of a
flood of junk without filling the disk.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetune.coordinator.rate_limiter import TokenBucket, TokenBuckets
from fleetune.protocols.errors import PacketError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.identity import Identity
from fleetune.protocols.wire.messages import readable

log = logging.getLogger(__name__)

LINES = 30
LINES_A_SECOND = 0.1


@dataclass
class RejectedMessages:
    """Counts and logs rejected messages.

    Attributes:
        count: called with the kind of each rejected message.
        timer: a monotonic clock, in seconds.
        identity: function that returns a device's id and name.
    """

    count: Callable[[str], None]
    timer: Callable[[], float]
    identity: Callable[[str], Identity] = Identity.of
    _devices: TokenBuckets = field(default_factory=lambda: TokenBuckets(LINES, LINES_A_SECOND))
    _all: TokenBucket = field(default_factory=lambda: TokenBucket(10 * LINES, 10 * LINES_A_SECOND))

    def note(self, problem: PacketError, device: str = "") -> None:
        """Count and log a rejected message; `device` is "" if the sender is unknown."""
        self.count(type(problem).__name__)
        sender = f"{self.identity(device)}: " if device else ""
        self.say(logging.WARNING, device, f"refused: {sender}{problem}")

    def blame(self, device: str, fault: Exception) -> str:
        """Log an unexpected error that a message caused, and return the reason to send to the device."""
        self.count(type(fault).__name__)
        self.say(
            logging.ERROR, device, f"{self.identity(device)}: {unexpected(fault)}; what it sent is refused"
        )
        log.debug("%s", device, exc_info=fault)
        return f"unexpected {type(fault).__name__}; the coordinator's log has more"

    def say(self, level: int, device: str, line: str) -> None:
        """Log a line about a device, unless the device, or all devices together, have used up their lines."""
        own, now = self._devices.of(device), self.timer()
        before = own.refused
        if not own.take(now) or not self._all.take(now):
            return
        more = f" ({before} more lines about {device or 'others'} were left out)" if before else ""
        log.log(level, "%s%s", readable(line), more)
