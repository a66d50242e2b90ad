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
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paho.mqtt.client import Client, MQTTMessage, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.edge_agent.datasets.row_reader import check_columns
from fleetune.edge_agent.datasets.series_options import CLASSES_OF_ONE, SeriesOptions, series_options
from fleetune.edge_agent.datasets.source_options import name_list, source_options
from fleetune.edge_agent.stream.intakes.json_rows import cells_of, path_steps
from fleetune.edge_agent.stream.intakes.messages import (
    MAX_MESSAGE_BYTES,
    ParsedMessage,
    read_message,
    store_messages,
)
from fleetune.edge_agent.stream.intakes.row_samples import MAX_NUMBERS, LabelTexts, RowSamples
from fleetune.edge_agent.stream.intakes.write_queue import MAX_WAITING_BYTES, WriteQueue
from fleetune.edge_agent.stream.sample import BadSample, Sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import ENCODE, Broker, explain, parse_broker, refused

SCHEMES = ("mqtt", "mqtts")
MAX_TOPIC = 500  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1, 30  # shortest and longest pause before it connects again
_JSON = b"{ \t\r\n"
_RECEIVED = "received"  # name of the stored marks of the latest messages
_MARK = 6  # bytes of a mark
_MAX_MARKS = 512  # a broker has fewer messages under way to a client

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SensorTopic:
    """The topics to which sensors publish.

    Attributes:
        broker: the sensors' broker.
        filter: topic filter; `+` and `#` are allowed after its first level.
        options: which values of a message have which role, and the windows; None: messages are samples.
    """

    broker: Broker
    filter: str
    options: SeriesOptions | None = None

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
    place, _, path = rest.partition("/")
    topic_filter, mark, text = path.partition("?")
    # then the "topic" may be half a password: it must not be shown
    if "@" in path and "@" not in place:
        raise DataError(
            f"{scheme}://...: an @ after the first /; {ENCODE}; a topic with @ needs a user:"
            f" {scheme}://user@host/topic"
        )
    try:
        broker = parse_broker(f"{scheme}://{place}")
    except SettingError as problem:
        raise DataError(f"data: {problem}") from None
    found = SensorTopic(broker, topic_filter, _options(f"{broker}/{topic_filter}", text) if mark else None)
    levels = topic_filter.split("/")
    if not topic_filter or len(topic_filter) > MAX_TOPIC or "\0" in topic_filter or not _is_filter(levels):
        raise DataError(f"{found}: the URL needs a valid topic, such as {broker}/plant/motor-3")
    if levels[0] in ("#", "+", topics.ROOT.partition("/")[0]) or levels[0].startswith("$"):
        raise DataError(f"{found}: its topics could belong to a fleet; begin with another first level")
    return found


def _options(source: str, text: str) -> SeriesOptions:
    """Return the options of a topic. Raises DataError."""
    options = series_options(source, source_options(source, text), SeriesOptions)
    columns = name_list(options.columns)
    if options.names:
        raise DataError(f"{source}: names is for files without a header; name the values with columns=")
    if not columns:
        raise DataError(
            f"{source}: name the values of a message with columns=, as in ?columns=accel.x,accel.y"
        )
    if options.classes and not options.label:
        raise DataError(f"{source}: {CLASSES_OF_ONE}")
    if options.window and not options.gap:
        raise DataError(
            f"{source}: window needs gap too: the longest time between two messages of a window, as in gap=5m"
        )
    if options.length * len(columns) > MAX_NUMBERS:
        words = f"{options.length} messages of {len(columns)} values are more than {MAX_NUMBERS:,} numbers"
        raise DataError(f"{source}: {words}; give a smaller window")
    paths = _paths(options)
    for path in paths:
        try:
            path_steps(path)
        except DataError as problem:
            raise DataError(f"{source}: {problem}") from None
    check_columns(source, paths, options, {})
    return options


def _paths(options: SeriesOptions) -> list[str]:
    """Return the JSON paths that the options name, each once."""
    listed = [name_list(text) for text in (options.columns, options.label, options.time)]
    return [
        *dict.fromkeys([name for names in listed for name in names] + [options.group] * bool(options.group))
    ]


def _is_filter(levels: list[str]) -> bool:
    whole = all("+" not in one and "#" not in one for one in levels if one not in ("+", "#"))
    return whole and "#" not in levels[:-1]


