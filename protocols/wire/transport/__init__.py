"""The interface to the network: publish bytes to a topic, and receive events from a queue.

A serve loop blocks on one queue with a timeout. The transport only puts events there, so the loop may use the
same queue for other events.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from fleetune.protocols.errors import RefusalReason

Qos = Literal[0, 1]


@dataclass(frozen=True)
class Connected:
    """Event: the broker accepted the connection, and the subscriptions were sent."""


@dataclass(frozen=True)
class Disconnected:
    """Event: the transport is not connected; `reason` is one line.

    The transport keeps trying, and each failed attempt gives another `Disconnected`. `refusal`: why the
    broker refuses this client; None if the broker did not refuse it, or gave no reason.
    """

    reason: str
    refusal: RefusalReason | None = None


@dataclass(frozen=True)
class Received:
    """Event: a message arrived. `retained`: True if it was published before this client subscribed."""

    topic: str
    data: bytes
    retained: bool = False


Event = Connected | Disconnected | Received


class EventSink(Protocol):
    """A destination of events: a `queue.SimpleQueue` or `queue.Queue`."""

    def put(self, item: Event, /) -> None: ...


@dataclass(frozen=True)
class Will:
    """The message that the broker publishes if this client vanishes: retained, at QoS 1."""

    topic: str
    data: bytes


class Transport(Protocol):
    """One client of a broker, made with its will, its subscriptions and the sink of its events."""

    def connect(self) -> None:
        """Start connecting and return at once; the transport reconnects without limit."""
        ...

    def publish(self, topic: str, data: bytes, *, retain: bool = False, qos: Qos = 0) -> None:
        """Send a message without waiting for the network.

        While disconnected, the message is dropped; senders that need an answer repeat it.
        """
        ...

    def close(self, farewell: bytes | None = None) -> None:
        """Disconnect for good, after publishing `farewell` to the will's topic (retained)."""
        ...
