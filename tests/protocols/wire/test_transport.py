"""Transports: the in-memory one, and MQTT against real brokers on loopback."""

import gc
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.own_mosquitto import needs_mosquitto, tls_mosquitto
from tests.helpers.ports import free_port

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.protocols.errors import SettingError, TransportError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.transfer import digest_of
from fleetune.protocols.wire.transport import Connected, Disconnected, Received, Will
from fleetune.protocols.wire.transport.memory import MemoryBroker
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport, parse_broker
from fleetune.tools.bench.slow_link import Endpoint, subscriptions

KINDS = [
    pytest.param(
        "mosquitto",
        marks=pytest.mark.skipif(
            not shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin"),
            reason="mosquitto is not installed",
        ),
    ),
    "amqtt",
]
PATIENCE_S = 30


def drain(events):
    found = []
    while not events.empty():
        found.append(events.get())
    return found


def wait_for(events, wanted):
    """The next event for which `wanted` is true."""
    give_up_at = time.monotonic() + PATIENCE_S
    seen = []
    while time.monotonic() < give_up_at:
        try:
            seen.append(events.get(timeout=1))
        except queue.Empty:
            continue
        if wanted(seen[-1]):
            return seen[-1]
    raise AssertionError(f"never came; seen {seen}")


def is_connected(event):
    return isinstance(event, Connected)


def is_disconnected(event):
    return isinstance(event, Disconnected)


def is_received(event):
    return isinstance(event, Received)


# In memory


def test_memory_routes_by_topic_in_order():
    broker, events, others = MemoryBroker(), queue.SimpleQueue(), queue.SimpleQueue()
    hub = broker.client(["f/+/up"], events)
    device = broker.client(["f/a/down"], others)
    hub.connect()
    device.connect()
    device.publish("f/a/up", b"1")
    device.publish("f/a/up/deeper", b"no")
    device.publish("f/a/state", b"no")
    hub.publish("f/a/down", b"2")
    assert drain(events) == [Connected(), Received("f/a/up", b"1")]
    assert drain(others) == [Connected(), Received("f/a/down", b"2")]


def test_memory_keeps_retained_messages_and_speaks_the_will():
    broker, events, later = MemoryBroker(), queue.SimpleQueue(), queue.SimpleQueue()
    device = broker.client([], events, Will("f/a/state", b"gone"))
    device.connect()
    device.publish("f/a/state", b"here", retain=True)
    device.drop()
    device.publish("f/a/state", b"dropped while disconnected", retain=True)
    broker.client(["f/+/state"], later).connect()
    device.connect()
    device.close(b"bye")
    assert drain(events) == [
        Connected(),
        Disconnected("connection lost"),
        Connected(),
        Disconnected("closed"),
    ]
    assert drain(later) == [
        Connected(),
        Received("f/a/state", b"gone", retained=True),
        Received("f/a/state", b"bye"),
    ]


# Addresses


def test_broker_addresses():
    assert parse_broker("edge.local") == Broker("edge.local", 1883)
    assert parse_broker("10.0.0.1:1884") == Broker("10.0.0.1", 1884)
    assert parse_broker("mqtt://me:p%40ss@h") == Broker("h", 1883, "me", "p@ss")
    assert parse_broker("mqtts://h") == Broker("h", 8883, tls=True)
    assert parse_broker("mqtt://[::1]:99") == parse_broker("[::1]:99") == Broker("::1", 99)
    assert parse_broker("::1") == Broker("::1", 1883)
    assert parse_broker("mqtt://join:pw@[fe80::1]:99") == Broker("fe80::1", 99, "join", "pw")
    assert repr(parse_broker("mqtt://me:secret@[::1]:99")) == "mqtt://[::1]:99"
    assert parse_broker("my_host-1:99").host == "my_host-1"
    assert repr(parse_broker("mqtt://me:secret@h")) == "mqtt://h:1883"


