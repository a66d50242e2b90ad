"""Detects that an agent waits too long for its coordinator, and finds the reason. No socket, no clock."""

import logging
from collections.abc import Callable, Hashable, Iterable

from fleetune.edge_agent.probes.channel_rights import ChannelRights
from fleetune.protocols.errors import TransportError
from fleetune.protocols.wire.peer_link import Answered, Item, PeerLink

COORDINATOR_TIMEOUT_S = 10.0
# least time between two tests of access rights, because each opens a second connection to the broker
AGAIN_S = 300.0

NOTHING_HEARD, NOT_HEARD = "nothing heard", "not heard"

log = logging.getLogger(__name__)


class CoordinatorTimeout:
    """Tracks which message the agent waits for, and since when.

    Args:
        fleet: name of the agent's fleet.
        find_rights: tests over a second connection what the device may write and read; None to skip the test.

    Attributes:
        wake_at: time of the next call of `look`; None if the agent waits for nothing.
        nothing_heard: True if no coordinator has sent anything since the agent connected.
    """

    def __init__(self, fleet: str = "", find_rights: Callable[[], ChannelRights] | None = None) -> None:
        self._fleet, self._find_rights, self._said = fleet, find_rights, ""
        self.wake_at: float | None = None
        self.nothing_heard = True
        self._connected = False
        self._offers = 0  # number of offers of the enrolment in a row
        self._awaited: Hashable = None
        self._not_before = float("-inf")

    def connected(self) -> None:
        self._connected, self.nothing_heard, self._offers = True, True, 0

    def disconnected(self) -> None:
        self._connected = False

    def heard(self, items: Iterable[Item]) -> None:
        """Record that the coordinator sent a message, which the link turned into these items.

        A coordinator that does not receive the agent's answer offers the enrolment repeatedly.
        """
        offered = any(
            isinstance(item, Answered) and item.offer.transfer_key.kind == "enrolment" for item in items
        )
        self._offers = self._offers + 1 if offered else 0
        self.nothing_heard = False

    def look(self, link: PeerLink, now: float) -> bool:
        """Return True once for each message that the agent has waited for too long."""
        awaited = self._awaits(link)
        if awaited != self._awaited:
            self._awaited = awaited
            self.wake_at = None if awaited is None else max(now + COORDINATOR_TIMEOUT_S, self._not_before)
        if self.wake_at is None or now < self.wake_at:
            return False
        self.wake_at, self._not_before = None, now + AGAIN_S
        return True

    def explain(self) -> None:
        """Log in one line why the coordinator is silent. Takes seconds, so call it in the jobs' thread."""
        if self._find_rights is None:
            return
        said = self._explanation(self._find_rights)
        if said and said != self._said:
            log.warning("%s", said)
        self._said = said

    def _explanation(self, find_rights: Callable[[], ChannelRights]) -> str:
        """Return the reason why the coordinator is silent; "" if this device finds no fault on its side."""
        waited = f"no answer from a coordinator of fleet {self._fleet} for {COORDINATOR_TIMEOUT_S:g} s"
        try:
            rights = find_rights()
        except TransportError as problem:
            return f"{waited}, and a second connection fails: {problem}"
        if rights.problem is not None:
            return f"{waited}: {rights.problem}; {rights.remedy}"
        if rights.has_coordinator or not self.nothing_heard:
            return ""
        return f"{waited}; this device joins when one comes. Is the fleet's name right?"

    def _awaits(self, link: PeerLink) -> Hashable:
        """Return a value that changes with every progress; None if the agent waits for nothing."""
        if not self._connected:
            return None
        if self.nothing_heard:
            return NOTHING_HEARD
        if self._offers > 1:
            return NOT_HEARD
        if link.outbox:
            return (*link.outbox.keys[:1], link.outbox.progress)
        return link.inbox.progress
