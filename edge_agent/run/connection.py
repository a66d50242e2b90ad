"""The agent's connection to its broker: presence, reconnecting, and a log line for each outage."""

import logging
import uuid
from collections.abc import Callable

from msgspec import UNSET

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.run.activity import CONNECTED, ActivityNotifier
from fleetune.protocols.version import VERSION
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.identity import Identity
from fleetune.protocols.wire.peer_link import Packet
from fleetune.protocols.wire.transport import EventSink, Transport

REPEAT_S = 600.0
SHORTEST_AWAY_S = 1.0

log = logging.getLogger(__name__)


class Connection:
    """A device's connection to its broker.

    Args:
        fleet: name of the fleet.
        identity: id and name of this device.
        make_transport: makes an unconnected transport from the will and the queue of events.
        events: queue for the transport's events.
        notifier: receives changes of the connection.

    Attributes:
        instance: random id of this agent process, which differs for each agent with the same device name.
        wake_at: time of the next connection attempt after `wait_for_name`; None if none is planned.
    """

    def __init__(
        self,
        fleet: str,
        identity: Identity,
        make_transport: Callable[[bytes, EventSink], Transport],
        events: EventSink,
        notifier: ActivityNotifier,
    ) -> None:
        self._fleet, self._identity, self._notifier = fleet, identity, notifier
        self.instance = uuid.uuid4().hex[:12]
        self._farewell = wire.encode(wire.Presence(False, self.instance))
        self._transport = make_transport(self._farewell, events)
        self._outage, self._logged_at = "", 0.0
        self.wake_at: float | None = None

    def connect(self) -> None:
        """Ask the transport to connect, and to stay connected."""
        self._transport.connect()

    def close(self) -> None:
        """Publish that this device leaves, and disconnect."""
        self._transport.close(self._farewell)

    def greet(self) -> None:
        """Announce this device, so that the coordinator enrols it."""
        self._outage = ""
        log.info("connected; fleet %s, device %s", self._fleet, self._identity)
        named = self._identity.name != self._identity.id
        presence = wire.Presence(
            True,
            self.instance,
            f"fleetune {VERSION}",
            name=self._identity.name if named else UNSET,
            reads=EVERYTHING,
        )
        self._transport.publish(self._topic("state"), wire.encode(presence), retain=True, qos=1)
        self._notifier.note(connection=CONNECTED)

    def publish(self, packet: Packet) -> None:
        """Publish a packet to the coordinator."""
        self._transport.publish(self._topic(packet.channel), packet.data)

    def note_lost(self, reason: str, now: float, finished: str | None) -> None:
        """Log the reason of an outage; log the same reason again only every `REPEAT_S` seconds.

        Args:
            reason: why the broker cannot be reached.
            now: current time on a monotonic clock, in seconds.
            finished: the last finished run, if no other has started.
        """
        if self.wake_at is not None:
            return  # we disconnected ourselves
        if reason != self._outage or now - self._logged_at >= REPEAT_S:
            self._outage, self._logged_at = reason, now
            log.warning("%s", _outage_line(reason, finished))
        self._notifier.note(connection=f"not connected: {reason}")

    def wait_for_name(self, wait_s: float, now: float) -> None:
        """Stay disconnected for `wait_s`, because another device uses the same id.

        A broker ends the older connection of a name, so each connection of this device would end the other
        device's.
        """
        line = (
            f"another device uses the id {self._identity.id}: this agent tries again in {wait_s:g} s;"
            " give it an id of its own with --device, or if it is a copy of a joined device, let it join with"
            " another --state"
        )
        log.warning("%s", line)
        self.wake_at = now + max(SHORTEST_AWAY_S, wait_s)
        self._transport.close()
        self._notifier.note(connection=line)

    def tick(self, now: float) -> None:
        """Connect again once the wait is over."""
        if self.wake_at is not None and now >= self.wake_at:
            self.wake_at = None
            self._transport.connect()

    def _topic(self, channel: topics.Channel) -> str:
        return topics.topic(self._fleet, self._identity.id, channel)


def _outage_line(reason: str, finished: str | None) -> str:
    if finished is None:
        return f"not connected: {reason}"
    return (
        f"not connected: {reason}; run {finished} is over, and its broker may have ended with it: this"
        " agent waits for the next run (Ctrl-C stops it; with --leave-after-run it ends by itself)"
    )
