"""Notices that an agent waits too long for its coordinator, so that it finds out why: no socket, no clock."""

from collections.abc import Hashable, Iterable

from fleetune.protocols.wire.peer_link import Answered, Item, PeerLink

COORDINATOR_TIMEOUT_S = 10.0
AGAIN_S = 300.0  # between two examinations: each is a second connection to the broker

NOTHING_HEARD, NOT_HEARD = "nothing heard", "not heard"


class CoordinatorTimeout:
    """What an agent waits for, and since when.

    Attributes:
        wake_at: when `look` has something to do; None: nothing is awaited.
        nothing_heard: nothing came from a coordinator since the connection.
    """

    def __init__(self) -> None:
        self.wake_at: float | None = None
        self.nothing_heard = True
        self._connected = False
        self._offers = 0  # of the enrolment, in a row
        self._awaited: Hashable = None
        self._not_before = float("-inf")

    def connected(self) -> None:
        self._connected, self.nothing_heard, self._offers = True, True, 0

    def disconnected(self) -> None:
        self._connected = False

    def heard(self, items: Iterable[Item]) -> None:
        """The coordinator sent something, which came to these items.

        It offers the enrolment again and again where it does not hear our answer.
        """
        offered = any(
            isinstance(item, Answered) and item.offer.transfer_key.kind == "enrolment" for item in items
        )
        self._offers = self._offers + 1 if offered else 0
        self.nothing_heard = False

    def look(self, link: PeerLink, now: float) -> bool:
        """Whether the agent has waited for the same thing for too long; True once for each thing."""
        awaited = self._awaits(link)
        if awaited != self._awaited:
            self._awaited = awaited
            self.wake_at = None if awaited is None else max(now + COORDINATOR_TIMEOUT_S, self._not_before)
        if self.wake_at is None or now < self.wake_at:
            return False
        self.wake_at, self._not_before = None, now + AGAIN_S
        return True

    def _awaits(self, link: PeerLink) -> Hashable:
        """What changes whenever it goes on; None: nothing is awaited."""
        if not self._connected:
            return None
        if self.nothing_heard:
            return NOTHING_HEARD
        if self._offers > 1:
            return NOT_HEARD
        if link.outbox:
            return (*link.outbox.keys[:1], link.outbox.progress)
        return link.inbox.progress
