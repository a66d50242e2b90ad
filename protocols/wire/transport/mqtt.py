"""MQTT 3.1.1 through paho-mqtt.

Paho's thread reads, writes and reconnects; its callbacks only put events in the queue. Sessions are
clean: nothing is kept by the broker for us but our retained presence, subscriptions are renewed on
every connection, and whatever a broken connection swallowed is noticed by the application's timers.

After a failure paho waits for a delay that doubles from a first to a longest one until it is connected
again. Both are drawn once for each client id (0.5-1.5 s and 20-40 s), so that a fleet that lost its
broker does not come back in one wave.
"""

import socket
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct
from paho.mqtt.client import (
    MQTT_ERR_SUCCESS,
    Client,
    ConnectFlags,
    DisconnectFlags,
    MQTTMessage,
    topic_matches_sub,
)
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fleetune.protocols.errors import RefusalReason, SettingError, TransportError
from fleetune.protocols.input_files import open_input
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Qos, Received, Will

FAREWELL_S = 2.0
MAX_PEM_BYTES = 2**24
ENCODE = "in user and password write / : @ # ? % as %2F %3A %40 %23 %3F %25"
_PORTS = {"mqtt": 1883, "mqtts": 8883}
_REFUSALS: dict[int, RefusalReason] = {  # by MQTT 5's reason codes, which paho uses for 3.1.1 too
    0x84: "protocol",
    0x85: "client-id",
    0x86: "login",
    0x87: "login",
    0x88: "unavailable",
}
_TAKEN_OVER = 0x8E


