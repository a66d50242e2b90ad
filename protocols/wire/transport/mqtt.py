"""A transport over MQTT 3.1.1 with paho-mqtt.

Paho's thread reads, writes and reconnects; its callbacks only put events in the queue. Sessions are clean:
the broker stores only the retained presence of a client. Subscriptions are renewed on every connection. The
application's timers detect messages that a broken connection lost.

After a failure paho waits before it reconnects. The delay doubles from a first to a longest one. Both are
drawn once for each client id (0.5-1.5 s and 20-40 s). So the devices of a fleet do not all reconnect at the
same moment after a broker's outage.
"""

import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct
from msgspec.structs import replace
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

from fleetune.protocols.errors import FleetuneError, RefusalReason, SettingError, TransportError
from fleetune.protocols.input_files import open_input
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.topics import PROBE
from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Qos, Received, Will
from fleetune.protocols.wire.transport.tls import (
    CLOCK_BEHIND,
    EXPIRED,
    NOT_YET_VALID,
    TlsConnections,
    refused_certificate,
)

FAREWELL_S = 2.0
MAX_PEM_BYTES = 2**24
ENCODE = "in user and password write / : @ # ? % as %2F %3A %40 %23 %3F %25"
MOVED = "if the coordinator has moved, join again: edge-agent join LINE"
_PORTS = {"mqtt": 1883, "mqtts": 8883}
_REFUSALS: dict[int, RefusalReason] = {  # keys are MQTT 5's reason codes, which paho uses for 3.1.1 too
    0x84: "protocol",
    0x85: "client-id",
    0x86: "login",
    0x87: "login",
    0x88: "unavailable",
}
_TAKEN_OVER = 0x8E


class Broker(Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the broker, and this client's credentials.

    Attributes:
        tls: True to encrypt; implied by `mqtts://`.
        ca: PEM file of the authority that signed the broker's certificate; None for the system's authorities.
        cert, key: PEM files with this client's certificate and key, for brokers that require them. `cert`
            may hold both.
        joined: True for the broker of a fleet that this device has joined. It serves only this fleet, so a
            device's client id is its name. `ca` is the authority of the fleet, which signs for its
            coordinator only, so the broker's address is not checked.
        probe_cert: as `cert`, for the second connection of a device that has joined.
        keepalive_s: seconds of silence after which a connection is probed; it is closed if no answer comes
            within the same time again.
    """

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    joined: bool = False
    probe_cert: str | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 30

    @property
    def place(self) -> str:
        """`host:port`; brackets enclose an IPv6 address."""
        return f"{in_url(self.host)}:{self.port}"

    @property
    def second(self) -> "Broker":
        """The same broker with the credentials of a device's second connection."""
        if not self.joined:
            return self
        user = None if self.username is None else f"{self.username}~{PROBE}"
        return replace(self, cert=self.probe_cert, username=user)

    def __repr__(self) -> str:  # never show the password
        return f"{'mqtts' if self.tls else 'mqtt'}://{self.place}"


def in_url(host: str) -> str:
    """Return a host in the form that a URL needs: brackets enclose an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def parse_broker(text: str, ca: str | None = None, cert: str | None = None, key: str | None = None) -> Broker:
    """Parse the address of a broker: `host`, `host:port`, `mqtt://user:password@host:port` or `mqtts://...`.

    `mqtts` uses TLS.

    Args:
        text: the address in one of these forms. An IPv6 address needs brackets if a port follows it.
        ca: see `Broker`; if given, the connection always uses TLS.
        cert: see `Broker`.
        key: see `Broker`.

    Raises:
        SettingError: the text has none of these forms.
    """
    try:
        url = urlsplit(_with_scheme(text))
        port = url.port
        host = (url.hostname or "").encode("idna").decode()
    except (ValueError, UnicodeError) as problem:  # the exception's text may quote the password
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
    """Return an error that quotes no part of the text, because it may contain a password."""
    return SettingError(
        f"the broker's address cannot be read: {reason}; use host:port, mqtt://user:password@host:port"
        f" or mqtts://...; {ENCODE}"
    )


class MqttTransport:
    """A `Transport` to an MQTT broker.

    Args:
        broker: address of the broker.
        client_id: unique among the broker's clients; a second client with the same id disconnects the first.
        subscriptions: topic filters.
        events: sink of the events; paho's thread puts them.
        will: message that the broker publishes if this client vanishes.
        protocol: MQTT 3.1.1, which every broker supports; 5 to get reason codes that only MQTT 5 has.
        present: returns the broker with its present address. It is called before each attempt to connect, by
            paho's thread; a `FleetuneError` leaves the address unchanged. None if the address never changes.

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
        present: Callable[[], Broker] | None = None,
    ) -> None:
        self.events = events
        self._present = present
        self._broker = broker
        self._protocol = protocol
        self._client_id = client_id
        self._subscriptions = [(filter_, 0) for filter_ in subscriptions]
        self._will = will
        self._connected = False
        self._refusal: str | None = None
        self._refusal_reason: RefusalReason | None = None
        self._tls: TlsConnections | None = self._tls_connections() if broker.tls else None
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
        # paho rejects this argument with MQTT 5
        clean = True if self._protocol == MQTTProtocolVersion.MQTTv311 else None
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=clean,
            protocol=self._protocol,
        )
        if self._broker.username is not None:
            client.username_pw_set(self._broker.username, self._broker.password)
        if self._tls is not None:
            client.tls_set_context(self._tls)  # type: ignore[arg-type]
        if self._will is not None:
            client.will_set(self._will.topic, self._will.data, qos=1, retain=True)
        shortest, longest = Key.of("fleetune", "reconnect", self._client_id).uniform(2)
        client.reconnect_delay_set(0.5 + shortest, 20 + 20 * longest)
        client.on_pre_connect = self._find_broker
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_socket_open = _send_small_packets_at_once
        return client

    def _tls_connections(self) -> TlsConnections:
        broker = self._broker
        given = [one for one in (broker.ca, broker.cert, broker.key) if one is not None]
        try:
            for one in given:  # OpenSSL would wait for ever on a named pipe
                open_input(Path(one), MAX_PEM_BYTES, error=ValueError).close()
            return TlsConnections(broker.ca, broker.cert, broker.key, joined=broker.joined)
        except (OSError, ValueError) as problem:
            files = ", ".join(given)
            raise TransportError(f"TLS files {files}: {problem}; they must be readable PEM files") from None

    def _find_broker(self, client: Client, _data: Any) -> None:
        if self._present is not None:
            with suppress(FleetuneError):
                self._broker = self._present()
            # paho's own setters refuse a change during an attempt to connect
            client._host, client._port = self._broker.host, self._broker.port  # noqa: SLF001

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
        # "Unspecified error" is paho's text for any lost connection
        why = "" if str(reason) == "Unspecified error" else f" ({reason})"
        lost = self._refused_certificate() or f"connection to {self._broker} ended{why}"
        refusal = "name-taken" if reason.value == _TAKEN_OVER else self._refusal_reason
        said = self._refusal or (lost if reason.is_failure else "closed")
        self.events.put(Disconnected(said, refusal))

    def _refused_certificate(self) -> str | None:
        """Return one line if the broker has just refused this client's certificate."""
        if self._tls is None or self._tls.alert is None:
            return None
        return refused_certificate(self._tls.alert, str(self._broker), joined=self._broker.joined)

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        if message.retain and not self._wants(message.topic):
            return  # bug of amqtt: a returning session gets the retained messages of all other clients
        self.events.put(Received(message.topic, bytes(message.payload), message.retain))

    def _wants(self, topic: str) -> bool:
        """True if this client subscribed to the topic, or had no subscriptions at the start."""
        known = self._subscriptions
        return not known or any(topic_matches_sub(filter_, topic) for filter_, _ in known)


