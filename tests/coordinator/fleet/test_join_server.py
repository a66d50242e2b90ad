"""The server of the join exchange as a process: TLS, HTTP, and requests that are too much."""

import contextlib
import http.client
import re
import shutil
import socket
import ssl
import stat
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from tests.coordinator.fleet.test_joining import NONCE, key

from fleetune.coordinator.fleet import join_limits
from fleetune.coordinator.fleet.authority import DAY_S, Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.invitations import invite, sha256_of
from fleetune.coordinator.fleet.join_desk import Desk
from fleetune.coordinator.fleet.join_limits import SAID_S, Limits, RefusalLog, network_of
from fleetune.coordinator.fleet.join_server import start_join_server
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.secret_hash import is_hash_of
from fleetune.protocols.errors import TransportError
from fleetune.protocols.wire.join_exchange import (
    AUTHORITY_PATH,
    JOIN_PATH,
    Joined,
    JoinLine,
    JoinPending,
    JoinRefused,
    JoinRequest,
    fingerprint_of,
)


class Served:
    """A join server, and what a device needs to talk to it."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server
        self.authority = Authority(folder)

    def code(self, **options):
        with Registry.open(self.folder.registry) as registry:
            return invite(registry, time.time(), **options)[1]

    def device(self, name):
        with Registry.open(self.folder.registry) as registry:
            return registry.device(name)

    def ask(self, method, path, body=b"", headers=None, source="127.0.0.1"):
        context = ssl.create_default_context(cadata=self.authority.bundle)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.server.port, context=context, timeout=15, source_address=(source, 0)
        )
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def join(self, code, signing_request="", source="127.0.0.1", **more):
        body = msgspec.json.encode(JoinRequest("lab", code, signing_request, **more))
        status, answer = self.ask("POST", JOIN_PATH, body, source=source)
        kind = {200: Joined, 202: JoinPending}.get(status, JoinRefused)
        return msgspec.json.decode(answer, type=kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = FleetFolder.of("lab", tmp_path_factory.mktemp("runs"))
    FleetAddress(("127.0.0.1",), 8883, 8884, 8885).write(folder)
    with contextlib.closing(start_join_server(folder, "127.0.0.1", 0)) as server:
        yield Served(folder, server)


def test_a_device_gets_the_authority_without_checking_and_joins_with_checking(served):
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", served.server.port, context=anyone, timeout=15)
    with contextlib.closing(connection):
        connection.request("GET", AUTHORITY_PATH)
        bundle = connection.getresponse().read().decode()
    assert fingerprint_of(ssl.PEM_cert_to_DER_cert(bundle)) == served.authority.fingerprint
    joined = served.join(served.code(), key(), name="hall")
    assert (joined.device, joined.port) == ("hall", 8883)
    assert abs(joined.now - time.time()) < 60


def test_refusals_are_one_line(served):
    refused = served.join("a" * 20, key())
    assert refused.reason.startswith("no invitation has this code; ")


def test_waiting_for_approval_has_a_status_of_its_own(served):
    assert isinstance(served.join(served.code(approve=True), key(), name="waits"), JoinPending)


def test_a_new_secret_is_soon_in_the_access_files(served):
    joined = served.join(served.code(), nonce=NONCE, name="tablet")
    assert joined.port == 8884
    until = time.monotonic() + 20
    while b"tablet:" not in served.folder.passwords.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)
    for path in served.folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", b"", {}, 404),
        ("GET", JOIN_PATH, b"", {}, 405),
        ("POST", AUTHORITY_PATH, b"", {}, 405),
        ("POST", JOIN_PATH, b"{}", {}, 400),
        ("POST", JOIN_PATH, b"[" * 16_000, {}, 400),
        ("POST", JOIN_PATH, b"\xff", {}, 400),
        ("POST", JOIN_PATH, b"x", {"Content-Length": "16385"}, 413),
        ("POST", JOIN_PATH, b"x", {"Content-Length": "-1"}, 400),
        ("POST", JOIN_PATH, b"x", {"Content-Length": "9" * 5000}, 413),
        ("POST", JOIN_PATH, b"x", {"Transfer-Encoding": "chunked"}, 411),
        ("GET", "/" + "x" * 9000, b"", {}, 431),
        ("GET", AUTHORITY_PATH, b"", {"X": "y" * 9000}, 431),
    ],
)
def test_requests_that_are_none_get_one_line(served, method, path, body, headers, status):
    found, answer = served.ask(method, path, body, headers, source="127.0.0.3")
    assert (found, b"\n" in answer) == (status, False)
    assert msgspec.json.decode(answer, type=JoinRefused).reason


def test_what_is_not_tls_or_not_http_ends_the_connection_only(served):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\0" * 300, b""):
        with socket.create_connection(("127.0.0.1", served.server.port), timeout=15) as one:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(1000):
                    pass
    assert served.server._process.poll() is None


def test_old_tls_is_refused(served):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", served.server.port), timeout=15) as one,
        pytest.raises(OSError),
    ):
        context.wrap_socket(one)


def test_an_address_whose_requests_are_refused_must_wait_and_others_need_not(served):
    code = served.code()
    statuses = [served.ask("POST", JOIN_PATH, b"{}", source="127.0.0.4")[0] for _ in range(25)]
    assert (statuses[0], statuses[-1]) == (400, 429)
    assert isinstance(served.join(code, key(), source="127.0.0.4", name="calm"), JoinRefused)
    assert isinstance(served.join(code, key(), name="calm"), Joined)


def test_idle_connections_of_one_address_make_room_for_new_ones(served):
    place = "127.0.0.1", served.server.port
    with contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection(place, 15, ("127.0.0.5", 0)))
            for _ in range(join_limits.MAX_OF_ADDRESS)
        ]
        assert served.ask("GET", AUTHORITY_PATH, source="127.0.0.5")[0] == 200
        assert idle[0].recv(1) == b""  # the oldest


def test_the_address_with_the_most_connections_makes_room():
    limits = Limits()
    limits.open = {n: f"1.2.3.{n % 32 // 4}" for n in range(join_limits.MAX_CONNECTIONS - 1)}
    assert limits.in_the_way("9.9.9.9") is None
    limits.open["one more of 5"] = "1.2.3.5"
    assert limits.in_the_way("9.9.9.9") == 20  # the oldest of 5


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("openssl")), reason="needs curl and openssl")
def test_curl_joins_as_the_documentation_says(served, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    (commands,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    line = JoinLine("127.0.0.1", served.server.port, "lab", served.code(), served.authority.fingerprint)

    def pasted(line):
        command = ["bash", "-e", "-c", commands]
        text = f"{line}\n".encode()
        return subprocess.run(
            command, input=text, cwd=tmp_path, capture_output=True, check=False, timeout=30
        ).stdout

    joined = msgspec.json.decode(pasted(line), type=Joined)
    assert (joined.device, joined.port) == ("panel", 8884)
    assert is_hash_of(joined.secret, served.device("panel").secret)
    wrong = msgspec.structs.replace(line, code=served.code(), fingerprint="a" * 32)
    assert b"differ" in pasted(wrong)
    with Registry.open(served.folder.registry) as registry:
        assert registry.invitation(sha256_of(wrong.code)).uses_left == 1  # the code was not sent


def test_a_taken_port_gets_one_line(served):
    with pytest.raises(TransportError, match=r"cannot listen on port .*: Address already in use; stop"):
        start_join_server(served.folder, "127.0.0.1", served.server.port)


def test_no_server_without_an_address(tmp_path):
    with pytest.raises(TransportError, match="fleet lab: no coordinator has opened it to the network"):
        start_join_server(FleetFolder.of("lab", tmp_path), "127.0.0.1", 0)


@pytest.fixture
def desk(tmp_path):
    folder = FleetFolder.of("lab", tmp_path)
    FleetAddress(("127.0.0.1",), 8883, 8884, 8885).write(folder)
    made = Desk(folder, Limits(lambda: 100.0))
    made.look()
    with contextlib.closing(made.registry):
        yield made


@pytest.mark.parametrize("name", ["server", "server_key", "revoked", "passwords"])
def test_a_lost_file_is_made_anew_at_the_next_look(desk, name):
    file = getattr(desk.folder, name)
    file.unlink()
    desk.look()
    assert file.exists()
    made = [one.read_bytes() for one in (desk.folder.server, desk.folder.revoked)]
    desk.look()
    assert [one.read_bytes() for one in (desk.folder.server, desk.folder.revoked)] == made


def test_the_server_is_certified_anew_once_the_clock_is_set(desk, monkeypatch):
    now = time.time()
    for wrong in (-20 * 365 * DAY_S, 10 * DAY_S, 0.0):
        before = desk.folder.server.read_bytes()
        monkeypatch.setattr(time, "time", lambda wrong=wrong: now + wrong)
        desk.look()
        assert desk.folder.server.read_bytes() != before


def test_a_cause_is_logged_once_a_minute(caplog):
    now = 100.0
    refusals = RefusalLog(lambda: now)
    for _ in range(5):
        refusals.say("code", "1.2.3.4", "no\ncode; x")
    refusals.say("used", "1.2.3.4", "used")
    assert [one.message for one in caplog.records] == [
        "join request from 1.2.3.4 refused: no code; x",
        "join request from 1.2.3.4 refused: used",
    ]
    now += SAID_S
    refusals.say("code", "1.2.3.5", "no code")
    assert caplog.records[-1].message.endswith(
        "no code (and 4 more requests like it since the last such line)"
    )


def test_ten_thousand_attempts_a_minute_are_few_requests():
    now = 0.0
    limits = Limits(lambda: now)
    served, answered = 0, 0
    for _ in range(10_000):
        if limits.admits("1.2.3.4"):
            served += 1
            answered += limits.take("1.2.3.4")
        now += 60 / 10_000
    assert (served, answered) == (499, 31)
    assert limits.admits("1.2.3.5")


def test_addresses_of_one_network_count_as_one():
    names = ["1.2.3.4", "::ffff:1.2.3.4", "2001:db8::1", "2001:db8::2", "fe80::1%eth0"]
    assert [network_of(one) for one in names] == ["1.2.3.4", "1.2.3.4", *["2001:db8::/64"] * 2, "fe80::/64"]
