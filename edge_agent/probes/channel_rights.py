"""Tests which topics a device may write and read at its broker, by messages that the coordinator answers.

MQTT 3.1.1 reports success even if access rules forbid a publication, and some brokers accept every
subscription. So the rights are derived from the answers. The device sends a `Ping` on each channel that it
writes, and on its own `probe`:

    its ping on `probe` comes back      it may write and read there
    a `Pong` comes, by any channel      the coordinator runs, and the ping's channel is writable
    no `Pong` for one channel's ping    that channel is not writable (if others are answered)
    no `Pong` by one channel            that channel is not readable (if others bring some)

MQTT 5 answers a forbidden publication with an error. With such a broker, writable channels are known without
a coordinator. A channel whose subscription the broker refuses is not readable, with a coordinator or without.
"""

import queue
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from paho.mqtt.enums import MQTTProtocolVersion

from fleetune.edge_agent.probes.link_speed import ProbeConnection
from fleetune.protocols.errors import TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.messages import Ping, encode, read_ping, read_pong
from fleetune.protocols.wire.topics import FROM_DEVICE, PROBE, TO_DEVICE, Channel
from fleetune.protocols.wire.transport import Disconnected, Received
from fleetune.protocols.wire.transport.mqtt import Broker

ANSWER_S = 3.0  # seconds for the answers after all pings are acknowledged
_ACKNOWLEDGE_S = 5.0  # seconds for each ping
_CONNECT_S = 10.0
_SPEAKS_5_S = 3.0  # a broker without MQTT 5 may not answer at all
# `up` is last: a broker keeps a connection's order, so an answer to `up` comes after all others.
_PINGED: tuple[Channel, ...] = (PROBE, *(one for one in FROM_DEVICE if one != "up"), "up")


@dataclass(frozen=True)
class ChannelRights:
    """Answers to the pings.

    Attributes:
        fleet: the device's fleet.
        name: name of the device in the tested topics, see `topics.probe_name`.
        user: user name at the broker; None for no user name.
        echo: True if the device received its own ping on `probe`.
        acknowledged: by channel, True if the broker accepted the ping; None if unknown with MQTT 3.1.1.
        answered: by a ping's channel, the channels that brought its answer.
        refused: channels whose subscription the broker refused.
    """

    fleet: str
    name: str
    user: str | None
    echo: bool
    acknowledged: Mapping[Channel, bool | None]
    answered: Mapping[Channel, frozenset[str]]
    refused: frozenset[Channel] = frozenset()

    @property
    def has_coordinator(self) -> bool:
        """True if a coordinator answered."""
        return any(self.answered.values())

    @property
    def unwritable(self) -> list[str]:
        """Topics that the user may not write."""
        found = [channel for channel in _PINGED if self.acknowledged[channel] is False]
        if self.has_coordinator:
            found += [one for one in FROM_DEVICE if not self.answered[one] and one not in found]
        return [self._topic(channel) for channel in found]

    @property
    def unreadable(self) -> list[str]:
        """Topics that the user may not read."""
        came, found = frozenset().union(*self.answered.values()), set(self.refused)
        if self.has_coordinator:
            found.update(channel for channel in TO_DEVICE if channel not in came)
        if not self.echo and self.acknowledged[PROBE] is True and PROBE not in self.refused:
            # Nothing arrived on channels that the rules make readable. Without a coordinator that is normal
            # for all.
            found.update((PROBE,) if self.has_coordinator else (*TO_DEVICE, PROBE))
        return [self._topic(channel) for channel in (*TO_DEVICE, PROBE) if channel in found]

    @property
    def problem(self) -> str | None:
        """The missing rights, in one line; None if no right is missing."""
        who = "a client without user name" if self.user is None else f"user {self.user!r}"
        said = []
        if self.unwritable:
            said.append(f"publish to {', '.join(self.unwritable)}")
        if self.unreadable:
            said.append(f"read {', '.join(self.unreadable)}")
        if not said and not self.echo:
            below = f"{topics.ROOT}/{self.fleet}/{self.name}/"
            said.append(f"publish to its own topics, or may not read them ({below}...)")
        if not said:
            return None
        return f"{who} may not {', and may not '.join(said)}"

    @property
    def remedy(self) -> str:
        """The remedy for `problem`."""
        allow = (
            "allow that in the broker's access rules, as"
            f" `edge-coordinator broker-config --fleet {self.fleet}` writes them"
        )
        if self.user in (None, self.name):
            return allow
        return f"give --device {self.user} if each user may reach the device of its name only, or {allow}"

    def _topic(self, channel: Channel) -> str:
        return topics.topic(self.fleet, self.name, channel)


@dataclass(frozen=True)
class _Acknowledged:
    message: int
    refused: bool