class Broker(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the broker is and who we are to it.

    Attributes:
        tls: encrypt; implied by `mqtts://`.
        ca: PEM file of the authority that signed the broker's certificate; None: the system's.
        cert, key: PEM files that prove who we are, for brokers that ask for it.
        keepalive_s: a connection on which nothing came for this long is probed; without an answer
            it is given up after as long again.
    """

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 30

    @property
    def place(self) -> str:
        """`host:port`; an IPv6 address has brackets."""
        return f"{in_url(self.host)}:{self.port}"

    def __repr__(self) -> str:  # never the password
        return f"{'mqtts' if self.tls else 'mqtt'}://{self.place}"


def in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address has brackets."""
    return f"[{host}]" if ":" in host else host


def parse_broker(text: str, ca: str | None = None, cert: str | None = None, key: str | None = None) -> Broker:
    """`host`, `host:port`, `mqtt://user:password@host:port` or `mqtts://...`, the latter with TLS.

    Args:
        text: one of these. An IPv6 address stands in brackets where a port follows it.
        ca: see `Broker`; with it it is TLS in any case.
        cert: see `Broker`.
        key: see `Broker`.

    Raises:
        SettingError: it is none of these.
    """
    try:
        url = urlsplit(_with_scheme(text))
        port = url.port
        host = (url.hostname or "").encode("idna").decode()
    except (ValueError, UnicodeError) as problem:  # its words may quote the password
        too_large = "out of range" in str(problem)
        raise _not_an_address(
            "the port is out of range" if too_large else "host or port is not valid"
        ) from None
    if url.scheme not in _PORTS:
        raise _not_an_address("it is not mqtt:// or mqtts://")
    if not host or port == 0:
        raise _not_an_address("host or port is missing")
    if url.path.strip("/") or url.query or url.fragment:
        raise _not_an_address("something follows host and port")
    return Broker(
        host=host,
        port=port or _PORTS[url.scheme],
        username=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
        tls=url.scheme == "mqtts" or ca is not None,
        ca=ca,
        cert=cert,
        key=key,
    )


def _with_scheme(text: str) -> str:
    if "://" in text:
        return text
    return f"mqtt://[{text}]" if text.count(":") > 1 and not set(text) & set("[@") else f"mqtt://{text}"


def _not_an_address(reason: str) -> SettingError:
    """A line without any part of the text: the place where a password ends is not known in a wrong text."""
    return SettingError(
        f"the broker's address cannot be read: {reason}; use host:port, mqtt://user:password@host:port"
        f" or mqtts://...; {ENCODE}"
    )


class MqttTransport:
    """A `Transport` to an MQTT broker.

    Args:
        broker: where.
        client_id: unique among the broker's clients; a second one of that name throws the first out.
        subscriptions: topic filters.
        events: where events go; paho's thread puts them.
        will: published by the broker when we vanish.
        protocol: MQTT 3.1.1, which every broker speaks; 5 for what only that tells.

    Raises:
        TransportError: a TLS file is missing or unreadable.
    """

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        *,
        subscriptions: Iterable[str],
        events: EventSink,
        will: Will | None = None,
        protocol: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311,
    ) -> None:
        self.events = events
        self._broker = broker
        self._protocol = protocol
        self._client_id = client_id
        self._subscriptions = [(filter_, 0) for filter_ in subscriptions]
        self._will = will
        self._connected = False
        self._refusal: str | None = None
        self._refusal_reason: RefusalReason | None = None
        self._client = self._make_client()

    def connect(self) -> None:
        self._client.connect_async(self._broker.host, self._broker.port, self._broker.keepalive_s)
        self._client.loop_start()

    def publish(self, topic: str, data: bytes, *, retain: bool = False, qos: Qos = 0) -> None:
        if self._connected:
            self._client.publish(topic, data, qos=qos, retain=retain)

    def close(self, farewell: bytes | None = None) -> None:
        if self._connected and self._will is not None and farewell is not None:
            info = self._client.publish(self._will.topic, farewell, qos=1, retain=True)
            if info.rc == MQTT_ERR_SUCCESS:
                info.wait_for_publish(FAREWELL_S)
        self._client.disconnect()
        self._client.loop_stop()

    def _make_client(self) -> Client:
        clean = True if self._protocol == MQTTProtocolVersion.MQTTv311 else None  # paho: not with MQTT 5
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=clean,
            protocol=self._protocol,
        )
        if self._broker.username is not None:
            client.username_pw_set(self._broker.username, self._broker.password)
        if self._broker.tls:
            self._set_tls(client)
        if self._will is not None:
            client.will_set(self._will.topic, self._will.data, qos=1, retain=True)
        shortest, longest = Key.of("fleetune", "reconnect", self._client_id).uniform(2)
        client.reconnect_delay_set(0.5 + shortest, 20 + 20 * longest)
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_socket_open = _send_small_packets_at_once
        return client

    def _set_tls(self, client: Client) -> None:
        given = [one for one in (self._broker.ca, self._broker.cert, self._broker.key) if one is not None]
        try:
            for one in given:  # OpenSSL would wait for a pipe without end
                open_input(Path(one), MAX_PEM_BYTES, error=ValueError).close()
            client.tls_set(self._broker.ca, self._broker.cert, self._broker.key)
        except (OSError, ValueError) as problem:
            files = ", ".join(given)
            raise TransportError(f"TLS files {files}: {problem}; they must be readable PEM files") from None

    def _on_connect(
        self,
        client: Client,
        _data: Any,
        _flags: ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            self._refusal = refused(str(reason), self._broker)
            self._refusal_reason = _REFUSALS.get(reason.value)
            return
        if self._subscriptions:
            client.subscribe(self._subscriptions)
        self._refusal = self._refusal_reason = None
        self._connected = True
        self.events.put(Connected())

    def _on_connect_fail(self, _client: Client, _data: Any) -> None:
        self.events.put(Disconnected(explain(self._broker)))

    def _on_disconnect(
        self,
        _client: Client,
        _data: Any,
        _flags: DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self._connected = False
        why = (
            "" if str(reason) == "Unspecified error" else f" ({reason})"
        )  # paho's word for any lost connection
        lost = f"connection to {self._broker} ended{why}"
        refusal = "name-taken" if reason.value == _TAKEN_OVER else self._refusal_reason
        said = self._refusal or (lost if reason.is_failure else "closed")
        self.events.put(Disconnected(said, refusal))

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        if message.retain and not self._wants(message.topic):
            return  # amqtt tells a session that comes back what is retained for all others
        self.events.put(Received(message.topic, bytes(message.payload), message.retain))

    def _wants(self, topic: str) -> bool:
        """Whether it subscribed to that; a client that does so later, by itself, is told all."""
        known = self._subscriptions
        return not known or any(topic_matches_sub(filter_, topic) for filter_, _ in known)


def _send_small_packets_at_once(_client: Client, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def refused(reason: str, broker: Broker) -> str:
    """That a broker lets us not in, and what to do, in one line."""
    return f"{broker} refuses us: {_advice(reason, broker)}"


def _advice(reason: str, broker: Broker) -> str:
    if reason in ("Bad user name or password", "Not authorized"):
        who = f"user {broker.username!r}" if broker.username else "a client without user name"
        return f"{reason.lower()} for {who}; check user and password in mqtt://user:password@host; {ENCODE}"
    return reason.lower()


def explain(broker: Broker) -> str:
    """Why a broker is not reached, in one line. To be asked in paho's `on_connect_fail`: that is called while
    the exception is handled, and is told of it in no other way.
    """
    problem = sys.exception()
    match problem:
        case socket.gaierror():
            return f"host {broker.host!r} is unknown; check the name and the network"
        case ssl.SSLCertVerificationError():
            return (
                f"{broker}: its certificate is not trusted ({problem.verify_message}); give the authority's "
                "PEM file, and use the host name that stands in the certificate"
            )
        case ssl.SSLError():
            return f"{broker}: TLS failed ({problem.reason}); is this the broker's TLS port?"
        case ConnectionRefusedError():
            return f"{broker}: nobody listens there; is the broker running?"
        case TimeoutError():
            return f"{broker}: no answer; check address, network and firewall"
        case _:
            return f"{broker}: {problem}"
