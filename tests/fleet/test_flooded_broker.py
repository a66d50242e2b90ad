"""A device floods a fleet's broker with messages of 1 MB: memory stays bounded, and transfers go on."""

import multiprocessing
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion
from tests.helpers.registered_fleet import RegisteredFleet, needs_mosquitto

from fleetune.protocols.randomness import Key
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.transfer import digest_of
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport
from fleetune.tools.bench.slow_link import DEVICE, FLEET, Endpoint, subscriptions

MOST_BYTES = 256 * 2**20
FLOOD_S, PATIENCE_S = 10.0, 120.0
BODY = bytes(2**20)


def flood(cert, key, port, until):
    """Send messages of 1 MB as fast as the broker takes them; connect again when it does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(cert, key)
    name = topics.topic(FLEET, "mallory", "update").encode()
    head = b"\x30" + length(2 + len(name) + len(BODY)) + len(name).to_bytes(2, "big") + name
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            line = context.wrap_socket(plain)
            line.sendall(bytes.fromhex("100d00044d5154540402003c000178"))
            line.recv(4)
            while time.monotonic() < until:
                line.sendall(head + BODY)


def length(value):
    """A length as MQTT writes it."""
    digits = []
    while value or not digits:
        value, digit = divmod(value, 128)
        digits.append(digit | (128 if value else 0))
    return bytes(digits)


def slow_reader(broker):
    """A client that reads 20 messages a second, as a busy coordinator would."""
    client = Client(CallbackAPIVersion.VERSION2, client_id="coordinator~slow")
    client.username_pw_set(broker.username, broker.password)
    client.on_connect = lambda *_: client.subscribe(f"{topics.ROOT}/{FLEET}/mallory/#")
    client.on_message = lambda *_: time.sleep(0.05)
    client.connect(broker.host, broker.port)
    client.loop_start()
    return client


def peak_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.nightly
@pytest.mark.fleet
@needs_mosquitto
def test_a_flood_of_large_messages_is_bounded_and_named_and_stops_no_transfer(tmp_path):
    fleet = RegisteredFleet(tmp_path, FLEET)
    login, _ = fleet.with_certificate("mallory")
    honest, _ = fleet.with_certificate(DEVICE)
    with fleet.start() as broker:
        own = Broker("127.0.0.1", broker.port, topics.COORDINATOR_USER, fleet.listeners.password)
        ends = []
        for side, where in (("hub", own), ("device", honest)):

            def transport(events, side=side, where=where):
                return MqttTransport(where, f"{side}~x", subscriptions=subscriptions(side), events=events)

            ends.append(Endpoint(side, transport, tmp_path / side))
        for end in ends:
            end.transport.connect()
            assert end.run(lambda end=end: end.connections >= 1, PATIENCE_S)
        hub, device = ends
        slow = slow_reader(own)
        until = time.monotonic() + FLOOD_S
        villain = multiprocessing.Process(
            target=flood, args=(login.cert, login.key, fleet.listeners.port, until), daemon=True
        )
        villain.start()
        time.sleep(FLOOD_S / 4)
        up, down = (Key.of("flood", n).generator().bytes(64_000_000) for n in range(2))
        hub.post(TransferKey("task", "run", 1), down)
        device.post(TransferKey("update", "run", 1), up)
        threads = [
            threading.Thread(
                target=end.run, args=(lambda end=end: bool(end.arrived and end.sent), PATIENCE_S)
            )
            for end in ends
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        villain.join()
        slow.loop_stop()
        for end in ends:
            end.transport.close()
        assert (hub.arrived, device.arrived) == ([digest_of(up)], [digest_of(down)])
        peak, refused = peak_bytes(broker.pid), fleet.listeners.news.take_refused()
        print(
            f"mosquitto took {peak / 2**20:.0f} MB;"
            f" connections {[end.connections for end in ends]}; {refused}"
        )
        assert peak <= MOST_BYTES
        assert any(one.who == "mallory" and "memory" in one.what for one in refused)
