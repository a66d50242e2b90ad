"""A broker in this process, for tests: `publish` delivers everything at once, in order."""

import threading
from collections.abc import Iterable

from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Qos, Received, Will


class MemoryBroker:
    """Routes between `MemoryTransport`s. Topic filters may use `+`; retained messages are kept."""

    def __init__(self) -> None:
        self._clients: list[MemoryTransport] = []
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def client(
        self, subscriptions: Iterable[str], events: EventSink, will: Will | None = None
    ) -> "MemoryTransport":
        return MemoryTransport(self, tuple(subscriptions), events, will)

    def join(self, client: "MemoryTransport") -> None:
        with self._lock:
            self._clients.append(client)
            client.events.put(Connected())
            for topic, data in sorted(self._retained.items()):
                if client.wants(topic):
                    client.events.put(Received(topic, data, retained=True))

    def leave(self, client: "MemoryTransport", message: Will | None, reason: str) -> None:
        """Remove `client` and publish its `message`; do nothing if the client is not connected."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
                client.events.put(Disconnected(reason))
                if message is not None:
                    self.route(message.topic, message.data, retain=True)

    def has(self, client: "MemoryTransport") -> bool:
        with self._lock:
            return client in self._clients

    def route(self, topic: str, data: bytes, *, retain: bool) -> None:
        with self._lock:
            if retain and data:
                self._retained[topic] = data
            elif retain:
                self._retained.pop(topic, None)
            for client in self._clients:
                if client.wants(topic):
                    client.events.put(Received(topic, data))


class MemoryTransport:
    """A `Transport` to a `MemoryBroker`."""

    def __init__(
        self, broker: MemoryBroker, subscriptions: tuple[str, ...], events: EventSink, will: Will | None
    ) -> None:
        self.events = events
        self._broker = broker
        self._filters = [filter_.split("/") for filter_ in subscriptions]
        self._will = will

    def connect(self) -> None:
        self._broker.join(self)

    def publish(self, topic: str, data: bytes, *, retain: bool = False, qos: Qos = 0) -> None:  # noqa: ARG002
        if self._broker.has(self):
            self._broker.route(topic, data, retain=retain)

    def close(self, farewell: bytes | None = None) -> None:
        message = Will(self._will.topic, farewell) if self._will and farewell is not None else None
        self._broker.leave(self, message, "closed")

    def drop(self) -> None:
        """Break the connection: the broker publishes the will. `connect` restores it."""
        self._broker.leave(self, self._will, "connection lost")

    def wants(self, topic: str) -> bool:
        parts = topic.split("/")
        return any(
            len(parts) == len(filter_)
            and all(want in ("+", part) for want, part in zip(filter_, parts, strict=True))
            for filter_ in self._filters
        )
