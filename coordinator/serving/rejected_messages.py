"""What devices sent that is refused: counted always, logged within bounds.

A device has `LINES` lines at once and one more every ten seconds, all devices together ten times as many; a
line that follows others which were left out says how many. So a flood of junk costs its sender's name in the
log and not the disk.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetune.coordinator.serving.rate_limiter import TokenBucket, TokenBuckets
from fleetune.protocols.errors import PacketError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.messages import readable

log = logging.getLogger(__name__)

LINES = 30
LINES_A_SECOND = 0.1


@dataclass
class RejectedMessages:
    """Of one coordinator's life.

    Attributes:
        count: told the kind of each.
        timer: seconds that never jump.
    """

    count: Callable[[str], None]
    timer: Callable[[], float]
    _devices: TokenBuckets = field(default_factory=lambda: TokenBuckets(LINES, LINES_A_SECOND))
    _all: TokenBucket = field(default_factory=lambda: TokenBucket(10 * LINES, 10 * LINES_A_SECOND))

    def note(self, problem: PacketError, device: str = "") -> None:
        """A message; `device` is "" where not even that is known."""
        self.count(type(problem).__name__)
        self.say(logging.WARNING, device, "refused: " + (f"{device}: " if device else "") + str(problem))

    def blame(self, device: str, fault: Exception) -> str:
        """What a device sent led to a fault that nobody foresaw, and is refused. What to tell it."""
        self.count(type(fault).__name__)
        self.say(logging.ERROR, device, f"{device}: {unexpected(fault)}; what it sent is refused")
        log.debug("%s", device, exc_info=fault)
        return f"unexpected {type(fault).__name__}; the coordinator's log has more"

    def say(self, level: int, device: str, line: str) -> None:
        """One line about a device, if it has any left."""
        own, now = self._devices.of(device), self.timer()
        before = own.refused
        if not own.take(now) or not self._all.take(now):
            return
        more = f" ({before} more lines about {device or 'others'} were left out)" if before else ""
        log.log(level, "%s%s", readable(line), more)
