"""Decides which messages the coordinator reads, and how many unknown device names it remembers.

A device may send `MESSAGES` messages at once and `MESSAGES_PER_S` on average, plus one for each chunk that
the coordinator sends, because the device acknowledges every chunk. Chunks of an accepted transfer are free:
the sender's congestion window limits their rate. Further messages are dropped unread. A device that sends too
many messages is throttled: for `THROTTLED_S` all its messages are dropped, then it is enrolled again.
Presence messages have a budget of their own and never lead to throttling, because an agent sends each of them
only once.

At most `MAX_UNKNOWN` names without an enrolment are remembered. A new name replaces the name that was silent
for the longest time, if that time was at least `MIN_SILENCE_S`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fleetune.coordinator.rate_limiter import TokenBucket, TokenBuckets
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.serving.device_sessions import DeviceSessions
from fleetune.protocols.wire.messages import readable
from fleetune.protocols.wire.topics import Address

log = logging.getLogger(__name__)

MESSAGES, MESSAGES_PER_S = 1000, 50.0
PRESENCES, PRESENCES_PER_S = 30, 1.0
DROPPED, DROPPED_PER_S = 2000, 20.0  # messages that are dropped before a device is throttled
THROTTLED_S = 60.0
MAX_UNKNOWN = 20_000
MIN_SILENCE_S = 10.0
_BUCKETS = 50_000


def message_buckets() -> TokenBuckets:
    """Return the message budgets of all devices, one token bucket each."""
    return TokenBuckets(MESSAGES, MESSAGES_PER_S, _BUCKETS)


@dataclass
class Admission:
    """Decides for each message whether the coordinator reads it.

    Attributes:
        controller: the run controller; it knows the members and counts dropped messages.
        sessions: the sessions of all devices.
        messages: the message budget of each device.
        timer: a monotonic clock, in seconds.
        on_throttled: called with a device's name, and True when throttling begins or False when it ends.
        forget: called with the name of an unknown device that is forgotten.
    """

    controller: RunController
    sessions: DeviceSessions
    messages: TokenBuckets
    timer: Callable[[], float]
    on_throttled: Callable[[str, bool], None]
    forget: Callable[[str], None]
    _presences: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(PRESENCES, PRESENCES_PER_S, _BUCKETS)
    )
    _dropped: TokenBuckets = field(default_factory=lambda: TokenBuckets(DROPPED, DROPPED_PER_S, _BUCKETS))
    _throttled: OrderedDict[str, float] = field(default_factory=OrderedDict)  # the end, ascending
    _unknown: OrderedDict[str, float] = field(default_factory=OrderedDict)  # last message, ascending
    # These two limit how often the log mentions unknown names and dropped messages.
    _unknown_lines: TokenBucket = field(default_factory=lambda: TokenBucket(1, 1 / THROTTLED_S))
    _overflow_lines: TokenBucket = field(default_factory=lambda: TokenBucket(1, 1 / THROTTLED_S))

    def admits(self, address: Address, data: bytes) -> bool:
        """Return True if the message is read; count it as rejected otherwise."""
        now, device = self.timer(), address.device
        self._end_throttling(now)
        if not self._is_within_limits(address, data, now):
            self._count_dropped(device, now)
            return False
        return self._is_remembered(device, now)

    def look(self, now: float, dropped: int) -> None:
        """End throttling whose time is over, and report messages that were dropped because the event queue
        was full.
        """
        self._end_throttling(now)
        if dropped:
            self.controller.count_refused("overflow", dropped)
            if self._overflow_lines.take(now):
                log.warning(
                    "messages arrive faster than the coordinator handles them: it dropped %d",
                    dropped,
                )

    def _end_throttling(self, now: float) -> None:
        while self._throttled and next(iter(self._throttled.values())) <= now:
            device, _ = self._throttled.popitem(last=False)
            who = readable(str(self.sessions.identity(device)))
            log.warning("%s is no longer throttled: the coordinator reads its messages again", who)
            self.on_throttled(device, False)

    def _is_within_limits(self, address: Address, data: bytes, now: float) -> bool:
        device, channel = address.device, address.channel
        if channel == "state":
            return self._presences.of(device).take(now)
        if device in self._throttled:
            return False
        session = self.sessions.get(device)
        accepted = channel == "update" and session is not None and session.link.inbox.expects(data)
        return accepted or self.messages.of(device).take(now)

    def _count_dropped(self, device: str, now: float) -> None:
        self.controller.count_refused("surplus", device=device if device in self._members else None)
        if device not in self._throttled and not self._dropped.of(device).take(now):
            who = readable(str(self.sessions.identity(device)))
            log.warning(
                "%s sends too many messages: the coordinator drops all of them for %g s",
                who,
                THROTTLED_S,
            )
            self._throttled[device] = now + THROTTLED_S
            self.on_throttled(device, True)

    def _is_remembered(self, device: str, now: float) -> bool:
        """True if the name is a member, or one of the remembered unknown names; a new name is added if space
        allows.
        """
        if device in self._members:
            return True
        if device not in self._unknown and not self._make_space(now):
            self.controller.count_refused("stranger")
            if self._unknown_lines.take(now):
                log.warning(
                    "%d unknown devices have sent messages: messages of further unknown devices are dropped",
                    MAX_UNKNOWN,
                )
            return False
        self._unknown[device] = now
        self._unknown.move_to_end(device)
        return True

    def _make_space(self, now: float) -> bool:
        """Return True if one more unknown name can be remembered; forget a long-silent one if needed."""
        while len(self._unknown) >= MAX_UNKNOWN:
            name, heard_at = next(iter(self._unknown.items()))
            member = name in self._members  # it joined since
            if not member and now - heard_at < MIN_SILENCE_S:
                return False
            del self._unknown[name]
            if not member:
                self.forget(name)
        return True

    @property
    def _members(self) -> Container[str]:
        return self.controller.members