@pytest.mark.parametrize(
    "text",
    ["", "http://h", "h:port", "h:0", "h:99999", "mqtt://", "mqtt://h/topic", "mqtt://me:secret@", "a" * 70],
)
def test_wrong_addresses_are_one_line_without_the_password(text):
    with pytest.raises(SettingError) as caught:
        parse_broker(text)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@given(
    st.lists(st.sampled_from("/:@#?%[] \\&=\n1a"), min_size=1, max_size=4).map("".join),
    st.sampled_from(["mqtt", "mqtts", "MQTT", "http", "mqtt:"]),
)
def test_no_message_has_a_part_of_a_password_that_was_not_encoded(signs, scheme):
    text = f"{scheme}://join:sec{signs}ret@edge:1883"
    try:
        found = repr(parse_broker(text))
    except SettingError as problem:
        found = str(problem)
        assert "%2F" in found
    assert "sec" not in found
    assert "ret" not in found


@given(st.text(min_size=1))
def test_a_password_that_was_encoded_arrives_as_it_is(password):
    assert parse_broker(f"mqtt://join:{quote(password, safe='')}@[::1]:99").password == password


# MQTT


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def broker(kind, tmp_path):
    with EmbeddedBroker.start(tmp_path / "broker", which=kind) as running:
        yield running


@pytest.fixture
def connect():
    """Make clients that are closed at the end."""
    made = []

    def make(port, name, topics=(), will=None, **settings):
        events = queue.SimpleQueue()
        client = MqttTransport(
            Broker("127.0.0.1", port, **settings), name, subscriptions=topics, events=events, will=will
        )
        client.connect()
        made.append(client)
        return client, events

    yield make
    for client in made:
        client.close()


def test_mqtt_delivers_in_order_and_keeps_retained(broker, connect):
    hub, events = connect(broker.port, "hub", ["f/+/up"])
    wait_for(events, is_connected)
    device, theirs = connect(broker.port, "device", ["f/a/down"])
    wait_for(theirs, is_connected)
    for n in range(50):
        device.publish("f/a/up", bytes([n]) * (1 + 5000 * n))
    for n in range(50):
        assert wait_for(events, is_received) == Received("f/a/up", bytes([n]) * (1 + 5000 * n))
    device.publish("f/a/state", b"here", retain=True, qos=1)
    device.publish("f/a/up", b"after")
    wait_for(events, is_received)
    _, later = connect(broker.port, "later", ["f/+/state"])
    assert wait_for(later, is_received) == Received("f/a/state", b"here", retained=True)
    hub.publish("f/a/down", b"x")
    assert wait_for(theirs, is_received).data == b"x"


def test_mqtt_speaks_the_will_and_the_farewell(broker, connect):
    _, events = connect(broker.port, "hub", ["f/+/state"])
    wait_for(events, is_connected)
    device, theirs = connect(broker.port, "device", will=Will("f/a/state", b"gone"))
    wait_for(theirs, is_connected)
    device._client.socket().shutdown(socket.SHUT_RDWR)
    assert wait_for(events, is_received).data == b"gone"
    wait_for(theirs, is_disconnected)
    wait_for(theirs, is_connected)
    device.close(b"bye")
    assert wait_for(events, is_received).data == b"bye"


def test_who_comes_back_hears_nothing_of_what_others_subscribed_to(broker, connect):
    _, events = connect(broker.port, "hub", ["f/+/state", "f/+/up"])
    wait_for(events, is_connected)
    device, theirs = connect(broker.port, "device", ["f/a/down"], will=Will("f/a/state", b"gone"))
    wait_for(theirs, is_connected)
    device.publish("f/a/state", b"here", retain=True, qos=1)
    wait_for(events, is_received)
    device._client.socket().shutdown(socket.SHUT_RDWR)
    wait_for(theirs, is_disconnected)
    wait_for(theirs, is_connected)
    other, its = connect(broker.port, "other")
    wait_for(its, is_connected)
    other.publish("f/a/down", b"after")
    assert wait_for(theirs, is_received) == Received("f/a/down", b"after")


