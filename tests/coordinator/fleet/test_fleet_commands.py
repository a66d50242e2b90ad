"""The commands for a fleet's members: invite, invites, approve, revoke, rename and rotate-authority."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.coordinator.fleet.test_joining import NONCE, key
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.fleet.authority import DAY_S, Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.joining import JoinError, join
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.renewal import renew
from fleetune.coordinator.fleet.rotation import finish_rotation
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import note_fleet
from fleetune.edge_agent.joining.signing_request import key_and_request
from fleetune.protocols.errors import PacketError
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.join_exchange import JoinLine, JoinPending, JoinRequest

ADDRESS = FleetAddress(("192.168.1.5", "pi.local"), 8883, 8884, 8885)


class Fleet:
    """A fleet in a folder of runs, commands on it, and devices that join it."""

    def __init__(self, runs, name="lab"):
        self.runs, self.folder = runs, FleetFolder.of(name, runs)
        ADDRESS.write(self.folder)

    def run(self, *arguments, fails=False):
        done = CliRunner().invoke(app, [*arguments, "--runs", str(self.runs)])
        assert done.exit_code == (2 if fails else 0), done.output
        if fails:
            assert done.stderr.count("\n") == 1
            return done.stderr
        return done.stdout

    def join(self, line, request=None, **more):
        request = request or key()
        made = JoinRequest(line.fleet, line.code, signing_request=request, **more)
        with Registry.open(self.folder.registry) as registry:
            return join(registry, Authority.open(self.folder, time.time()), ADDRESS, made, time.time())

    def joined(self, name):
        return self.join(JoinLine.parse(self.run("invite")), name=name).device

    def device(self, name):
        with Registry.open(self.folder.registry) as registry:
            return registry.device(name)


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path / "runs")


def test_a_line_is_all_that_a_device_needs(fleet):
    line = JoinLine.parse(fleet.run("invite"))
    assert (line.host, line.port, line.fleet) == ("192.168.1.5", 8885, "lab")
    assert line.fingerprint == Authority(fleet.folder).fingerprint
    assert fleet.join(line, name="hall").device == "hall"
    assert JoinLine.parse(fleet.run("invite", "lab", "--host", "2001:db8::1")).host == "2001:db8::1"


def test_a_qr_code_is_printed_when_asked_for(fleet):
    shown = fleet.run("invite", "--qr").splitlines()
    JoinLine.parse(shown[0])
    assert len(shown) > 15
    assert max(map(len, shown[1:])) < 80


def test_invitations_are_listed_without_codes_and_withdrawn(fleet):
    options = ("--devices", "3", "--expires", "2h", "--tag", "hall", "--tag", "new", "--approve", "--json")
    made = json.loads(fleet.run("invite", *options))
    line = JoinLine.parse(made["line"])
    assert isinstance(fleet.join(line, name="hall"), JoinPending)
    (listed,) = json.loads(fleet.run("invites", "--json"))
    assert listed["joined"] == ["hall"]
    assert (listed["state"], listed["devices"], listed["tags"]) == ("open", 3, ["hall", "new"])
    assert listed["expires_at"] - listed["made_at"] == 7200
    for shown in (fleet.run("invites", "--json"), fleet.run("invites", "lab")):
        assert made["id"] in shown
        assert line.code not in shown
    assert fleet.run("invites", "--withdraw", made["id"]).startswith(f"withdrawn: {made['id']}; ")
    assert json.loads(fleet.run("invites", "--json"))[0]["state"] == "withdrawn"
    assert "no invitation 'x' in fleet lab; " in fleet.run("invites", "--withdraw", "x", fails=True)


def test_a_device_is_approved_renamed_and_revoked_by_id_or_name(fleet):
    line = JoinLine.parse(fleet.run("invite", "--approve"))
    fleet.join(line, name="hall")
    assert fleet.run("approve", "hall") == "approved: hall\n"
    assert fleet.device("hall").state == "accepted"
    assert fleet.run("rename", "hall", "Big hall") == "hall is now called Big hall\n"
    before = fleet.folder.revoked.read_bytes()
    assert fleet.run("revoke", "Big hall") == "revoked: Big hall (hall)\n"
    assert fleet.device("hall").state == "revoked"
    fleet.run("approve", "hall")
    assert fleet.folder.revoked.read_bytes() == before  # it never had a certificate
    assert "no device 'hal' in fleet lab; did you mean 'hall'?" in fleet.run("revoke", "hal", fails=True)
    assert "the name '' is invalid: use" in fleet.run("rename", "hall", "", fails=True)
    assert fleet.run("approve", "hall") == "nothing to do: Big hall (hall) is accepted already\n"


def test_an_invitation_that_no_coordinator_accepts_has_a_warning(fleet):
    done = CliRunner().invoke(app, ["invite", "--runs", str(fleet.runs)])
    assert (
        done.stderr
        == "no coordinator serves fleet lab now: devices can join once edge-coordinator serve runs\n"
    )


def test_an_invitation_that_was_used_stays_so_when_its_device_is_forgotten(fleet):
    fleet.joined("a")
    with Registry.open(fleet.folder.registry) as registry:
        registry.forget("a")
    (listed,) = json.loads(fleet.run("invites", "--json"))
    assert (listed["state"], listed["used"], listed["joined"]) == ("used", 1, [])
    assert "1 of 1" in fleet.run("invites")


def test_braces_in_a_name_are_a_name(fleet):
    fleet.joined("hall")
    assert fleet.run("rename", "hall", "{0.secret} {x}") == "hall is now called {0.secret} {x}\n"
    assert fleet.run("revoke", "hall") == "revoked: {0.secret} {x} (hall)\n"


@pytest.mark.parametrize("command", ["revoke", "forget"])
def test_a_device_that_is_thrown_out_does_not_return_with_its_line(fleet, command):
    line, request = JoinLine.parse(fleet.run("invite", "--devices", "9")), key()
    other = JoinLine.parse(fleet.run("invite", "--devices", "9"))
    fleet.join(line, request, name="hall")
    done = CliRunner().invoke(app, [command, "hall", "--runs", str(fleet.runs)])
    assert "withdrawn: its invitation " in done.output
    for asked, words in (
        (request, "was revoked" if command == "revoke" else "withdrawn"),
        (key(), "withdrawn"),
    ):
        with pytest.raises(JoinError, match=words):
            fleet.join(line, asked)
    assert fleet.join(other, name="cellar").device == "cellar"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("invite", "--expires", "soon"), '--expires = "soon": give a number and s, m, h, d or w'),
        (("invite", "--tag", "\n"), "--tag '\\n' is invalid; use"),
        (("invite", "--host", "a b"), "--host 'a b' is no name or address; give one"),
        (("invite", "lap"), "has no fleet 'lap' that other machines can reach; did you mean 'lab'?"),
    ],
)
def test_mistakes_get_one_line_and_change_nothing(fleet, arguments, words):
    assert words in fleet.run(*arguments, fails=True)
    with Registry.open(fleet.folder.registry) as registry:
        assert registry.invitations() == []


def test_the_fleet_is_found_or_asked_for(fleet, tmp_path):
    model = {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10}
    settings = parse_run({"run": {"name": "digits"}, "model": model, "method": {"name": "fedavg"}})
    with contextlib.closing(open_run(settings, fleet.runs / "digits").store) as store:
        note_fleet(store, "lab")
    Fleet(fleet.runs, "other")
    assert JoinLine.parse(fleet.run("invite", str(fleet.runs / "digits"))).fleet == "lab"
    assert "has several fleets; name one of them: lab, other" in fleet.run("invite", fails=True)
    empty = Fleet(tmp_path / "empty")
    empty.folder.address.unlink()
    assert "has no fleet that other machines can reach; open one with" in empty.run("invite", fails=True)


def test_an_authority_is_replaced_when_all_devices_have_the_new_one(fleet):
    devices = [fleet.joined(name) for name in "ab"]
    authority = Authority(fleet.folder)
    old = authority.fingerprint
    assert "devices get the new authority" in fleet.run("rotate-authority")
    assert authority.fingerprints == [authority.fingerprint, old] != [old, old]
    assert "still need the old one: 2 devices (a, b). The old one is trusted until" in fleet.run(
        "rotate-authority", fails=True
    )
    with Registry.open(fleet.folder.registry) as registry:
        late = time.time() + 31 * DAY_S
        for device in devices:
            assert not finish_rotation(authority, registry, late)
            registry.note_bundle(device, authority.bundle_id)
            registry.note_certificates(
                device,
                ("own", "probe"),
                (f"{device}1",),
                ends_at=late + 9,
                authority=authority.fingerprint,
            )
        assert not finish_rotation(authority, registry, late - 2 * DAY_S)  # an answer may have been lost
        assert finish_rotation(authority, registry, late)
    assert len(authority.fingerprints) == 1


def test_a_stolen_authority_is_replaced_at_once(fleet):
    fleet.joined("a")
    old = Authority(fleet.folder).fingerprint
    fleet.run("rotate-authority")
    stolen = Authority(fleet.folder).fingerprint
    assert "1 device (a) must join again" in fleet.run("rotate-authority", "--now")
    assert not {old, stolen} & set(Authority(fleet.folder).fingerprints)
    assert fleet.device("a").shut_out(time.time()) == "must join again"
    request = {"a": key_and_request().request}
    (answer,) = renew(fleet.folder, request, time.time()).values()  # on a connection that was still open
    assert isinstance(answer, PacketError)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_no_secret_is_seen_by_others_in_a_servers_life(fleet):
    """Codes and secrets are in no file, log, or process list; the files are their owner's only."""
    ADDRESS.write(fleet.folder)
    line = JoinLine.parse(fleet.run("invite", "--devices", "2"))
    log = fleet.runs / "log"
    with log.open("wb") as stderr:
        command = [sys.executable, "-c", SERVE, str(fleet.folder.path)]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    with contextlib.closing(server.stdin), contextlib.closing(server.stdout):
        port = int(server.stdout.readline())
        joined = [curl(fleet, port, line, nonce=NONCE), curl(fleet, port, line, signing_request=key())]
        curl(fleet, port, line, nonce=NONCE + "2")  # the code is used up
        fleet.run("revoke", joined[0]["device"])
        lists = "\n".join(process_list())
        server.stdin.close()
        server.wait(20)
    secrets = [line.code, joined[0]["secret"], NONCE, *private_keys(fleet.folder)]
    assert "has been used" in log.read_text()
    for secret in secrets:
        assert secret not in lists
        assert secret not in log.read_text()
    for path in fleet.runs.rglob("*"):
        if path != log:
            assert path.stat().st_mode & 0o077 == 0, path
        if path.is_file():
            assert not any(secret.encode() in path.read_bytes() for secret in secrets[:3]), path


SERVE = """
import sys
from pathlib import Path
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.join_server import start_join_server
server = start_join_server(FleetFolder(Path(sys.argv[1])), "127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


def curl(fleet, port, line, **request):
    """The answer to a request that curl sends."""
    body = msgspec.json.encode(JoinRequest(line.fleet, line.code, **request))
    url = f"https://127.0.0.1:{port}/fleetune/v1/join"
    command = ["curl", "--silent", "--cacert", str(fleet.folder.authority), "--data", "@-", url]
    return json.loads(subprocess.run(command, input=body, check=True, capture_output=True, timeout=30).stdout)


def process_list():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def private_keys(folder):
    """A line of each private key."""
    return [path.read_text().splitlines()[2] for path in (folder.authority_key, folder.server_key)]
