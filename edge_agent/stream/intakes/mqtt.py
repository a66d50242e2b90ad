"""Samples that sensors publish to a broker of their own, often one on the device: `mqtt://HOST:PORT/TOPIC`.

Each message is one of `intake_messages`, JSON or MessagePack, without its length; nothing is answered, and
nothing is published. Messages of QoS 1 are acknowledged once what they brought is durable, in a session that
the broker keeps: what comes while the agent is away, or was not kept when it was killed, comes again. What
comes twice (a retained message too) is the same input, and kept once.

This is a client of its own, with the user and password of its own URL and none of the fleet's; a topic
that could be one of a fleet's is refused, so that no sample is ever looked for, or sent, there.
"""

import logging
import socket
import ssl
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from paho.mqtt.client import Client, MQTTMessage, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.edge_agent.stream.intakes.library_call import AGAIN_S, WAITING_BYTES
from fleetune.edge_agent.stream.intakes.messages import MAX_MESSAGE_BYTES, ParsedMessage, read_message
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError, SettingError, StoreError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import ENCODE, Broker, explain, parse_broker, refused

SCHEMES = ("mqtt", "mqtts")
MOST_TOPIC = 500  # letters
SHORTEST_S, LONGEST_S = 1, 30  # until it is connected again
_BATCH = 256
_LOOK_S = 0.2
_OVERHEAD = 500  # bytes of a message that waits, beside its content
_JSON = b"{ \t\r\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SensorTopic:
    """Where sensors publish.

    Attributes:
        broker: theirs.
        filter: of topics; may have `+` and `#` behind its first level.
    """

    broker: Broker
    filter: str

    def __str__(self) -> str:  # never the password
        return f"{self.broker}/{self.filter}"


def sensor_topic(source: str) -> SensorTopic | None:
    """The topic that a source names; None: it names something else.

    Raises:
        DataError: it is no such URL, or its topics could be a fleet's.
    """
    scheme, _, rest = source.partition("://")
    if scheme not in SCHEMES or rest == "":
        return None
    place, _, wanted = rest.partition("/")
    if "@" in wanted and "@" not in place:  # then what looks like a topic may be half a password
        raise DataError(
            f"{scheme}://...: an @ after the first /; {ENCODE}; a topic with @ needs a user: {scheme}://user@host/topic"
        )
    try:
        broker = parse_broker(f"{scheme}://{place}")
    except SettingError as problem:
        raise DataError(f"data: {problem}") from None
    found = SensorTopic(broker, wanted)
    levels = wanted.split("/")
    if not wanted or len(wanted) > MOST_TOPIC or "\0" in wanted or not _is_filter(levels):
        raise DataError(f"{found}: say a topic, e.g. {broker}/plant/motor-3")
    if levels[0] in ("#", "+", topics.ROOT.partition("/")[0]) or levels[0].startswith("$"):
        raise DataError(f"{found}: topics of the fleet could be among these; begin with a level of your own")
    return found


def _is_filter(levels: list[str]) -> bool:
    whole = all("+" not in one and "#" not in one for one in levels if one not in ("+", "#"))
    return whole and "#" not in levels[:-1]


class _Waiting(NamedTuple):
    """A message that came."""

    id: int
    qos: int
    content: bytes


class MqttIntake:
    """Takes samples from a topic until told to stop.

    Args:
        store: of the device.
        topic: of the sensors.
    """

    def __init__(self, store: SampleStore, topic: SensorTopic) -> None:
        self._store, self._topic = store, topic
        self._waiting: deque[_Waiting] = deque()
        self._num_bytes = 0
        self._stopping = False
        self._changed = threading.Condition()
        who = Key.of("intake", socket.gethostname(), str(store.path.absolute()), str(topic)).value
        self._client = self._make_client(f"fleetune-intake-{who:016x}")

    def run(self, stopped: threading.Event) -> None:
        """Keep what comes; without a broker it is tried again and again."""
        self._client.connect_async(self._topic.broker.host, self._topic.broker.port, 30)
        self._client.loop_start()
        try:
            while not stopped.is_set():
                batch = self._next()
                if batch and not self._keep(batch):
                    stopped.wait(AGAIN_S)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._client.disconnect()
            self._client.loop_stop()

    def _next(self) -> list[_Waiting]:
        """The first that wait; they go on waiting until they are kept."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), _LOOK_S)
            return [self._waiting[place] for place in range(min(_BATCH, len(self._waiting)))]

    def _keep(self, batch: list[_Waiting]) -> bool:
        """Whether it is durable, or can never be; then it is acknowledged."""
        read = [_read(one.content) for one in batch]
        samples = [one.sample for one in read if one.sample is not None]
        labels = [(str(one.id), one.label) for one in read if one.label is not None]
        try:
            if samples:
                self._store.add(samples)
            if labels:
                self._store.label(labels)
        except StoreError as problem:
            self._store.refusals.add("disk", str(problem))
            return False
        for one in read:
            if one.problem is not None:
                self._store.refuse(one.problem)
        for message in batch:
            self._client.ack(message.id, message.qos)
        with self._changed:
            for _ in batch:
                self._num_bytes -= len(self._waiting.popleft().content) + _OVERHEAD
            self._changed.notify_all()
        return True

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
        client.reconnect_delay_set(SHORTEST_S, LONGEST_S)
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        return client

    def _on_connect(self, client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self._note(refused(str(reason), self._topic.broker))
            return
        client.subscribe(self._topic.filter, qos=1)

    def _on_subscribe(
        self, _client: Client, _data: Any, _id: int, reasons: list[Any], _properties: Any
    ) -> None:
        if any(one.is_failure for one in reasons):
            self._note(f"{self._topic}: the broker lets us read nothing there; check its access rules")
        else:
            log.info("samples come from %s", self._topic)

    def _on_connect_fail(self, _client: Client, _data: Any) -> None:
        self._note(explain(self._topic.broker))

    def _on_disconnect(self, _client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self._note(f"connection to {self._topic.broker} ended ({reason}); it is tried again")

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        """While too much waits for the disk, nothing more is read."""
        content = bytes(message.payload)
        if len(content) > MAX_MESSAGE_BYTES:
            words = f"a message of {len(content)} bytes; at most {MAX_MESSAGE_BYTES}"
            self._store.refuse(BadSample("message", words))
            content = b""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < WAITING_BYTES or self._stopping)
            if self._stopping:
                return
            self._waiting.append(_Waiting(message.mid, message.qos, content))
            self._num_bytes += len(content) + _OVERHEAD
            self._changed.notify_all()

    def _note(self, words: str) -> None:
        self._store.refuse(BadSample("broker", words))


def _read(content: bytes) -> ParsedMessage:
    """Of no bytes nothing comes: so a broker is told to forget a retained message."""
    as_json = not content or content[0] in _JSON
    return read_message(content, as_json=as_json) if content else ParsedMessage(as_json)