def test_mqtt_waits_for_a_broker_that_comes_later(kind, tmp_path, connect):
    port = free_port()
    client, events = connect(port, "early", ["f/x"])
    assert "no program listens" in wait_for(events, is_disconnected).reason
    client.publish("f/x", b"dropped")
    with EmbeddedBroker.start(tmp_path, port=port, which=kind):
        wait_for(events, is_connected)
        client.publish("f/x", b"hello")
        assert wait_for(events, is_received).data == b"hello"


def test_mqtt_says_why_it_cannot_connect(connect, tmp_path):
    events = queue.SimpleQueue()
    client = MqttTransport(Broker("no-such-host.invalid"), "x", subscriptions=[], events=events)
    client.connect()
    assert "is unknown" in wait_for(events, is_disconnected).reason
    client.close()
    os.mkfifo(tmp_path / "pipe.pem")  # OpenSSL would wait for it
    for name in ("no.pem", "pipe.pem"):
        broker = Broker("h", tls=True, ca=str(tmp_path / name))
        with pytest.raises(TransportError, match=rf"{name}.*they must be readable PEM files"):
            MqttTransport(broker, "x", subscriptions=[], events=events)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 and its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


# Paho leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@needs_mosquitto
def test_mqtt_speaks_tls_with_a_broker_it_can_trust(tmp_path, connect, certificate):
    cert, key = certificate
    with tls_mosquitto(tmp_path, cert, key) as port:
        trusting, events = connect(port, "trusting", ["f/x"], tls=True, ca=str(cert))
        wait_for(events, is_connected)
        trusting.publish("f/x", b"1" * 100_000)
        assert wait_for(events, is_received).data == b"1" * 100_000
        wary, events = connect(port, "wary", tls=True)
        assert "not trusted" in wait_for(events, is_disconnected).reason
        wary.close()
    plain, events = connect(port, "x", tls=True)
    assert "no program listens" in wait_for(events, is_disconnected).reason
    plain.close()
    gc.collect()


def make_end(side, port, folder):
    def make_transport(events):
        broker = Broker("127.0.0.1", port)
        return MqttTransport(broker, side, subscriptions=subscriptions(side), events=events)

    return Endpoint(side, make_transport, folder / side)


def serve(ends, until):
    """Run both ends until `until(end)` is true for each."""
    threads = [
        threading.Thread(target=end.run, args=(lambda end=end: until(end), PATIENCE_S)) for end in ends
    ]
    for thread in threads:
        thread.start()
    return threads


def test_payloads_both_ways_survive_a_broker_that_is_killed(kind, tmp_path):
    port = free_port()
    up, down = (Key.of("payload", n).generator().bytes(6_000_000) for n in range(2))
    ends = hub, device = [make_end(side, port, tmp_path) for side in ("hub", "device")]
    in_flight = threading.Event()

    def stop_in_the_middle(_):
        if sum(path.stat().st_size for path in tmp_path.glob("*/*.part")) > 1_000_000:
            in_flight.set()
        return in_flight.is_set()

    broker = EmbeddedBroker.start(tmp_path / "broker", port=port, which=kind)
    for end in ends:
        end.transport.connect()
        assert end.run(lambda end=end: end.connections == 1, PATIENCE_S)
    hub.post(TransferKey("task", "run", 1), down)
    device.post(TransferKey("update", "run", 1), up)
    threads = serve(ends, stop_in_the_middle)
    assert in_flight.wait(PATIENCE_S)
    broker.kill()
    for thread in threads:
        thread.join()
    assert not (hub.arrived and device.arrived)
    with EmbeddedBroker.start(tmp_path / "broker", port=port, which=kind):
        for thread in serve(ends, lambda end: bool(end.arrived and end.sent)):
            thread.join()
        for end in ends:
            end.transport.close()
    assert (hub.arrived, device.arrived) == ([digest_of(up)], [digest_of(down)])
    assert [sent.refused for sent in hub.sent + device.sent] == [None, None]
    assert (hub.connections, device.connections) == (2, 2)
