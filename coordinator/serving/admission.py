"""Who is heard: how much one device may say, and how many names that are nobody's may be known.

A device may say `WORDS` things at once and `WORDS_A_SECOND` on average, and one more for each chunk that it
was sent, which it acknowledges. Chunks that it was asked for cost nothing: the sender's window sets their
pace. What is beyond that is dropped before it is read. Who goes on is not heard at all for `MUTED_S`, and is
enrolled again after it. Presences have a bucket of their own and are never muted: they are said once.

Names that were never enrolled are `STRANGERS` at most. A new one takes the place of the one that was silent
longest, if that is at least `GRACE_S`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.serving.device_sessions import DeviceSessions
from fleetune.coordinator.serving.rate_limiter import TokenBucket, TokenBuckets
from fleetune.protocols.wire.messages import readable
from fleetune.protocols.wire.topics import Address

log = logging.getLogger(__name__)

WORDS, WORDS_A_SECOND = 1000, 50.0
PRESENCES, PRESENCES_A_SECOND = 30, 1.0
PATIENCE, PATIENCE_A_SECOND = 2000, 20.0  # what is dropped before a device is muted
MUTED_S = 60.0
STRANGERS = 20_000
GRACE_S = 10.0
_BUCKETS = 50_000


@dataclass
class Admission:
    """Of one coordinator's life.

    Attributes:
        controller: of the run; its members are no strangers, it counts what is refused.
        peers: devices heard of.
        timer: seconds that never jump.
        on_muted: told a device's name, and whether it is muted from now on or heard again.
        forget: told the name of a stranger that is forgotten.
    """

    controller: RunController
    peers: DeviceSessions
    timer: Callable[[], float]
    on_muted: Callable[[str, bool], None]
    forget: Callable[[str], None]
    _words: TokenBuckets = field(default_factory=lambda: TokenBuckets(WORDS, WORDS_A_SECOND, _BUCKETS))
    _presences: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(PRESENCES, PRESENCES_A_SECOND, _BUCKETS)
    )
    _patience: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(PATIENCE, PATIENCE_A_SECOND, _BUCKETS)
    )
    _muted: OrderedDict[str, float] = field(default_factory=OrderedDict)  # until when, ascending
    _strangers: OrderedDict[str, float] = field(default_factory=OrderedDict)  # last heard, ascending
    _crowd: TokenBucket = field(default_factory=lambda: TokenBucket(1, 1 / MUTED_S))
    _overflow: TokenBucket = field(default_factory=lambda: TokenBucket(1, 1 / MUTED_S))

    def lets_in(self, address: Address, data: bytes) -> bool:
        """Whether a message is read; what is not is counted."""
        now, device = self.timer(), address.device
        self._free(now)
        if not self._may_speak(address, data, now):
            self._count_surplus(device, now)
            return False
        return self._knows(device, now)

    def grant(self, device: str) -> None:
        """It was sent a chunk, which it will acknowledge."""
        self._words.of(device).give()

    def look(self, now: float, dropped: int) -> None:
        """Whoever is heard again; `dropped`: messages that had no place in the line since the last look."""
        self._free(now)
        if dropped:
            self.controller.count_refused("overflow", dropped)
            if self._overflow.take(now):
                log.warning("more comes in than can be handled: %d messages dropped", dropped)

    def _free(self, now: float) -> None:
        while self._muted and next(iter(self._muted.values())) <= now:
            device, _ = self._muted.popitem(last=False)
            log.warning("%s is heard again", readable(device))
            self.on_muted(device, False)

    def _may_speak(self, address: Address, data: bytes, now: float) -> bool:
        device, channel = address.device, address.channel
        if channel == "state":
            return self._presences.of(device).take(now)
        if device in self._muted:
            return False
        peer = self.peers.get(device)
        asked_for = channel == "update" and peer is not None and peer.link.inbox.expects(data)
        return asked_for or self._words.of(device).take(now)

    def _count_surplus(self, device: str, now: float) -> None:
        self.controller.count_refused("surplus", device=device if device in self._members else None)
        if device not in self._muted and not self._patience.of(device).take(now):
            log.warning("%s floods: not heard for %g s", readable(device), MUTED_S)
            self._muted[device] = now + MUTED_S
            self.on_muted(device, True)

    def _knows(self, device: str, now: float) -> bool:
        if device in self._members:
            return True
        if device not in self._strangers and not self._make_room(now):
            self.controller.count_refused("stranger")
            if self._crowd.take(now):
                log.warning("%d names that were never enrolled: new ones are not heard", STRANGERS)
            return False
        self._strangers[device] = now
        self._strangers.move_to_end(device)
        return True

    def _make_room(self, now: float) -> bool:
        """Whether one more stranger may be known."""
        while len(self._strangers) >= STRANGERS:
            name, heard_at = next(iter(self._strangers.items()))
            member = name in self._members
            if not member and now - heard_at < GRACE_S:
                return False
            del self._strangers[name]
            if not member:
                self.forget(name)
        return True

    @property
    def _members(self) -> Container[str]:
        return self.controller.members