@dataclass(frozen=True)
class _Subscribed:
    message: int
    refused: bool


class _Tester(ProbeConnection):
    """A connection that sends pings."""

    def __init__(self, broker: Broker, fleet: str, device: str, protocol: MQTTProtocolVersion) -> None:
        client_id, topic = topics.probe(fleet, device, joined=broker.joined)
        super().__init__(broker.second, client_id, topic, time.monotonic, _CONNECT_S, protocol)
        self._fleet, self._name = fleet, topics.probe_name(device, joined=broker.joined)
        self._client.on_publish = lambda _client, _data, message, reason, _properties: self.events.put(
            _Acknowledged(message, reason.is_failure)  # type: ignore[arg-type]
        )
        self._client.on_subscribe = lambda _client, _data, message, reasons, _properties: self.events.put(
            _Subscribed(message, any(reason.is_failure for reason in reasons))  # type: ignore[arg-type]
        )
        self._nonce = uuid.uuid4().hex[:12]
        self._echo, self._refused = False, set[int]()
        self._answered: dict[Channel, set[str]] = {channel: set() for channel in _PINGED}

    def test(self) -> ChannelRights:
        """Ping on each channel and return the answers."""
        asked = {channel: self._subscribe(channel) for channel in (*TO_DEVICE, PROBE)}
        acknowledged = {channel: self._ping(channel) for channel in _PINGED}
        give_up_at = time.monotonic() + ANSWER_S
        while not self._has_all and self._next(give_up_at) is not None:
            pass
        speaks_5 = self._protocol == MQTTProtocolVersion.MQTTv5
        return ChannelRights(
            self._fleet,
            self._name,
            self._broker.username or (self._name if self._broker.joined else None),
            self._echo,
            {one: taken if speaks_5 or not taken else None for one, taken in acknowledged.items()},
            {one: frozenset(came) for one, came in self._answered.items() if one != PROBE},
            frozenset(channel for channel, message in asked.items() if message in self._refused),
        )

    def _subscribe(self, channel: Channel) -> int | None:
        """Id of the message; None if the connection has ended."""
        return self._client.subscribe(topics.topic(self._fleet, self._name, channel))[1]

    def _ping(self, channel: Channel) -> bool:
        """Send a ping, and return True if the broker accepts it.

        Some brokers instead close the connection.
        """
        topic = topics.topic(self._fleet, self._name, channel)
        sent = self._client.publish(topic, encode(Ping(f"{self._nonce}/{channel}")), qos=1)
        give_up_at = time.monotonic() + _ACKNOWLEDGE_S
        while (event := self._next(give_up_at)) is not None:
            if isinstance(event, _Acknowledged) and event.message == sent.mid:
                return not event.refused
            if isinstance(event, Disconnected):
                return False
        return False

    @property
    def _has_all(self) -> bool:
        wanted = {*TO_DEVICE, PROBE}
        return self._echo and all(self._answered[channel] == wanted for channel in FROM_DEVICE)

    def _next(self, give_up_at: float) -> Any:
        """Return the next event, after recording its content; None if none came in time."""
        try:
            event = self._arrivals.get(timeout=max(0.0, give_up_at - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(event, Received):
            self._note(event)
        if isinstance(event, _Subscribed) and event.refused:
            self._refused.add(event.message)
        return event

    def _note(self, event: Received) -> None:
        by = event.topic.rpartition("/")[2]
        ping, pong = read_ping(event.data), read_pong(event.data)
        if ping is not None and ping.nonce == f"{self._nonce}/{PROBE}":
            self._echo = True
        for channel, came in self._answered.items():
            if pong is not None and pong.nonce == f"{self._nonce}/{channel}":
                came.add(by)


def find_channel_rights(broker: Broker, fleet: str, device: str) -> ChannelRights:
    """Test which topics a device's user may write and read, which takes about 10 s.

    An agent may stay connected, as this is another client (`topics.probe`). If the broker derives client ids
    from user names, the agent's connection ends, and it reconnects.

    Args:
        broker: address and credentials.
        fleet: the device's fleet.
        device: the device's name.

    Raises:
        TransportError: the broker cannot be reached, or refuses the connection.
    """
    try:
        return _tested(broker, fleet, device, MQTTProtocolVersion.MQTTv5, _SPEAKS_5_S)
    except TransportError:  # amqtt speaks only MQTT 3.1.1
        return _tested(broker, fleet, device, MQTTProtocolVersion.MQTTv311, _CONNECT_S)


def _tested(
    broker: Broker, fleet: str, device: str, protocol: MQTTProtocolVersion, connect_s: float
) -> ChannelRights:
    with closing(_Tester(broker, fleet, device, protocol)) as tester:
        tester.open(connect_s)
        return tester.test()