class _Message(NamedTuple):
    """A received message that is not stored yet.

    Attributes:
        id: its packet id.
        qos: its quality of service.
        content: its payload.
        topic: its topic.
        again: True if the broker sends it again.
        retained: True if the broker had kept it from before.
        arrived: when it arrived, by the device's clock, in seconds since 1970.
    """

    id: int
    qos: int
    content: bytes
    topic: str = ""
    again: bool = False
    retained: bool = False
    arrived: float = 0.0


class MessageSeries:
    """Makes samples of the values in messages.

    The samples, the values that wait for their window, and the marks of the messages are stored in one
    transaction. So a message is counted once, even if it comes again after a crash.

    Args:
        store: the device's store.
        options: which values have which role, and the windows.
    """

    def __init__(self, store: SampleStore, options: SeriesOptions) -> None:
        self._store, self._options = store, options
        self._paths, self._inputs = _paths(options), name_list(options.columns)
        classes = {name: number for number, name in enumerate(name_list(options.classes))}
        self._labels = LabelTexts(classes)

    def store(self, batch: Sequence[_Message]) -> None:
        """Store the samples of messages. Raises StoreError; then nothing was stored."""
        marks = self._store.series_state(_RECEIVED) or b""
        known = {marks[at : at + _MARK] for at in range(0, len(marks), _MARK)}
        topics_read: dict[str, RowSamples] = {}
        samples: list[Sample] = []
        refused: list[BadSample] = []
        for message in batch:
            mark = _mark(message)
            if message.again and mark in known:
                continue
            if message.qos:
                known.add(mark)
                marks += mark
            try:
                samples += self._samples(message, topics_read, refused.append)
            except BadSample as problem:
                refused.append(problem)
        states = {name: data for rows in topics_read.values() for name, data in rows.states.items()}
        self._store.add(samples, states=states | {_RECEIVED: marks[-_MAX_MARKS * _MARK :]})
        for one in refused:
            self._store.refuse(one)

    def _samples(
        self, message: _Message, topics_read: dict[str, RowSamples], refuse: Callable[[BadSample], None]
    ) -> list[Sample]:
        # a retained message without a time may be from any time
        if not message.content or (message.retained and self._options.window and not self._options.time):
            return []
        if message.topic not in topics_read:
            topics_read[message.topic] = RowSamples(
                message.topic,
                self._paths,
                self._inputs,
                self._options,
                refuse=refuse,
                read_label=self._labels.label,
                load=self._store.series_state,
                from_messages=bool(self._options.time),
            )
        cells = cells_of(message.content, self._paths)
        return [*topics_read[message.topic].samples([(0, cells)], arrived=message.arrived)]


def _mark(message: _Message) -> bytes:
    """Return the packet id and a checksum of a message: the same if the broker sends it again."""
    content = zlib.crc32(message.topic.encode() + b"\0" + message.content)
    return message.id.to_bytes(2, "big") + content.to_bytes(4, "big")


class MqttIntake:
    """Stores the samples that arrive on MQTT topics.

    Args:
        store: the device's store.
        topic: the topic filter of the sensors; it may hold wildcards.
        trial: True if the broker must not hold messages for this client afterwards.
    """

    def __init__(self, store: SampleStore, topic: SensorTopic, *, trial: bool = False) -> None:
        self._store, self._topic, self._trial = store, topic, trial
        self._queue = WriteQueue(
            self._keep,
            lambda message: len(message.content),
            lambda problem: store.refusals.add("disk", problem),
            MAX_WAITING_BYTES,
        )
        self._series = MessageSeries(store, topic.options or SeriesOptions())
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
        if self._topic.options is not None:
            self._series.store(batch)
        else:
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
            clean_session=self._trial,
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
        about = message.topic, bool(message.dup), bool(message.retain), time.time()
        self._queue.put_until(_Message(message.mid, message.qos, content, *about), self._stopped)

    def _report(self, problem: str) -> None:
        self._store.refuse(BadSample("broker", problem))


def _read(content: bytes) -> ParsedMessage:
    """Decode a message. An empty message is valid, because it makes a broker delete a retained message."""
    return read_message(content, as_json=content[0] in _JSON) if content else ParsedMessage()
