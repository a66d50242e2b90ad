"""The embedded broker as a child process."""

import os
import pwd
import queue
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.places import ROOT
from tests.helpers.ports import free_port
from tests.protocols.wire.test_transport import (  # noqa: F401 - certificate is a fixture
    KINDS,
    certificate,
    is_connected,
    is_disconnected,
    wait_for,
)

from fleetune.coordinator.broker import embedded_broker as module
from fleetune.coordinator.broker.credentials import Credentials
from fleetune.coordinator.broker.embedded_broker import Access, EmbeddedBroker
from fleetune.protocols.errors import TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_it_listens_on_the_loopback_and_stops(kind, tmp_path):
    with EmbeddedBroker.start(tmp_path, which=kind) as broker:
        assert (broker.which, broker.host, broker.running) == (kind, "127.0.0.1", True)
        socket.create_connection((broker.host, broker.port), timeout=5).close()
        assert broker.log.exists()
    assert not broker.running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((broker.host, broker.port), timeout=5)
    broker.close()


def test_a_port_in_use_is_one_line_with_its_last_words(kind, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TransportError) as caught:
            EmbeddedBroker.start(tmp_path, port=port, which=kind)
    assert "in use" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broker_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(TransportError, match="install mosquitto"):
        EmbeddedBroker.start(tmp_path, which="mosquitto")
    with EmbeddedBroker.start(tmp_path) as broker:
        assert broker.which == "amqtt"


def test_half_a_certificate_is_one_line(tmp_path):
    with pytest.raises(TransportError, match="both"):
        EmbeddedBroker.start(tmp_path, cert=tmp_path / "cert.pem")


PARENT = """
import sys, time
from pathlib import Path
from fleetune.coordinator.broker.credentials import Credentials
from fleetune.coordinator.broker.embedded_broker import Access, EmbeddedBroker
broker = EmbeddedBroker.start(Path(sys.argv[1]), which=sys.argv[2])
print(broker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child to its parent")
def test_it_dies_with_a_parent_that_is_killed(kind, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), kind],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as parent:
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        os.kill(parent.pid, signal.SIGKILL)
    give_up_at = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_password_keeps_others_out(kind, tmp_path):
    access = Access("f", Credentials("join-secret", "right"))
    with EmbeddedBroker.start(tmp_path, which=kind, port=free_port(), access=access) as broker:
        for password, wanted in (
            ("right", is_connected),
            ("wrong", is_disconnected),
            (None, is_disconnected),
        ):
            events = queue.SimpleQueue()
            who = Broker("127.0.0.1", broker.port, password and topics.COORDINATOR_USER, password)
            client = MqttTransport(who, "c", subscriptions=[], events=events)
            client.connect()
            event = wait_for(events, lambda _: True)
            client.close()
            assert wanted(event)
            if is_disconnected(event):
                assert "check user and password" in event.reason


as_root = pytest.mark.skipif(
    sys.platform == "win32"
    or os.geteuid() != 0
    or module.shutil.which("mosquitto", path=module._SEARCH) is None,
    reason="needs root and mosquitto: it is root's broker that gets a user of its own",
)


def user_of(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    users = next(line for line in lines if line.startswith("Uid:")).split()[1:]
    return {pwd.getpwuid(int(one)).pw_name for one in users}


def refused_or_connected(broker, password, ca):
    events = queue.SimpleQueue()
    who = Broker("127.0.0.1", broker.port, topics.COORDINATOR_USER, password, tls=True, ca=str(ca))
    client = MqttTransport(who, "c", subscriptions=[], events=events)
    client.connect()
    event = wait_for(events, lambda _: True)
    client.close()
    return event


@as_root
@pytest.mark.parametrize("user", [None, "nobody"])
def test_roots_mosquitto_has_a_user_of_its_own_and_reads_its_files_also_after_a_reload(
    user,
    tmp_path,
    monkeypatch,
    certificate,  # noqa: F811
):
    if user:
        monkeypatch.setattr(module, "mosquitto_user", lambda: user)
    folder = tmp_path / "run" / "broker"
    access, (cert, key) = Access("f", Credentials("join-secret", "right")), certificate
    with EmbeddedBroker.start(folder, which="mosquitto", access=access, cert=cert, key=key) as broker:
        assert user_of(broker.pid) == {user or module.mosquitto_user()} != {"root"}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        [place] = [one for one in module._SHARED.glob("fleetune-broker-*") if one == broker._place]
        assert {stat.S_IMODE(one.stat().st_mode) for one in place.iterdir()} == {0o600}
        assert is_connected(refused_or_connected(broker, "right", cert))
        Access("f", Credentials("join-secret", "new")).write(place)
        os.kill(broker.pid, signal.SIGHUP)
        give_up_at = time.monotonic() + 20
        while not is_connected(refused_or_connected(broker, "new", cert)):  # until it has read them again
            assert time.monotonic() < give_up_at
        assert is_disconnected(refused_or_connected(broker, "right", cert))
        assert broker.running
        assert "Unable" not in broker.log.read_text()
    assert not place.exists()


@as_root
def test_a_folder_that_a_killed_coordinator_left_is_taken_over(tmp_path):
    first = EmbeddedBroker.start(tmp_path, which="mosquitto")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert first._place.exists()
    with EmbeddedBroker.start(tmp_path, which="mosquitto") as second:
        assert second._place == first._place
    assert not first._place.exists()