def _send_small_packets_at_once(_client: Client, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def refused(reason: str, broker: Broker) -> str:
    """Return one line that names the broker that refuses this client, and what to do."""
    return f"{broker} refuses us: {_advice(reason, broker)}"


def _advice(reason: str, broker: Broker) -> str:
    if reason in ("Bad user name or password", "Not authorized"):
        who = f"user {broker.username!r}" if broker.username else "a client without user name"
        return f"{reason.lower()} for {who}; check user and password in mqtt://user:password@host; {ENCODE}"
    return reason.lower()


def explain(broker: Broker) -> str:
    """Return the reason why a broker cannot be reached, in one line.

    Call this in paho's `on_connect_fail`. Paho calls `on_connect_fail` while it handles the exception, and
    does not pass the exception as an argument.
    """
    problem = sys.exception()
    match problem:
        case socket.gaierror():
            return f"host {broker.host!r} is unknown; check the name and the network{_moved(broker)}"
        case ssl.SSLCertVerificationError():
            return _not_trusted(broker, problem)
        case ssl.SSLError():
            refused_line = refused_certificate(problem.reason or "", str(broker), joined=broker.joined)
            return refused_line or f"{broker}: TLS failed ({problem.reason}); is this the broker's TLS port?"
        case ConnectionRefusedError():
            return f"{broker}: no program listens there; start the broker, or check its port{_moved(broker)}"
        case TimeoutError() | OSError(strerror=str()):
            what = unanswered(problem)
            return f"{broker}: {what}; check address, network and firewall{_moved(broker)}"
        case _:
            return f"{broker}: {problem}"


def unanswered(problem: OSError) -> str:
    """Return why an address does not answer, in words: "no answer", "no route to host"."""
    return "no answer" if isinstance(problem, TimeoutError) else str(problem.strerror).lower()


def _moved(broker: Broker) -> str:
    """Return what to do if a joined fleet's coordinator has another address now; "" for other brokers."""
    return f"; {MOVED}" if broker.joined else ""


def _not_trusted(broker: Broker, problem: ssl.SSLCertVerificationError) -> str:
    """Return why the broker's certificate is not valid, in one line."""
    if not broker.joined:
        return (
            f"{broker}: its certificate is not trusted ({problem.verify_message}); give the authority's "
            "PEM file, and use the host name in the certificate"
        )
    if problem.verify_code == NOT_YET_VALID:
        return f"{broker}: {CLOCK_BEHIND}"
    if problem.verify_code == EXPIRED:
        return f"{broker}: its certificate has expired, or this device's clock is ahead; set the clock"
    return (
        f"{broker} is not the broker of the fleet that this device has joined ({problem.verify_message});"
        " check the network, or join again with a new invitation: edge-agent join LINE"
    )
