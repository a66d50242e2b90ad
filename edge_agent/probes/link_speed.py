"""Measures the link to the broker with a few messages on the device's own topic.

A PUBACK proves that the broker has the message, so the time until the PUBACK measures the uplink. A retained
message, which the broker sends for every subscription, measures the downlink. An echo would not separate the
two: mosquitto sends the echo before the PUBACK, on the same connection (measured on loopback: 6.0 and 6.35 ms
for 1 MiB).
"""

import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from paho.mqtt.enums import MQTTProtocolVersion

from fleetune.protocols.errors import TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import Connected, Disconnected, Received, Will
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

FIRST_BYTES = 16_384
LAST_BYTES = 2**20
ENOUGH_S = 0.5
_IN_FLIGHT_BYTES = 2**17
_CONNECT_S = 10.0
# seconds for one byte to come back; after that, it is taken as forbidden
_ALLOWED_S, _ALLOWED_TRIPS = 3.0, 20
_NUM_PINGS = 5


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth and round-trip time of a link; None if unknown.

    Attributes:
        uplink_bps, downlink_bps: payload bits per second.
        round_trip_s: from the publication of the smallest message to the broker's acknowledgement.
        unknown: the reason for figures that are None, or "".
    """

    uplink_bps: float | None = None
    downlink_bps: float | None = None
    round_trip_s: float | None = None
    unknown: str = ""


@dataclass(frozen=True)
class _Acknowledged:
    message: int


class ProbeConnection(MqttTransport):
    """A separate connection to the broker for measurements. When it ends, its topic is cleared."""

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        topic: str,
        clock: Callable[[], float],
        patience_s: float,
        protocol: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311,
    ) -> None:
        arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        will = Will(topic, b"")
        super().__init__(broker, client_id, subscriptions=(), events=arrivals, will=will, protocol=protocol)
        self._arrivals, self._topic, self._clock, self._patience_s = arrivals, topic, clock, patience_s
        self._client.on_publish = lambda _client, _data, message, *_: arrivals.put(_Acknowledged(message))

    def close(self, farewell: bytes | None = b"") -> None:
        super().close(farewell)

    def open(self, patience_s: float = _CONNECT_S) -> None:
        """Connect to the broker within `patience_s` seconds.

        Raises:
            TransportError: the broker cannot be reached, or refuses the connection.
        """
        self.connect()
        self._wait(lambda event: isinstance(event, Connected), patience_s, f"{self._broker} does not answer")

    def deliver(self, data: bytes, *, retain: bool = False) -> float:
        """Publish a message, and return the seconds until the broker has acknowledged it.

        Raises:
            TransportError: the acknowledgement does not come in time, or the connection is lost.
        """
        began, failure = self._clock(), f"{self._broker} does not acknowledge {len(data):,} bytes"
        sent = self._client.publish(self._topic, data, qos=1, retain=retain)
        self._wait(lambda event: event == _Acknowledged(sent.mid), self._patience_s, failure)
        return self._clock() - began

    def fetch(self, num_bytes: int, times: int, patience_s: float | None = None) -> float:
        """Make the broker send the retained message of this size `times` times; return the seconds until all
        arrived.

        Few are requested at once, because mosquitto drops messages for a slow client's socket.

        Args:
            num_bytes: size of the message.
            times: number of messages.
            patience_s: most seconds for one message; None to use the limit for any message.

        Raises:
            TransportError: the messages do not arrive in time, or the connection is lost.
        """
        began = self._clock()
        failure = f"{self._topic} does not come back (this device needs the right to write and read it)"
        window = max(2, _IN_FLIGHT_BYTES // num_bytes)
        for asked in range(times + window):
            if asked < times:
                self._client.subscribe(self._topic)
            if asked >= window:
                patience = self._patience_s if patience_s is None else patience_s
                self._wait(lambda event: _is_whole(event, num_bytes), patience, failure)
        seconds = self._clock() - began
        self._client.unsubscribe(self._topic)
        return seconds

    def _wait(self, wanted: Callable[[Any], bool], patience_s: float, failure: str) -> Any:
        """Wait for an event that is `wanted`, and return it.

        Raises:
            TransportError: none came in time, or the connection is lost.
        """
        give_up_at = self._clock() + patience_s
        while True:
            left_s = give_up_at - self._clock()
            try:
                event = self._arrivals.get(timeout=max(0.0, left_s))
            except queue.Empty:
                raise TransportError(f"{failure} within {patience_s:g} s") from None
            if left_s < 0:  # other events keep arriving
                raise TransportError(f"{failure} within {patience_s:g} s")
            if isinstance(event, Disconnected):
                raise TransportError(event.reason, event.refusal)
            if wanted(event):
                return event


def _is_whole(event: Any, num_bytes: int) -> bool:
    return isinstance(event, Received) and len(event.data) == num_bytes


def measure_link(
    broker: Broker,
    fleet: str,
    device: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    patience_s: float = 60.0,
) -> LinkSpeed:
    """Measure the link with messages that double from 16 kB until one takes half a second or has 1 MiB.

    At most 2 MiB go up and 4 MiB down. The link should be idle meanwhile. An agent may stay connected, as
    this is another client (`topics.client_id`).

    Args:
        broker: address and credentials.
        fleet: the device's fleet.
        device: its topic `probe` is used, which it must be allowed to write and read.
        clock: monotonic seconds.
        patience_s: most seconds of one message.
    """
    (client_id, topic), found = topics.probe(fleet, device, joined=broker.joined), LinkSpeed()
    try:
        with closing(ProbeConnection(broker.second, client_id, topic, clock, patience_s)) as line:
            line.open()
            for better in _measure(line):
                found = better
    except TransportError as problem:
        return replace(found, unknown=str(problem) if found.downlink_bps is None else "")
    return found


def _measure(line: ProbeConnection) -> Iterator[LinkSpeed]:
    """Yield results, each more accurate than the one before.

    If a message is refused, the last result counts.
    """
    trip_s = median(line.deliver(b".") for _ in range(_NUM_PINGS))
    found, num_bytes, times, up_s, down_s = LinkSpeed(round_trip_s=trip_s), FIRST_BYTES, 1, 0.0, 0.0
    yield found
    line.deliver(b".", retain=True)
    line.fetch(1, 1, max(_ALLOWED_S, _ALLOWED_TRIPS * trip_s))  # otherwise each message would be waited for
    while True:
        up_s = line.deliver(os.urandom(num_bytes), retain=True)
        found = replace(found, uplink_bps=_rate(num_bytes, up_s, trip_s))
        if down_s < ENOUGH_S:
            down_s = line.fetch(num_bytes, 1)
            found = replace(found, downlink_bps=_rate(num_bytes, down_s, trip_s))
        yield found
        if up_s >= ENOUGH_S or num_bytes >= LAST_BYTES:
            break
        num_bytes *= 2
    while down_s < ENOUGH_S and times * num_bytes < LAST_BYTES:  # the downlink is faster than the uplink
        times *= 2
        down_s = line.fetch(num_bytes, times)
        yield replace(found, downlink_bps=_rate(times * num_bytes, down_s, trip_s))


def _rate(num_bytes: int, seconds: float, trip_s: float) -> float:
    """Return bits per second without the round trip, of which at most half of the time is deducted."""
    return num_bytes * 8 / max(seconds - trip_s, seconds / 2, 1e-9)
