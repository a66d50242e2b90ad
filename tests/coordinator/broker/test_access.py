"""Who gets into the embedded broker of a fleet, and what they may do there: real brokers, hostile clients."""

import queue
import socket
import stat

import pytest
from tests.protocols.wire.test_transport import KINDS, is_connected, is_disconnected, wait_for
from typer.testing import CliRunner

from fleetune.coordinator.broker.access_rules import may
from fleetune.coordinator.broker.broker_options import broker_at
from fleetune.coordinator.broker.credentials import Credentials, credentials_of
from fleetune.coordinator.broker.embedded_broker import MAX_MESSAGE_BYTES, Access, EmbeddedBroker
from fleetune.coordinator.cli import app
from fleetune.coordinator.fleet.secret_hash import is_hash_of
from fleetune.edge_agent.cli import app as agent
from fleetune.edge_agent.probes.link_speed import measure_link
from fleetune.protocols.errors import StoreError, TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES
from fleetune.protocols.wire.transport import Received, Will
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport, parse_broker

CREDENTIALS = Credentials("join-secret", "coordinator-secret")
FLEET = "f"


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=KINDS)
def broker(request, tmp_path):
    with EmbeddedBroker.start(tmp_path, which=request.param, access=Access(FLEET, CREDENTIALS)) as running:
        yield running


