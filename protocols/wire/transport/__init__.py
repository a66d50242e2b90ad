"""The seam to the network: publish bytes to a topic, and events in a queue.

A serve loop blocks on one queue with a timeout. The transport only puts events there, so the queue may
be shared with whatever else the loop waits for.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from fleetune.protocols.errors import RefusalReason

Qos = Literal[0, 1]


@dataclass(frozen=True)
class Connected:
    """The broker took us and the subscriptions are asked for. Comes after every reconnection."""


@dataclass(frozen=True)
class Disconnected:
    """Not connected, with the reason in one line; the transport keeps trying, and each failed attempt
    gives another of these. `refusal`: why the broker refuses us; None: another reason, or not known.
    """

    reason: str
    refusal: RefusalReason | None = None


@dataclass(frozen=True)
class Received:
    """A message. `retained`: it was on the topic before we subscribed."""

    topic: str
    data: bytes
    retained: bool = False


Event = Connected | Disconnected | Received


class EventSink(Protocol):
    """Where events go: a `queue.SimpleQueue` or `queue.Queue`."""

    def put(self, item: Event, /) -> None: ...


@dataclass(frozen=True)
class Will:
    """What the broker says for us when we vanish: retained, at QoS 1."""

    topic: str
    data: bytes


class Transport(Protocol):
    """One client of a broker. Made with its will, its subscriptions and the sink of its events."""

    def connect(self) -> None:
        """Start connecting, and reconnect for ever; returns at once."""
        ...

    def publish(self, topic: str, data: bytes, *, retain: bool = False, qos: Qos = 0) -> None:
        """Hand over a message; never waits for the network. While disconnected it is dropped: whoever
        needs an answer asks again.
        """
        ...

    def close(self, farewell: bytes | None = None) -> None:
        """Leave for good, with `farewell` published to the will's topic (retained) before."""
        ...
