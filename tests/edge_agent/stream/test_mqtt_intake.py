"""Samples by a local MQTT broker: kept once, whatever is published, and whether broker and disk are there."""

import json
import logging
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from paho.mqtt.client import Client, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from tests.helpers.ports import free_port

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.stream.intakes import mqtt, write_queue
from fleetune.edge_agent.stream.intakes.messages import MAX_MESSAGE_BYTES
from fleetune.edge_agent.stream.intakes.mqtt import MqttIntake, sensor_topic
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import StreamSettings, is_stream, open_stream
from fleetune.protocols.errors import DataError, StoreError

TOPIC = "plant/motor-3"


@pytest.fixture
def broker(tmp_path):
    with EmbeddedBroker.start(tmp_path / "broker") as running:
        yield running


@pytest.fixture
def store(tmp_path):
    found = SampleStore.open(tmp_path / "samples.sqlite")
    yield found
    found.close()


def url(port, topic=TOPIC, user=""):
    return f"mqtt://{user}127.0.0.1:{port}/{topic}"


@contextmanager
def listening(store, port, topic=TOPIC):
    stopped, feeder = threading.Event(), MqttIntake(store, sensor_topic(url(port, topic)))
    thread = threading.Thread(target=feeder.run, args=(stopped,))
    thread.start()
    try:
        yield feeder
    finally:
        stopped.set()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def sensor(port):
    """Publishes, and knows when the broker has it."""
    client = Client(CallbackAPIVersion.VERSION2, client_id="sensor", protocol=MQTTv311)
    client.connect("127.0.0.1", port)
    client.loop_start()

    def publish(message, topic=TOPIC, **options):
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        client.publish(topic, data, qos=1, **options).wait_for_publish(20)

    yield publish
    client.disconnect()
    client.loop_stop()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def rows(store):
    with store.reading() as read:
        return read.execute("SELECT class, name FROM sample ORDER BY name").fetchall()


def test_what_sensors_publish_is_kept_once_and_rubbish_is_counted(store, broker, caplog):
    caplog.set_level(logging.INFO)
    with listening(store, broker.port, "plant/+"), sensor(broker.port) as publish:
        until(lambda: "samples come from" in caplog.text)
        publish({"x": [0.1, 0.2], "y": 1, "id": "a"}, retain=True)
        publish({"x": [0.1, 0.2], "y": 1, "id": "a"})
        packed = {"x": np.float32([3, 4]).tobytes(), "dtype": "f4", "shape": [2], "id": "b"}
        publish(msgspec.msgpack.encode(packed), "plant/other")
        publish({"id": "b", "y": 0})
        for rubbish in (b"{", b"\xff\xff", b"", {"x": "no"}, {"x": [1e300]}, {"id": "nobody", "y": 1}):
            publish(rubbish)
        publish({"x": [9.0, 9.0], "y": 2, "id": "z"})
        until(lambda: len(rows(store)) == 3)
    # amqtt keeps nothing for clients without a user, so it must listen before anything is published.
    with listening(store, broker.port, "plant/+"), sensor(broker.port) as publish:
        until(lambda: caplog.text.count("samples come from") == 2)
        # the retained one has come again before this one
        publish({"x": [8.0, 9.0], "y": 2, "id": "zz"})
        until(lambda: len(rows(store)) == 4)
    assert rows(store) == [(1, "a"), (0, "b"), (2, "z"), (2, "zz")]
    store.save_counts()
    lines = [one for one in caplog.messages if one.startswith("not taken")]
    assert {line.split(":")[0].removeprefix("not taken, ") for line in lines} == {
        "message",
        "not-numbers",
        "not-finite",
        "unknown",
    }


