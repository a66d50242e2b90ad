"""Intake of samples that sensors publish to a broker of their own: `mqtt://HOST:PORT/TOPIC`.

`messages` describes the messages. The agent publishes nothing on these topics. A message of QoS 1 is
acknowledged when its sample is on disk. The broker keeps the session, so it sends unacknowledged messages
again.
A message that arrives twice, such as a retained one, is the same input and is stored once.

This client is separate from the client of the fleet's broker, and uses the user and password in its own URL.
A topic that could belong to a fleet is refused, so that no sample ever reaches a fleet's topic.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paho.mqtt.client import Client, MQTTMessage, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.edge_agent.stream.intakes.messages import (
    MAX_MESSAGE_BYTES,
    ParsedMessage,
    read_message,
    store_messages,
)
from fleetune.edge_agent.stream.intakes.write_queue import MAX_WAITING_BYTES, WriteQueue
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import ENCODE, Broker, explain, parse_broker, refused

SCHEMES = ("mqtt", "mqtts")
MAX_TOPIC = 500  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1, 30  # shortest and longest pause before it connects again
_JSON = b"{ \t\r\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SensorTopic:
    """The topics to which sensors publish.

    Attributes:
        broker: the sensors' broker.
        filter: topic filter; `+` and `#` are allowed after its first level.
    """

    broker: Broker
    filter: str

    def __str__(self) -> str:  # without the password
        return f"{self.broker}/{self.filter}"


def sensor_topic(source: str) -> SensorTopic | None:
    """Return the topic that a source names; None if the source is not an MQTT URL.

    Raises:
        DataError: the URL is not valid, or its topics could belong to a fleet.
    """
    scheme, _, rest = source.partition("://")
    if scheme not in SCHEMES or rest == "":
        return None
    place, _, topic_filter = rest.partition("/")
    # then the "topic" may be half a password: it must not be shown
    if "@" in topic_filter and "@" not in place:
        raise DataError(
            f"{scheme}://...: an @ after the first /; {ENCODE}; a topic with @ needs a user:"
            f" {scheme}://user@host/topic"
        )
    try:
        broker = parse_broker(f"{scheme}://{place}")
    except SettingError as problem:
        raise DataError(f"data: {problem}") from None
    found = SensorTopic(broker, topic_filter)
    levels = topic_filter.split("/")
    if not topic_filter or len(topic_filter) > MAX_TOPIC or "\0" in topic_filter or not _is_filter(levels):
        raise DataError(f"{found}: the URL needs a valid topic, such as {broker}/plant/motor-3")
    if levels[0] in ("#", "+", topics.ROOT.partition("/")[0]) or levels[0].startswith("$"):
        raise DataError(f"{found}: its topics could belong to a fleet; begin with another first level")
    return found


def _is_filter(levels: list[str]) -> bool:
    whole = all("+" not in one and "#" not in one for one in levels if one not in ("+", "#"))
    return whole and "#" not in levels[:-1]


class _Message(NamedTuple):
    """A received message that is not stored yet."""

    id: int
    qos: int
    content: bytes


class MqttIntake:
    """Stores the samples that arrive on MQTT topics.

    Args:
        store: the device's store.
        topic: the topic filter of the sensors; it may hold wildcards.
    """

    def __init__(self, store: SampleStore, topic: SensorTopic) -> None:
        self._store, self._topic = store, topic
        self._queue = WriteQueue(
            self._keep,
            lambda message: len(message.content),
            lambda problem: store.refusals.add("disk", problem),
            MAX_WAITING_BYTES,
        )
        self._stopped = threading.Event()
        client_key = Key.of("intake", socket.gethostname(), str(store.path.absolute()), str(topic)).value
        self._client = self._make_client(f"fleetune-intake-{client_key:016x}")

    def run(self, stopped: threading.Event) -> None:
        """Store the samples that arrive until `stopped` is set; reconnect whenever the broker is lost."""
        self._stopped = stopped
        self._client.connect_async(self._topic.broker.host, self._topic.broker.port, 30)
        self._client.loop_start()
        try:
            self._queue.run(stopped)
        finally:
            self._client.disconnect()
            self._client.loop_stop()

    def _keep(self, batch: Sequence[_Message]) -> None:
        """Store the samples and labels of messages, then acknowledge all messages, also invalid ones."""
        read = [_read(one.content) for one in batch]
        store_messages(self._store, read)
        for one in read:
            if one.problem is not None:
                self._store.refuse(one.problem)
        for message in batch:
            self._client.ack(message.id, message.qos)

    def _make_client(self, name: str) -> Client:
        broker = self._topic.broker
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=name,
            clean_session=False,
            protocol=MQTTv311,
            manual_ack=True,
        )
        if broker.username is not None:
            client.username_pw_set(broker.username, broker.password)
        if broker.tls:
            client.tls_set_context(ssl.create_default_context())
        client.reconnect_delay_set(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        return client

    def _on_connect(self, client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self._report(refused(str(reason), self._topic.broker))
            return
        client.subscribe(self._topic.filter, qos=1)

    def _on_subscribe(
        self, _client: Client, _data: Any, _id: int, reasons: list[Any], _properties: Any
    ) -> None:
        if any(one.is_failure for one in reasons):
            self._report(
                f"{self._topic}: the broker does not let the agent read there; check its access rules"
            )
        else:
            log.info("samples come from %s", self._topic)

    def _on_connect_fail(self, _client: Client, _data: Any) -> None:
        self._report(explain(self._topic.broker))

    def _on_disconnect(self, _client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self._report(f"connection to {self._topic.broker} ended ({reason}); the agent connects again")

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        """Queue a message. If too many bytes wait for the disk, this blocks, so that the client reads no
        more.
        """
        content = bytes(message.payload)
        if len(content) > MAX_MESSAGE_BYTES:
            words = f"a message has {len(content)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
            self._store.refuse(BadSample("message", words))
            content = b""
        self._queue.put_until(_Message(message.mid, message.qos, content), self._stopped)

    def _report(self, problem: str) -> None:
        self._store.refuse(BadSample("broker", problem))


def _read(content: bytes) -> ParsedMessage:
    """Decode a message. An empty message is valid, because it makes a broker delete a retained message."""
    return read_message(content, as_json=content[0] in _JSON) if content else ParsedMessage()
