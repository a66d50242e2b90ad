"""Who gets into the embedded broker of a fleet, and what they may do: a real mosquitto, hostile clients."""

import os
import queue
import re
import socket
import ssl
import stat
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from tests.helpers.fleet_processes import wait_until
from tests.helpers.registered_fleet import RegisteredFleet, certificates, needs_mosquitto
from tests.protocols.wire.test_transport import is_connected, is_disconnected, wait_for

from fleetune.coordinator.broker.embedded_broker import MAX_MESSAGE_BYTES
from fleetune.coordinator.broker.fleet_watch import FleetWatch
from fleetune.coordinator.broker.known_devices import BrokerRefused, DevicesChanged
from fleetune.coordinator.broker.restarted_child import RestartedChild
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.rotation import rotate
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES
from fleetune.protocols.wire.transport import Received, Will
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

# Paho leaves the socket of a failed handshake to the garbage collector.
pytestmark = [needs_mosquitto, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
FLEET, PATIENCE_S = "f", 20.0


class Client:
    """A client that may be anybody; `seen` gives the messages up to the one that marks the end."""

    def __init__(self, broker, client_id="x", subscriptions=(), will=None):
        self.events = queue.SimpleQueue()
        self.transport = MqttTransport(
            broker, client_id, subscriptions=subscriptions, events=self.events, will=will
        )

    def __enter__(self):
        self.transport.connect()
        self.first = wait_for(self.events, lambda _: True)
        return self

    def __exit__(self, kind, problem, trace):
        self.transport.close()

    def say(self, topic, data=b"x", **options):
        self.transport.publish(topic, data, qos=1, **options)

    def seen(self, last):
        found = []
        while True:
            event = wait_for(self.events, lambda event: isinstance(event, Received))
            found.append((event.topic, event.data))
            if event.data == last:
                return found


def topic(name, channel):
    return topics.topic(FLEET, name, channel)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A fleet with devices of both kinds, and its broker."""
    made = RegisteredFleet(tmp_path_factory.mktemp("fleet"))
    made.devices = {
        "alice": made.with_certificate("alice"),
        "mallory": made.with_certificate("mallory"),
        "lamp": made.with_secret("lamp", "lamps-secret"),
        "plug": made.with_secret("plug", "plugs-secret"),
    }
    with made.start() as made.broker:
        login = {"username": topics.COORDINATOR_USER, "password": made.listeners.password}
        made.coordinator = Broker("127.0.0.1", made.broker.port, **login)
        yield made


@pytest.fixture
def refusals(fleet):
    """A function that waits for a refusal of a device or address, and returns its reason."""
    fleet.listeners.news.take_refused()
    found = []

    def reason(who, pattern):
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            found.extend(fleet.listeners.news.take_refused())
            if any(one.who == who and re.search(pattern, one.what) for one in found):
                return
            time.sleep(0.02)
        raise AssertionError(f"no refusal of {who} like {pattern}: {found}\n{fleet.broker.log.read_text()}")

    return reason


PAIRS = [("mallory", "alice"), ("plug", "lamp"), ("mallory", "lamp"), ("plug", "alice")]


@pytest.mark.parametrize(("villain", "victim"), PAIRS)
def test_a_device_writes_its_own_topics_and_no_others(fleet, refusals, villain, victim):
    with (
        Client(fleet.coordinator, "c", [f"{topics.ROOT}/{FLEET}/#"]) as ears,
        Client(fleet.devices[villain][0]) as mallory,
        Client(fleet.devices[victim][0]) as alice,
    ):
        assert all(is_connected(client.first) for client in (ears, mallory, alice))
        for channel in ("state", "up", "update", "down", "task", "probe"):
            mallory.say(topic(victim, channel), retain=True)
            mallory.say(topics.topic("other", villain, channel))
        for channel in ("down", "task"):  # for the coordinator to write
            mallory.say(topic(villain, channel))
        mallory.say(f"{topics.ROOT}/{FLEET}/coordinator")
        mallory.say(topics.coordinators(FLEET))
        for channel in ("state", "up", "update"):
            mallory.say(topic(villain, channel), b"own")
        mallory.say(topic(villain, "up"), b"last")
        assert ears.seen(b"last") == [
            (topic(villain, "state"), b"own"),
            (topic(villain, "up"), b"own"),
            (topic(villain, "update"), b"own"),
            (topic(villain, "up"), b"last"),
        ]
        alice.say(topic(victim, "up"), b"alice")
        assert ears.seen(b"alice") == [(topic(victim, "up"), b"alice")]
        refusals(villain, f"may not publish to {topic(victim, 'up')}")


@pytest.mark.parametrize(("villain", "victim"), PAIRS)
def test_a_device_reads_its_own_tasks_and_no_others(fleet, refusals, villain, victim):
    filters = [f"{topics.ROOT}/#", "#", topic("+", "task"), topic(victim, "task"), topic(victim, "up")]
    own = topics.device_subscriptions(FLEET, villain)
    with (
        Client(fleet.devices[villain][0], subscriptions=[*filters, *own]) as mallory,
        Client(fleet.devices[victim][0], subscriptions=topics.device_subscriptions(FLEET, victim)) as alice,
        Client(fleet.coordinator, "c") as mouth,
    ):
        alice.say(topic(victim, "up"), b"private")
        mouth.say(topic(victim, "task"), b"for alice")
        mouth.say(topic(victim, "down"), b"for alice too")
        assert alice.seen(b"for alice too") == [
            (topic(victim, "task"), b"for alice"),
            (topic(victim, "down"), b"for alice too"),
        ]
        mouth.say(topic(villain, "down"), b"own")
        assert set(mallory.seen(b"own")) == {(topic(villain, "down"), b"own")}
        refusals(villain, r"may not read fleetune/v1/#")


@pytest.mark.parametrize(("villain", "victim"), PAIRS[:2])
def test_a_will_is_bound_by_the_same_rules(fleet, refusals, villain, victim):
    with Client(fleet.coordinator, "c", [f"{topics.ROOT}/{FLEET}/#"]) as ears:
        with Client(fleet.devices[villain][0], will=Will(topic(victim, "state"), b"forged")) as mallory:
            assert is_connected(mallory.first)
            mallory.transport._client.socket().close()
        with Client(fleet.devices[victim][0]) as alice:
            alice.say(topic(victim, "up"), b"last")
            assert ears.seen(b"last") == [(topic(victim, "up"), b"last")]
        refusals(villain, f"may not leave a last will on {topic(victim, 'state')}")


@pytest.mark.parametrize("villain", ["mallory", "plug"])
def test_a_client_id_names_nobody(fleet, villain):
    with (
        Client(fleet.coordinator, topics.coordinator_id(FLEET), [topic("+", "up")]) as ears,
        Client(fleet.devices["alice"][0]) as alice,
    ):
        for client_id in ("alice", topics.coordinator_id(FLEET)):
            with Client(fleet.devices[villain][0], client_id) as mallory:
                assert is_connected(mallory.first)
                mallory.say(topic(villain, "up"), client_id.encode())
                assert ears.seen(client_id.encode()) == [(topic(villain, "up"), client_id.encode())]
        alice.say(topic("alice", "up"), b"last")
        ears.seen(b"last")
        assert alice.events.empty()  # it is still connected


def test_a_device_has_a_second_connection_with_topics_of_its_own(fleet):
    for device in ("alice", "lamp"):
        own, second = fleet.devices[device]
        probe = topic(f"{device}~probe", "probe")
        with Client(own) as first, Client(second, "y", [probe]) as other:
            assert is_connected(first.first)
            other.say(probe, b"echo")
            assert other.seen(b"echo") == [(probe, b"echo")]
            assert first.events.empty()


def test_the_largest_chunk_passes_and_nothing_larger(fleet, refusals):
    with (
        Client(fleet.coordinator, "c", [topic("+", "update")]) as ears,
        Client(fleet.devices["mallory"][0]) as mallory,
    ):
        chunk = bytes(MAX_CHUNK_BYTES + 24)
        mallory.say(topic("mallory", "update"), chunk)
        mallory.say(topic("mallory", "update"), bytes(MAX_MESSAGE_BYTES + 1))
        mallory.say(topic("mallory", "update"), b"last")
        assert [len(data) for _, data in ears.seen(b"last")] == [len(chunk), 4]
    refusals("mallory", "too large")


@dataclass
class Stranger:
    """A client without valid papers: how it connects, and the reason that is logged for its address."""

    connect: object
    reason: str


def foreign(fleet, tmp_path):
    other = RegisteredFleet(tmp_path / "other", "f")
    login = other.with_certificate("alice")[0]
    return replace(login, port=fleet.listeners.port, ca=str(fleet.files.authority))


def expired(fleet, tmp_path):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fleetune.coordinator.fleet.authority.DEVICE_DAYS", -1)
        made, key = certificates(fleet.authority, tmp_path, "alice", time.time())
    (tmp_path / "device.pem").write_text(made.certificate)
    return fleet.at(fleet.listeners.port, cert=str(tmp_path / "device.pem"), key=str(key))


def revoked(fleet, tmp_path):
    login = fleet.with_certificate("revoked")[0]
    fleet.revoke("revoked")
    reload(fleet.broker)
    return login


def reload(broker):
    before = broker.log.read_text().count("Reloading config")
    broker.reload()
    wait_until(lambda: broker.log.read_text().count("Reloading config") > before, "it has read its files")


def without(fleet, tmp_path):
    return fleet.at(fleet.listeners.port)


def plain_text(fleet, tmp_path):
    return Broker("127.0.0.1", fleet.listeners.port, "alice", "x")


def with_anothers_secret(fleet, tmp_path):
    return fleet.at(fleet.listeners.port + 1, username="lamp", password="plugs-secret")


def without_secret(fleet, tmp_path):
    return fleet.at(fleet.listeners.port + 1)


def as_coordinator(fleet, tmp_path):
    password = fleet.listeners.password
    return fleet.at(fleet.listeners.port + 1, username="coordinator", password=password)


STRANGERS = {
    foreign: "expired, revoked, or not of this fleet",
    expired: "expired, revoked, or not of this fleet",
    revoked: "expired, revoked, or not of this fleet",
    without: "it has no certificate",
    plain_text: "wrong version number",
    with_anothers_secret: "user name and secret",
    without_secret: "user name and secret",
    as_coordinator: "user name and secret",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused_and_their_address_is_logged(fleet, refusals, tmp_path, stranger):
    with Client(stranger(fleet, tmp_path), "alice") as client:
        assert is_disconnected(client.first)
    refusals("127.0.0.1", STRANGERS[stranger])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.parametrize("listener", [0, 1])
def test_an_older_tls_is_refused(fleet, refusals, version, listener):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", fleet.listeners.port + listener), timeout=5) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)alert protocol version"),
    ):
        context.wrap_socket(plain)
    refusals("127.0.0.1", "unsupported protocol")


def test_odd_bytes_do_not_end_the_log_reader(fleet, refusals):
    with socket.create_connection(("127.0.0.1", fleet.listeners.port), timeout=5) as one:
        one.sendall(bytes(range(256)) * 40)
    context = ssl.create_default_context(cafile=str(fleet.files.authority))
    with (
        socket.create_connection(("127.0.0.1", fleet.listeners.port + 1), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as one,
    ):
        name = b"\xff\xfe\n9: Denied PUBLISH from alice (d0)"
        one.sendall(b"\x10" + bytes([12 + len(name)]) + b"\x00\x04MQTT\x04\x02\x00\x00\x00" + name)
    with Client(fleet.devices["mallory"][0]) as mallory:
        mallory.say(topic("alice", "up"))
        refusals("mallory", "may not publish")


def test_roots_broker_has_a_user_of_its_own_and_its_files_are_private(fleet):
    place = fleet.broker._place or fleet.broker.log.parent
    assert (fleet.broker._place is not None) == (os.geteuid() == 0)
    assert {stat.S_IMODE(one.stat().st_mode) for one in place.iterdir()} == {0o600}
    assert fleet.listeners.password not in repr(fleet.listeners)
    for file in [*place.iterdir(), *fleet.files.path.iterdir()]:
        assert fleet.listeners.password.encode() not in file.read_bytes()


class Watched:
    """A broker that a watch follows, without the thread that restarts it."""

    def __init__(self, child):
        self.child = child


@pytest.mark.parametrize("make", ["with_certificate", "with_secret"])
def test_a_revoked_device_is_disconnected_and_cannot_come_back(tmp_path, make):
    fleet = RegisteredFleet(tmp_path)
    logins = [getattr(fleet, make)(name) for name in ("kept", "gone")]
    events = queue.SimpleQueue()
    with fleet.start() as broker:
        watch = FleetWatch(listeners=fleet.listeners, broker=Watched(broker))
        watch.report_to(events.put)
        assert wait_for(events, lambda _: True) == DevicesChanged({})
        try:
            with (
                Client(logins[0][0]) as kept,
                Client(logins[1][0]) as gone,
                Client(logins[1][1], "y") as probe,
            ):
                assert all(is_connected(one.first) for one in (kept, gone, probe))
                fleet.revoke("gone")
                for one in (gone, probe):
                    assert is_disconnected(wait_for(one.events, lambda _: True))
                assert wait_for(events, lambda _: True) == DevicesChanged({"gone": "revoked"})
                fleet.with_secret("new")  # another change, soon after
                assert is_disconnected(wait_for(gone.events, lambda _: True))  # its attempt to come back
                refused = wait_for(events, lambda event: isinstance(event, BrokerRefused))
                assert "127.0.0.1" in {one.who for one in refused.counts}
                assert kept.events.empty()
        finally:
            watch.close()


def test_two_devices_that_are_revoked_at_once_both_lose_their_connection(tmp_path):
    fleet = RegisteredFleet(tmp_path)
    logins = [fleet.with_certificate(f"d{n}")[0] for n in range(3)]
    with fleet.start() as broker:
        for number, login in enumerate(logins):
            fleet.revoke(f"d{number}")
            reload(broker)
            with Client(login) as client:
                assert is_disconnected(client.first), f"d{number}"


def test_names_of_the_operator_win_and_the_registry_knows_who_was_seen(tmp_path):
    fleet = RegisteredFleet(tmp_path)
    fleet.with_certificate("a")
    panel = fleet.with_secret("b")
    with fleet.start() as broker:
        watch = FleetWatch(listeners=fleet.listeners, broker=Watched(broker))
        try:
            events = queue.SimpleQueue()
            watch.report_to(events.put)
            with Client(panel[0]):  # it sends no presence message, as a program that is no agent
                wait_until(lambda: "b" in watch._seen, "a connection was not noticed")
            assert (watch.identity("a", "Kitchen").name, watch.identity("a", "").known_by) == (
                "Kitchen",
                "certificate",
            )
            assert watch.identity("b", "").known_by == "secret"
            assert watch.identity("c", "").known_by == "claim"
            watch.note_seen("a", "Kitchen", "agent 1")
            with Registry.open(fleet.files.registry) as registry:
                registry.rename("a", "Cellar")
            wait_for(events, lambda event: isinstance(event, DevicesChanged))  # when it began
            wait_for(events, lambda event: isinstance(event, DevicesChanged))
            assert watch.identity("a", "Kitchen").name == "Cellar"
        finally:
            watch.close()
    with Registry.open(fleet.files.registry) as registry:
        assert registry.device("a").agent == "agent 1"
        assert registry.device("a").last_seen is not None
        assert registry.device("b").last_seen is not None


def test_a_dropped_authority_ends_every_connection_and_lets_nobody_in(tmp_path, caplog):
    fleet, events = RegisteredFleet(tmp_path), queue.SimpleQueue()
    FleetAddress(("127.0.0.1",), 1, 2, 3).write(fleet.files)
    # the clients read the new authority's certificate, so only the broker can refuse them
    logins = [fleet.with_certificate("pi")[0], fleet.with_secret("lamp")[0]]
    with ExitStack() as running:
        broker = running.enter_context(closing(RestartedChild("broker", fleet.start, 0)))
        watch = running.enter_context(closing(FleetWatch(listeners=fleet.listeners, broker=broker)))
        clients = [running.enter_context(Client(login)) for login in logins]
        assert all(is_connected(one.first) for one in clients)
        watch.report_to(events.put)
        with Registry.open(fleet.files.registry) as registry:
            rotate(fleet.authority, registry, time.time(), at_once=True)
        for one in clients:
            assert is_disconnected(wait_for(one.events, lambda _: True))
        wait_for(events, lambda event: event == DevicesChanged({}))
        shut_out = dict.fromkeys(("pi", "lamp"), "must join again")
        assert wait_for(events, lambda event: isinstance(event, DevicesChanged)).shut_out == shut_out
        wait_until(lambda: "accepts connections again" in caplog.text, "the broker runs again")
        for login in logins:
            with Client(login, "again") as client:
                assert is_disconnected(client.first)
        refused = wait_for(events, lambda event: isinstance(event, BrokerRefused)).counts
        assert any("not of this fleet" in one.what for one in refused)
        with Client(fleet.with_certificate("new")[0]) as new:
            assert is_connected(new.first)
    (line,) = [record.getMessage() for record in caplog.records if "authority" in record.getMessage()]
    assert "the broker restarts, and 2 devices (lamp, pi) must join again" in line