def test_single_values_become_windows_over_a_broker_that_sends_what_was_not_acknowledged(
    store, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    options = "?value=$.temperature&time=last_seen&gap=10m&window=3&step=3"

    def value(minute, **more):
        return {"temperature": minute / 2, "last_seen": f"2026-05-31T12:{minute:02}:00Z", **more}

    with EmbeddedBroker.start(tmp_path / "broker") as running, sensor(running.port) as publish:
        with listening(store, running.port, "zigbee2mqtt/+" + options) as feeder:
            until(lambda: "samples come from" in caplog.text)
            publish(value(0), "zigbee2mqtt/kitchen")
            publish({"battery": 7}, "zigbee2mqtt/kitchen")
            publish(value(1, humidity=40), "zigbee2mqtt/hall")
            publish(value(5), "zigbee2mqtt/kitchen")
            until(lambda: not len(feeder._queue) and "no value at $.temperature" in caplog.text)
        with listening(store, running.port, "zigbee2mqtt/+" + options):
            until(lambda: caplog.text.count("samples come from") == 2)
            publish(value(4), "zigbee2mqtt/kitchen")
            until(lambda: len(rows(store)) == 1)
    with store.reading() as read:
        (data,) = read.execute("SELECT x FROM input").fetchone()
    assert np.frombuffer(data, "<f4").tolist() == [0, 2, 2.5]


def test_it_waits_for_its_broker_and_comes_back(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    port = free_port()
    with listening(store, port):
        until(lambda: "no program listens there" in caplog.text)
        for number in range(2):
            with EmbeddedBroker.start(tmp_path / f"broker-{number}", port=port), sensor(port) as publish:
                until(lambda: caplog.text.count("samples come from") == number + 1)  # noqa: B023
                publish({"x": [float(number)], "id": f"w{number}"})
                until(lambda: len(rows(store)) == number + 1)  # noqa: B023
    assert caplog.text.count("not taken, broker") == 1  # then one an hour


def test_what_a_full_disk_did_not_take_is_tried_again_and_not_acknowledged(
    store, broker, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    add, full = store.add, threading.Event()
    full.set()

    def add_unless_full(samples, labels):
        if full.is_set():
            raise StoreError("no room")
        return add(samples, labels)

    monkeypatch.setattr(store, "add", add_unless_full)
    acknowledged = []
    with listening(store, broker.port) as feeder, sensor(broker.port) as publish:
        ack = feeder._client.ack
        monkeypatch.setattr(feeder._client, "ack", lambda *about: (acknowledged.append(about), ack(*about)))
        until(lambda: "samples come from" in caplog.text)
        publish({"x": [1.0], "id": "a"})
        until(lambda: "no room" in caplog.text)
        assert acknowledged == []
        full.clear()
        until(lambda: acknowledged)
    assert rows(store) == [(-1, "a")]


def test_what_waits_is_bounded(store, monkeypatch):
    """The client's thread stands still, so the broker is not read, while the disk is."""
    monkeypatch.setattr(mqtt, "MAX_WAITING_BYTES", 3000)
    feeder = MqttIntake(store, sensor_topic(url(1)))
    about = {"mid": 1, "qos": 0, "topic": TOPIC, "dup": False, "retain": False}
    message = type("Message", (), {"payload": b"{" * 1000, **about})
    thread = threading.Thread(target=lambda: [feeder._on_message(None, None, message) for _ in range(9)])
    thread.start()
    until(lambda: len(feeder._queue) == 2)
    thread.join(0.05)
    assert thread.is_alive()
    for _ in range(5):
        feeder._queue._write_batch(feeder._queue._next_batch())
    thread.join(20)
    assert not thread.is_alive()
    large = type("Message", (), {"payload": b"{" * (MAX_MESSAGE_BYTES + 1), **about})
    feeder._on_message(None, None, large)
    assert feeder._queue._waiting[-1].content == b""


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("mqtt://host", "needs a valid topic"),
        ("mqtt://host/", "needs a valid topic"),
        ("mqtt://host:99999/a", "out of range"),
        ("mqtt://host/a/#/b", "needs a valid topic"),
        ("mqtt://host/a+", "needs a valid topic"),
        ("mqtt://host/#", "topics could belong to a fleet"),
        ("mqtt://host/+/v1/#", "topics could belong to a fleet"),
        ("mqtt://host/fleetune/v1/f/d/up", "topics could belong to a fleet"),
        ("mqtt://host/$SYS/broker", "topics could belong to a fleet"),
    ],
)
def test_what_is_no_sensors_topic_is_said_in_a_line(source, problem):
    with pytest.raises(DataError, match=problem):
        is_stream(source)


def test_the_password_is_for_the_broker_alone(tmp_path):
    found = sensor_topic("mqtts://pump:s%40cret@127.0.0.1/plant/#")
    assert (found.broker.username, found.broker.password, found.broker.tls) == ("pump", "s@cret", True)
    assert (str(found), found.filter) == ("mqtts://127.0.0.1:8883/plant/#", "plant/#")
    stream = open_stream(tmp_path / "s.sqlite", url(1, user="pump:secret@"), StreamSettings())
    assert stream.source == url(1)
    stream.close()
    with pytest.raises(DataError) as caught:
        is_stream("mqtt://pump:secret@host/#")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["mqtt://pump:12/ret@host/t", "mqtt://pump:sec#ret@host/t", "MQTT://sec:ret@h/t"]
)
def test_no_message_has_a_part_of_the_password(address):
    with pytest.raises(DataError) as caught:
        is_stream(address)
    assert "ret" not in str(caught.value)
    with pytest.raises(DataError) as caught:
        load(address)
    assert "ret" not in str(caught.value)


def test_a_topic_with_an_at_sign_needs_a_user_in_front():
    found = sensor_topic("mqtt://@host/plant@home/t")
    assert (found.filter, found.broker.username) == ("plant@home/t", None)
