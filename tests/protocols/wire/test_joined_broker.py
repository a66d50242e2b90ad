"""MQTT with the certificates of a joined fleet: what is trusted, what is refused, and what the log says."""

import getpass
import queue
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.helpers.own_authority import DAY, OwnAuthority, key_pem, new_key
from tests.helpers.ports import free_port
from tests.protocols.wire.test_transport import is_connected, is_disconnected, wait_for

from fleetune.protocols.wire.transport import tls
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin")
pytestmark = [
    pytest.mark.skipif(not MOSQUITTO, reason="mosquitto is not installed"),
    # Paho leaves the socket of a failed handshake to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def mosquitto(folder, server, authority, *more):
    """A mosquitto that requires a certificate of this authority; its port."""
    port, (cert, key) = free_port(), server
    (folder / "clients.pem").write_text(authority.pem)
    lines = [f"listener {port} 127.0.0.1", f"cafile {folder / 'clients.pem'}", f"certfile {cert}"]
    lines += [f"keyfile {key}", "require_certificate true", "use_identity_as_username true"]
    lines += ["allow_anonymous false", f"user {getpass.getuser()}", *more]
    (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([MOSQUITTO, "-c", folder / "mosquitto.conf"], stderr=subprocess.DEVNULL)
    try:
        give_up_at = time.monotonic() + 20
        while time.monotonic() < give_up_at:
            with socket.socket() as asking:
                if not asking.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def broker_of(folder, port, trusted, signer, **how):
    """The broker as a device knows it whose certificate `signer` has signed."""
    key = new_key()
    (folder / "authority.pem").write_text(trusted.pem)
    (folder / "device.pem").write_text(key_pem(key) + signer.signed("d-7", key.public_key(), **how))
    ca, cert = str(folder / "authority.pem"), str(folder / "device.pem")
    return Broker("127.0.0.1", port, tls=True, ca=ca, cert=cert, joined=True)


def first_event(broker, wanted=is_disconnected):
    """The first event of that kind."""
    events = queue.SimpleQueue()
    transport = MqttTransport(broker, "d-7", subscriptions=[], events=events)
    transport.connect()
    try:
        return wait_for(events, wanted)
    finally:
        transport.close()


@pytest.fixture
def authority():
    return OwnAuthority(begins=datetime.now(UTC) - 400 * DAY)


def test_a_joined_device_connects_to_any_address_of_its_coordinator(tmp_path, authority):
    with mosquitto(tmp_path, authority.server(tmp_path), authority) as port:
        assert first_event(broker_of(tmp_path, port, authority, authority), is_connected)


@pytest.mark.parametrize("what", ["expired", "foreign"])
def test_a_refused_certificate_is_one_line_that_says_what_to_do(tmp_path, authority, what):
    signer = OwnAuthority() if what == "foreign" else authority
    how = {"begins": datetime.now(UTC) - 9 * DAY, "life": 8 * DAY} if what == "expired" else {}
    with mosquitto(tmp_path, authority.server(tmp_path), authority) as port:
        said = first_event(broker_of(tmp_path, port, authority, signer, **how)).reason
    assert "this device's certificate" in said
    assert ("has expired" in said) == (what == "expired")
    assert said.endswith("; join again with a new invitation: edge-agent join LINE")


def test_a_revoked_device_is_told_so(tmp_path, authority):
    key = new_key()
    (tmp_path / "authority.pem").write_text(authority.pem)
    certificate = authority.signed("d-7", key.public_key())
    (tmp_path / "device.pem").write_text(key_pem(key) + certificate)
    (tmp_path / "revoked.pem").write_text(authority.revoked(certificate))
    files = [str(tmp_path / name) for name in ("authority.pem", "device.pem")]
    with mosquitto(
        tmp_path, authority.server(tmp_path), authority, f"crlfile {tmp_path / 'revoked.pem'}"
    ) as port:
        broker = Broker("127.0.0.1", port, tls=True, ca=files[0], cert=files[1], joined=True)
        said = first_event(broker).reason
    assert "certificate is revoked; the fleet's operator can undo that (edge-coordinator approve)" in said


def test_a_broker_of_another_authority_is_not_trusted(tmp_path, authority):
    other = OwnAuthority()
    with mosquitto(tmp_path, other.server(tmp_path), other) as port:
        said = first_event(broker_of(tmp_path, port, authority, authority)).reason
    assert "is not the broker of the fleet" in said


def test_a_device_cannot_be_a_broker(tmp_path, authority):
    key = new_key()
    (tmp_path / "server.pem").write_text(authority.signed("d-8", key.public_key()))
    (tmp_path / "server.key").write_text(key_pem(key))
    with mosquitto(tmp_path, (tmp_path / "server.pem", tmp_path / "server.key"), authority) as port:
        said = first_event(broker_of(tmp_path, port, authority, authority)).reason
    assert "is not the broker of the fleet" in said


def test_an_expired_broker_is_not_trusted(tmp_path, authority):
    old = authority.server(tmp_path, begins=datetime.now(UTC) - 9 * DAY, life=8 * DAY)
    with mosquitto(tmp_path, old, authority) as port:
        said = first_event(broker_of(tmp_path, port, authority, authority)).reason
    assert "its certificate has expired, or this device's clock is ahead" in said


def test_a_clock_that_is_behind_connects_and_checks_dates_once_it_is_right(tmp_path, authority):
    begins = datetime.now(UTC) + timedelta(seconds=6)
    server = authority.server(tmp_path, begins=begins, life=2 * DAY)
    events = queue.SimpleQueue()
    with mosquitto(tmp_path, server, authority) as port:
        transport = MqttTransport(
            broker_of(tmp_path, port, authority, authority), "d-7", subscriptions=[], events=events
        )
        transport.connect()
        assert "clock is behind" in wait_for(events, is_disconnected).reason
        assert wait_for(events, is_connected)
        connections = transport._tls
        assert connections._is_clock_behind == (time.time() < begins.timestamp())
        transport.close()
    assert abs(connections._past_s - begins.timestamp()) <= 1


def test_renewed_files_are_used_by_the_next_connection(tmp_path, authority):
    broker = broker_of(tmp_path, 1, authority, authority)
    connections = tls.TlsConnections(broker.ca, broker.cert, None, joined=True)
    (tmp_path / "device.pem").write_text("not a certificate")
    with socket.socket() as line, pytest.raises(OSError):
        connections.wrap_socket(line)