class Client:
    """A client that may be anybody; `seen` gives the messages up to the one that marks the end."""

    def __init__(self, broker, client_id, user, password, subscriptions=(), will=None):
        self.events = queue.SimpleQueue()
        where = Broker("127.0.0.1", broker.port, user, password)
        self.transport = MqttTransport(
            where, client_id, subscriptions=subscriptions, events=self.events, will=will
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


def device(broker, name, *, password="join-secret", subscriptions=(), will=None):
    return Client(broker, name, topics.JOIN_USER, password, subscriptions, will)


def coordinator(broker, *subscriptions):
    return Client(broker, "c", topics.COORDINATOR_USER, "coordinator-secret", subscriptions)


def topic(name, channel):
    return topics.topic(FLEET, name, channel)


@pytest.mark.parametrize(
    ("user", "password"),
    [
        (None, None),
        ("join", "wrong"),
        ("join", ""),
        ("coordinator", "join-secret"),
        ("root", "join-secret"),
    ],
)
def test_nobody_gets_in_without_the_password(broker, user, password):
    with Client(broker, "a", user, password) as client:
        assert is_disconnected(client.first)
        assert "check user and password" in client.first.reason


def test_a_device_writes_its_own_topics_and_no_others(broker):
    with (
        coordinator(broker, f"{topics.ROOT}/{FLEET}/#") as ears,
        device(broker, "mallory") as mallory,
        device(broker, "alice") as alice,
    ):
        assert all(is_connected(client.first) for client in (ears, mallory, alice))
        for channel in ("state", "up", "update", "down", "task", "probe"):
            mallory.say(topic("alice", channel), retain=True)
            mallory.say(topics.topic("other", "mallory", channel))
        for channel in ("down", "task"):  # for the coordinator to write
            mallory.say(topic("mallory", channel))
        mallory.say(f"{topics.ROOT}/{FLEET}/coordinator")
        mallory.say(topics.coordinators(FLEET))
        for channel in ("state", "up", "update"):
            mallory.say(topic("mallory", channel), b"own")
        mallory.say(topic("mallory", "up"), b"last")
        assert ears.seen(b"last") == [
            (topic("mallory", "state"), b"own"),
            (topic("mallory", "up"), b"own"),
            (topic("mallory", "update"), b"own"),
            (topic("mallory", "up"), b"last"),
        ]
        alice.say(topic("alice", "up"), b"alice")
        assert ears.seen(b"alice") == [(topic("alice", "up"), b"alice")]


def test_a_device_reads_its_own_tasks_and_no_others(broker):
    filters = [f"{topics.ROOT}/#", "#", topic("+", "task"), topic("alice", "task"), topic("alice", "up")]
    own = topics.device_subscriptions(FLEET, "mallory")
    with (
        device(broker, "mallory", subscriptions=[*filters, *own]) as mallory,
        device(broker, "alice", subscriptions=topics.device_subscriptions(FLEET, "alice")) as alice,
        coordinator(broker) as mouth,
    ):
        alice.say(topic("alice", "up"), b"private")
        mouth.say(topic("alice", "task"), b"for alice")
        mouth.say(topic("alice", "down"), b"for alice too")
        assert alice.seen(b"for alice too") == [
            (topic("alice", "task"), b"for alice"),
            (topic("alice", "down"), b"for alice too"),
        ]
        mouth.say(topic("mallory", "down"), b"own")
        assert set(mallory.seen(b"own")) == {(topic("mallory", "down"), b"own")}


def test_a_will_is_bound_by_the_same_rules(broker):
    with coordinator(broker, f"{topics.ROOT}/{FLEET}/#") as ears:
        mallory = device(broker, "mallory", will=Will(topic("alice", "state"), b"forged"))
        with mallory:
            if is_connected(mallory.first):
                mallory.transport._client.socket().close()
        with device(broker, "alice") as alice:
            alice.say(topic("alice", "up"), b"last")
            assert ears.seen(b"last") == [(topic("alice", "up"), b"last")]


def test_the_largest_chunk_passes_and_a_device_can_measure_its_link(broker):
    with coordinator(broker, topic("+", "update")) as ears, device(broker, "alice") as alice:
        chunk = bytes(MAX_CHUNK_BYTES + 24)
        alice.say(topic("alice", "update"), chunk)
        alice.say(topic("alice", "update"), b"last")
        assert [len(data) for _, data in ears.seen(b"last")] == [len(chunk), 4]
        where = Broker("127.0.0.1", broker.port, topics.JOIN_USER, "join-secret")
        found = measure_link(where, FLEET, "alice", patience_s=20)
        assert found.unknown == ""
        assert found.downlink_bps > 0


@pytest.mark.parametrize("kind", KINDS[:1])
def test_mosquitto_takes_nothing_larger_than_a_chunk(kind, tmp_path):
    with (
        EmbeddedBroker.start(tmp_path, which=kind, access=Access(FLEET, CREDENTIALS)) as broker,
        coordinator(broker, topic("+", "update")) as ears,
        device(broker, "mallory") as mallory,
    ):
        mallory.say(topic("mallory", "update"), bytes(MAX_MESSAGE_BYTES + 1))
        mallory.say(topic("mallory", "update"), b"last")
        assert ears.seen(b"last") == [(topic("mallory", "update"), b"last")]


def test_passwords_are_made_once_for_a_fleet_and_for_nobody_else_to_read(tmp_path):
    made = credentials_of("f", tmp_path)
    assert credentials_of("f", tmp_path) == made
    assert credentials_of("g", tmp_path) != made
    assert made.join != made.coordinator
    assert made.join not in repr(made)
    path = tmp_path / ".fleets" / "f.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    hashed = made.password_file().splitlines()[0].partition(":")[2]
    assert is_hash_of(made.join, hashed)
    assert not is_hash_of(made.coordinator, hashed)
    assert made.join not in made.password_file()
    path.write_text("{}")
    with pytest.raises(StoreError, match="damaged"):
        credentials_of("f", tmp_path)


def test_beyond_the_loopback_a_terminal_gets_the_agents_command_with_a_password(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with broker_at(None, tmp_path / "run", "f", bind="127.0.0.1", port=0) as inside:
        assert inside.username is None
        assert "edge-agent" not in capsys.readouterr().out
    with broker_at(None, tmp_path / "run", "f", bind="0.0.0.0", port=0) as outside:
        _, line = capsys.readouterr().out.splitlines()  # the first says which broker it is
        command = line.partition("FLEETUNE_BROKER=")[2]
        given = parse_broker(command.split()[0])
        assert command.split()[1:] == [
            "edge-agent",
            "run",
            "--fleet",
            "f",
            "--device",
            "NAME",
            "--data",
            "npz:FILE",
        ]
        assert (given.username, given.password) == ("join", credentials_of("f", tmp_path).join)
        assert (outside.username, outside.host) == ("coordinator", "127.0.0.1")
        assert given.password not in f"{outside!r} {given!r}"
        for user, password, wanted in [
            ("join", given.password, is_connected),
            ("coordinator", outside.password, is_connected),
            (None, None, is_disconnected),
        ]:
            with Client(outside, "a", user, password) as client:
                assert wanted(client.first)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert given.password.encode() not in file.read_bytes()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("bind", ["::1", "::"])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_join_by_ipv6(kind, bind, tmp_path):
    access = Access(FLEET, CREDENTIALS)
    with EmbeddedBroker.start(tmp_path, which=kind, bind=bind, access=access) as broker:
        assert broker.host == "::1"
        hosts = ["[::1]", "127.0.0.1"] if bind == "::" else ["[::1]"]
        for host in hosts:
            where = parse_broker(f"mqtt://join:join-secret@{host}:{broker.port}")
            assert measure_link(where, FLEET, "alice", patience_s=20).unknown == ""


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_port_in_use_and_an_address_of_another_machine_are_one_line():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        for bind in ("::1", "::"):
            with pytest.raises(TransportError, match=rf"\[{bind}\]:{port}: .*in use"):
                EmbeddedBroker.check(bind, port)
    with pytest.raises(TransportError, match=r"\[2001:db8::1\]:0: "):
        EmbeddedBroker.check("2001:db8::1", 0)


def test_the_rules_hold_for_names_that_look_like_more():
    for client in ("alice/task", "+", "#", "", "alice/../bob"):
        assert not may("f", "join", client, f"{topics.ROOT}/f/alice/task/task", write=False)
        assert not may("f", "join", client, f"{topics.ROOT}/f/bob/up", write=True)
    assert not may("f", None, "alice", f"{topics.ROOT}/f/alice/up", write=True)
    assert may("f", "join", "alice", f"{topics.ROOT}/f/alice/up", write=True)
    assert not may("f", "coordinator", "c", f"{topics.ROOT}/other/alice/up", write=True)


@pytest.mark.parametrize("program", [app, agent])
@pytest.mark.parametrize(
    "arguments",
    [
        ["mqtt://join:secret@h"],
        ["serve", "run.toml", "mqtt://join:secret@h"],
        ["run", "--fleet", "f", "--threads", "mqtt://join:secret@h"],
        ["run", "--fleet", "f", "--broker", "h", "--data", "digits", "mqtt://join:secret@h"],
    ],
)
def test_a_wrong_command_line_is_said_without_the_password(program, arguments):
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 2
    assert "secret" not in result.output
