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
from tests.helpers.fleet_processes import wait_until
from tests.helpers.places import ROOT
from tests.helpers.registered_fleet import RegisteredFleet
from tests.protocols.wire.test_transport import KINDS, is_connected, wait_for
from typer.testing import CliRunner

from fleetune.coordinator.broker import embedded_broker as module
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.cli import app
from fleetune.protocols.errors import TransportError
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


PARENT = """
import sys, time
from pathlib import Path
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
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


@as_root
@pytest.mark.parametrize("user", [None, "nobody"])
def test_roots_mosquitto_has_a_user_of_its_own_and_reads_its_files_also_after_a_reload(
    user, tmp_path, monkeypatch
):
    if user:
        monkeypatch.setattr(module, "mosquitto_user", lambda: user)
    fleet = RegisteredFleet(tmp_path)
    with fleet.start() as broker:
        assert user_of(broker.pid) == {user or module.mosquitto_user()} != {"root"}
        assert stat.S_IMODE(broker.log.parent.stat().st_mode) == 0o700
        place = broker._place
        assert place.parent == module._SHARED
        assert {stat.S_IMODE(one.stat().st_mode) for one in place.iterdir()} == {0o600}
        login, _ = fleet.with_secret("new")
        broker.reload()
        wait_until(lambda: can_connect(login), "it has read them again")
        assert broker.running
        assert "Unable" not in broker.log.read_text()
    assert not place.exists()


def can_connect(login):
    events = queue.SimpleQueue()
    client = MqttTransport(login, "c", subscriptions=[], events=events)
    client.connect()
    event = wait_for(events, lambda _: True)
    client.close()
    return is_connected(event)


@as_root
def test_a_folder_that_a_killed_coordinator_left_is_taken_over(tmp_path):
    first = EmbeddedBroker.start(tmp_path, which="mosquitto")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert first._place.exists()
    with EmbeddedBroker.start(tmp_path, which="mosquitto") as second:
        assert second._place == first._place
    assert not first._place.exists()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_clients_connect_by_ipv6(kind, tmp_path):
    with EmbeddedBroker.start(tmp_path, which=kind, bind="::") as broker:
        assert broker.host == "::1"
        for host in ("::1", "127.0.0.1"):
            assert can_connect(Broker(host, broker.port))


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_port_in_use_and_an_address_of_another_machine_are_one_line():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        for bind in ("::1", "::"):
            for first in (port, port - 2):  # of three
                with pytest.raises(TransportError, match=rf"\[{bind}\]:{port}: .*in use"):
                    module.claim_ports(bind, first, 3)
    with pytest.raises(TransportError, match=r"\[2001:db8::1\]:0: "):
        module.claim_ports("2001:db8::1", 0)


def test_free_ports_are_next_to_each_other():
    first = module.claim_ports("127.0.0.1", 0, 3)
    assert module.claim_ports("127.0.0.1", first, 3) == first


def test_beyond_the_loopback_only_mosquitto_serves_and_nothing_is_written_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "new"\n[model]\nname = "mlp"\ninput_shape = [1, 8, 8]\nnum_classes = 10\n'
        '[method]\nname = "fedspu"\n'
    )
    runs = ["--runs", str(tmp_path / "runs")]
    for command in (["serve", str(tmp_path / "run.toml"), *runs], ["service", str(tmp_path)]):
        done = CliRunner().invoke(app, [*command, "--bind", "0.0.0.0"])
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
        assert "apt install mosquitto" in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["run.toml"]
