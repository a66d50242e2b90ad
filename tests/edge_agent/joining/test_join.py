"""edge-agent join: what it checks before it sends anything, what it stores, and how it starts again."""

import json
import os
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from tests.helpers.errors import raises
from tests.helpers.own_authority import OwnAuthority, key_pem, new_key
from tests.helpers.places import ROOT
from typer.testing import CliRunner

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.joining import join as joining
from fleetune.edge_agent.joining.joined_fleet import (
    Certificates,
    Credentials,
    forget,
    joined_fleet,
    joined_fleets,
)
from fleetune.edge_agent.joining.signing_request import key_and_request
from fleetune.protocols.errors import SettingError, StoreError, TransportError
from fleetune.protocols.wire.join_exchange import (
    AUTHORITY_PATH,
    Joined,
    JoinLine,
    JoinPending,
    JoinRefused,
    JoinRequest,
)

CODE = "abcdefghij234567abcd"
DAY = timedelta(days=1)


class FakeCoordinator(ThreadingHTTPServer):
    """Answers the exchange over HTTPS. `answers` come first, in their order, then `Joined`."""

    def __init__(self, folder, *, authority=None, server=None, shown=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.authority = authority or OwnAuthority()
        self.shown = shown or self.authority.pem
        self.requests, self.paths, self.answers = [], [], []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*(server or self.authority.server(folder)))
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def line(self, **changes):
        given = {"fingerprint": self.authority.fingerprint, "code": CODE, "fleet": "homes", **changes}
        return JoinLine("127.0.0.1", self.server_port, **given)

    def joined(self, request):
        device = request.device or "d-7"
        certificates = self.authority.for_request(request.signing_request, device)
        return Joined(device, request.name, 8883, self.authority.pem, *certificates, now=time.time())

    def handle_error(self, *_):
        """A client that does not trust this server ends the connection."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append((self.path, self.headers.as_string()))
        self._answer(200, self.server.shown.encode())

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        request = msgspec.json.decode(data, type=JoinRequest)
        self.server.requests.append(request)
        answer = self.server.answers.pop(0) if self.server.answers else self.server.joined(request)
        if answer is None:  # the answer is lost
            self.connection.shutdown(2)
        elif isinstance(answer, int):
            self._answer(answer, b"{}")
        else:
            status = {Joined: 200, JoinPending: 202}.get(type(answer), 403)
            self._answer(status, msgspec.json.encode(answer))

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def coordinator(folder, **how):
    with FakeCoordinator(folder, **how) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def join(server, state, *, device=None, said=None, **changes):
    return joining.join(
        server.line(**changes),
        state,
        device=device,
        name="Kitchen",
        say=(said if said is not None else []).append,
        sleep=lambda _: None,
    )


def everything_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_device_joins_and_knows_its_broker(tmp_path):
    with coordinator(tmp_path) as server:
        joined = join(server, tmp_path / "state")
    assert (joined.fleet, joined.device, joined.name) == ("homes", "d-7", "Kitchen")
    broker = joined.broker
    assert (broker.host, broker.port, broker.tls, broker.joined) == ("127.0.0.1", 8883, True, True)
    assert joined_fleets(tmp_path / "state") == [joined] == [joined_fleet(tmp_path / "state")]
    for path in (broker.cert, broker.probe_cert):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path)
    assert not (joined.credentials.folder / "pending.json").exists()
    assert joined.credentials.valid_until() > datetime.now(UTC) + 300 * DAY


def test_only_the_owner_can_read_what_is_stored(tmp_path):
    os.umask(os.umask(0o022))
    with coordinator(tmp_path) as server:
        joined = join(server, tmp_path / "state")
    files = everything_below(joined.credentials.folder)
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    folders = [joined.credentials.folder, joined.credentials.folder.parent]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    forget(joined)
    assert joined_fleets(tmp_path / "state") == []
    assert everything_below(tmp_path / "state") == []


def test_a_server_with_another_fingerprint_learns_nothing(tmp_path):
    with coordinator(tmp_path) as server:
        wrong = OwnAuthority().fingerprint
        with raises(TransportError, "another fingerprint", "nothing was sent"):
            join(server, tmp_path / "state", fingerprint=wrong)
    assert [path for path, _ in server.paths] == [AUTHORITY_PATH]
    assert "Kitchen" not in str(server.paths)
    assert CODE not in str(server.paths)
    assert server.requests == []
    assert everything_below(tmp_path / "state") == []


def test_a_server_that_shows_the_authority_but_is_not_signed_by_it_learns_nothing(tmp_path):
    real, fake = OwnAuthority(), OwnAuthority()
    with (
        coordinator(tmp_path, authority=real, server=fake.server(tmp_path)) as server,
        raises(TransportError, "is not the coordinator", "nothing was sent"),
    ):
        join(server, tmp_path / "state")
    assert server.requests == []


def test_a_device_cannot_be_a_server(tmp_path):
    authority, key = OwnAuthority(), new_key()
    (tmp_path / "device.pem").write_text(authority.signed("d-7", key.public_key()) + key_pem(key))
    with (
        coordinator(tmp_path, authority=authority, server=(tmp_path / "device.pem",)) as server,
        raises(TransportError, "is not the coordinator"),
    ):
        join(server, tmp_path / "state")
    assert server.requests == []


def test_a_lost_answer_is_asked_for_again_with_the_same_key(tmp_path):
    with coordinator(tmp_path) as server:
        server.answers = [None]
        with raises(TransportError, "run the same command again"):
            join(server, tmp_path / "state")
        assert joined_fleets(tmp_path / "state") == []
        join(server, tmp_path / "state")
    first, second = server.requests
    assert first == second


def test_a_pending_device_names_the_operators_command_once(tmp_path):
    said = []
    with coordinator(tmp_path) as server:
        server.answers = [JoinPending("d-7", 2.0), JoinPending("d-7", 2.0), None]
        joined = join(server, tmp_path / "state", said=said)
    assert joined.device == "d-7"
    assert len(server.requests) == 4
    assert [words for words in said if "edge-coordinator approve d-7" in words] == said[:1]


def test_a_refusal_is_one_line(tmp_path):
    with coordinator(tmp_path) as server:
        server.answers = [JoinRefused("the code has expired;\n ask for a new invitation")]
        with raises(SettingError, "the code has expired; ask for a new invitation"):
            join(server, tmp_path / "state")
    assert joined_fleets(tmp_path / "state") == []


def test_a_busy_server_is_asked_again(tmp_path):
    with coordinator(tmp_path) as server:
        server.answers = [429, 503, 429]
        assert join(server, tmp_path / "state").device == "d-7"
        server.answers = [429] * 20
        with raises(TransportError, "too many requests"):
            join(server, tmp_path / "state")


@pytest.mark.parametrize(
    ("file", "kept"), [("fleet.json", 0), ("device.pem", 0), ("device.pem", 100), ("device.pem", 400)]
)
def test_joining_again_repairs_a_damaged_file(tmp_path, file, kept):
    with coordinator(tmp_path) as server:
        first = join(server, tmp_path / "state")
        other = join(server, tmp_path / "state", fleet="farms")
        key = first.credentials.key
        damaged = first.credentials.folder / file
        damaged.write_bytes(damaged.read_bytes()[:kept])
        assert joined_fleet(tmp_path / "state", "farms") == other
        assert join(server, tmp_path / "state") == first
    assert joined_fleet(tmp_path / "state", "homes") == first
    assert first.credentials.key == key


def test_a_device_that_joins_again_keeps_its_id_and_its_key(tmp_path):
    with coordinator(tmp_path) as server:
        before = join(server, tmp_path / "state", device="pi")
        key = before.credentials.key
        again = join(server, tmp_path / "state", code="z" * 20)
    assert again.device == "pi" == server.requests[1].device
    assert again.credentials.key == key != ""


@pytest.mark.parametrize("is_known", [True, False])
def test_a_device_whose_renewal_was_lost_joins_with_the_key_that_is_known(tmp_path, is_known):
    renewed = key_and_request()
    with coordinator(tmp_path) as server:
        join(server, tmp_path / "state", device="pi")
        credentials = Credentials.of(tmp_path / "state", "homes")
        first = credentials.key
        credentials.keep_pending(renewed)
        server.answers = [] if is_known else [JoinRefused("another device has the id 'pi'")]
        assert join(server, tmp_path / "state").device == "pi"
    assert server.requests[1].signing_request == renewed.request
    assert len(server.requests) == (2 if is_known else 3)
    assert credentials.key == (renewed.key if is_known else first)
    assert credentials.pending() is None


def test_a_clock_that_is_behind_joins_and_is_warned(tmp_path):
    # the same as a device whose clock is behind: authority and server become valid tomorrow
    authority, said = OwnAuthority(begins=datetime.now(UTC) + DAY), []
    server_files = authority.server(tmp_path, begins=datetime.now(UTC) + DAY)
    with coordinator(tmp_path, authority=authority, server=server_files) as server:
        join(server, tmp_path / "state", said=said)
    assert ["clock is behind" in words for words in said] == [True]


def test_an_expired_server_is_refused(tmp_path):
    authority = OwnAuthority(begins=datetime.now(UTC) - 20 * DAY)
    old = authority.server(tmp_path, begins=datetime.now(UTC) - 9 * DAY, life=8 * DAY)
    with (
        coordinator(tmp_path, authority=authority, server=old) as server,
        raises(TransportError, "expired", "nothing was sent"),
    ):
        join(server, tmp_path / "state")
    assert server.requests == []


def test_certificates_of_another_key_are_not_stored(tmp_path):
    authority, credentials = OwnAuthority(), Credentials.of(tmp_path, "homes")
    made, other = key_and_request(), key_and_request()
    credentials.keep_pending(made)
    certificates = authority.for_request(other.request, "d-7")
    with raises(StoreError, "do not belong to this device's key"):
        credentials.keep(made.key, Certificates(*certificates, authority.pem))
    assert [path.name for path in everything_below(tmp_path)] == ["pending.json"]
    assert credentials.pending() == made


def test_several_fleets_need_a_choice(tmp_path):
    with coordinator(tmp_path) as server:
        for fleet in ("homes", "farms"):
            join(server, tmp_path / "state", fleet=fleet)
    assert joined_fleet(tmp_path / "state", "farms").fleet == "farms"
    assert joined_fleet(tmp_path / "state", "roads") is None
    with raises(SettingError, "farms, homes", "--fleet"):
        joined_fleet(tmp_path / "state")


@pytest.mark.parametrize("how", ["argument", "variable", "stdin", "terminal"])
def test_the_command_hides_the_code(tmp_path, how):
    """The process list never shows the code while the command waits for its answer."""
    with coordinator(tmp_path) as server:
        line = str(server.line())
        seen = []
        answer = server.joined

        def look_first(request):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.append(path.read_bytes())
                except OSError:
                    continue
            return answer(request)

        server.joined = look_first
        given = {"argument": [line], "stdin": ["-"]}.get(how, [])
        terminal, screen = os.openpty()
        os.write(terminal, f"{line}\n".encode())
        done = subprocess.run(
            [sys.executable, "-m", "fleetune.edge_agent", "join", *given, "--state", tmp_path / "state"],
            **({"stdin": screen} if how == "terminal" else {"input": line if how == "stdin" else ""}),
            env={**os.environ, **({"FLEETUNE_JOIN": line} if how == "variable" else {})},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "joined fleet homes as device d-7" in done.stdout
    assert f"edge-agent run --data npz:FILE --state {tmp_path / 'state'}" in done.stdout
    os.close(terminal)
    os.close(screen)
    assert any(b"fleetune.edge_agent\0join" in one for one in seen)
    assert not any(CODE.encode() in one for one in seen)
    assert CODE not in done.stdout + done.stderr
    for path in everything_below(tmp_path / "state"):
        assert CODE not in path.read_text()


def test_mistakes_are_one_line(tmp_path):
    for given in (["nonsense"], [f"fleetune://h:0/f/{CODE}/{'a' * 32}"], []):
        done = CliRunner().invoke(app, ["join", "--state", str(tmp_path), "-"], input="".join(given))
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert "edge-coordinator invite" in done.stderr
        assert CODE not in done.stderr


def test_a_key_is_made_without_cryptography_in_this_process(tmp_path):
    code = (
        "import sys, json\n"
        "from fleetune.edge_agent.joining.signing_request import key_and_request\n"
        "made = key_and_request()\n"
        "assert key_and_request(made.key).key == made.key\n"
        "print(json.dumps([one for one in sys.modules if one.startswith('cryptography')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout) == []
