"""edge-agent doctor: what it says of brokers, certificates, boards, folders and trainers, good and bad."""

import gc
import inspect
import json
import os
import queue
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from msgspec import UNSET
from tests.helpers import boards, card
from tests.helpers.errors import raises
from tests.helpers.own_mosquitto import mosquitto, needs_mosquitto, serving, tls_mosquitto
from tests.helpers.places import ROOT
from tests.helpers.ports import free_port
from tests.protocols.wire.test_transport import is_connected, is_disconnected, wait_for

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.edge_agent import cli
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.doctor import agent_state, host, sensors, training
from fleetune.edge_agent.doctor import broker as broker_checks
from fleetune.edge_agent.doctor.check_result import CheckResult, run_check
from fleetune.edge_agent.doctor.diagnosis import AgentUnderDiagnosis, examine
from fleetune.edge_agent.doctor.training import Tried
from fleetune.edge_agent.joining.certificate import validity_of_broker, validity_of_file
from fleetune.edge_agent.state import state_folder
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training import trainers
from fleetune.edge_agent.training.trainers import IMPORT_BYTES
from fleetune.firmware_profiles import load
from fleetune.protocols.errors import DataError, RefusalReason, TransportError
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport, parse_broker

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
# Paho leaves the socket of a failed handshake to the garbage collector.
leaves_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def verdicts(results):
    """By what was looked at; the worst of several."""
    order = ["skip", "ok", "warn", "fail"]
    found = {}
    for result in results:
        assert "\n" not in result.found + result.remedy
        assert bool(result.remedy) == (result.verdict in ("warn", "fail")), result
        worse = order.index(result.verdict) >= order.index(found.get(result.what, result).verdict)
        found[result.what] = result if worse else found[result.what]
    return found


def doctor(*options, cwd=ROOT, **environment):
    """The command itself: exit code, and its results."""
    done = subprocess.run(
        [sys.executable, "-m", "fleetune.edge_agent.cli", "doctor", "--json", *map(str, options)],
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
        check=False,
    )
    assert not done.stderr, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    return done.returncode, verdicts([CheckResult(**one) for one in found["results"]])


# The command


def test_it_takes_the_very_line_of_run():
    commands = {one.callback.__name__: one.callback for one in cli.app.registered_commands}
    asked = set(inspect.signature(commands["run"]).parameters) - {"leave_after_run"}
    assert set(inspect.signature(commands["doctor"]).parameters) == asked | {"as_json"}


@pytest.fixture(scope="module")
def broker_port(tmp_path_factory):
    """Port of a plain embedded broker that the tests of this file share."""
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.port


def test_a_board_that_is_fit(tmp_path, broker_port):
    root = boards.pi_5().build(tmp_path / "board")
    (root / "run/systemd/timesync").mkdir(parents=True)
    (root / "run/systemd/timesync/synchronized").touch()
    code, found = doctor(
        *("--fleet", "f", "--device", "pi", "--broker", f"127.0.0.1:{broker_port}", "--data", "digits"),
        *("--state", tmp_path / "state", "--root", root, "--max-celsius", "60"),
    )
    assert code == 0, found
    assert {one.verdict for one in found.values()} <= {"ok", "skip"}
    assert found["board"].found == "Raspberry Pi 5 (8 GB) (raspberry-pi-5)"
    assert found["temperature"].found == "48.2 °C"
    assert all(one in found["data"].found for one in ("1797", "1 x 8 x 8", "10 classes"))
    assert "4096" in found["round trip"].found
    assert not (tmp_path / "state").exists(), "it leaves nothing behind"


def test_whatever_is_wrong_everything_is_looked_at_and_there_is_no_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("import sys\ndef samples():\n    sys.exit('no camera')\n")
    (tmp_path / "policy.toml").write_text("max_celsus = 60\n")
    code, found = doctor(
        *("--fleet", "not a name", "--broker", "mqtt://me:secret@", "--data", "broken:samples"),
        *("--state", tmp_path, "--board", "commodore-64", "--policy", tmp_path / "policy.toml"),
        *("--trainer", "abacus"),
        cwd=tmp_path,
    )
    assert code == 1
    failed = {name for name, one in found.items() if one.verdict == "fail"}
    assert failed == {"board", "policy", "trainer", "state", "data", "broker"}
    assert "max_celsus" in found["policy"].found
    assert "no camera" in found["data"].found
    assert "secret" not in str(found)
    assert all(one in found["trainer"].remedy for one in ("auto", "onnx", "torch", "ort-training"))


@pytest.mark.parametrize(
    ("devices", "options", "named", "remedy"),
    [
        ("ab", (), "a, b", "--device"),
        ("ab", ("--name", "cellar"), "a, b", "--device"),
        ("", ("--name", "Küche"), "--name 'Küche'", "--device K-che"),
        ("", ("--name", "\t"), "--name", ""),
        ("", ("--fleet", "not a name"), "fleet 'not a name'", "not-a-name"),
        ("", ("--device", "../x"), "device '../x'", "x"),
    ],
)
def test_a_device_that_the_state_does_not_tell_is_a_failed_check(
    tmp_path, devices, options, named, remedy, broker_port
):
    for device in devices:
        state_folder.mark(tmp_path / "f" / device)
    address = ("--broker", f"127.0.0.1:{broker_port}")
    code, found = doctor("--fleet", "f", "--state", tmp_path, *address, *options)
    assert (code, found["state"].verdict) == (1, "fail")
    assert named in found["state"].found
    assert remedy in found["state"].remedy
    assert (found["login"].verdict, "see state" in found["login"].found) == ("skip", True)


def test_a_state_of_another_format_is_a_failed_check(tmp_path):
    state_folder.mark(tmp_path / "f" / "pi")
    (tmp_path / "f" / "pi" / state_folder.MARKER).write_text('{"version": 2}')
    agent = AgentUnderDiagnosis(device="pi", fleet="f", state=tmp_path, root=boards.pi_zero().build(tmp_path))
    found = verdicts(examine(agent))
    assert found["state"].verdict == "fail"
    assert "format 2" in found["state"].found
    assert f"format {state_folder.VERSION}" in found["state"].remedy
    assert "edge-agent wipe" in found["state"].remedy


def test_what_was_not_asked_for_is_shown_as_skipped(tmp_path):
    found = verdicts(examine(AgentUnderDiagnosis(device="pi", root=boards.pi_zero().build(tmp_path))))
    assert {name for name, one in found.items() if one.verdict == "skip"} == {"state", "data", "broker"}


def test_a_check_that_fails_itself_is_a_finding():
    def check():
        yield CheckResult("ok", "one", "fine")
        raise ZeroDivisionError("in the\nmiddle")

    first, second = run_check("one", check)
    assert (first.verdict, second.verdict) == ("ok", "fail")
    assert "ZeroDivisionError: in the middle" in second.found


def test_people_see_a_line_each_and_how_to_mend_it(capsys):
    from rich.console import Console

    from fleetune.edge_agent.doctor.show import show

    console = Console(width=40, force_terminal=False)
    show(
        [CheckResult("ok", "one", "x" * 60), CheckResult("fail", "two", "[bold]bad[/bold]", "remedy it")],
        console,
    )
    assert capsys.readouterr().out.splitlines() == [
        f"ok    one: {'x' * 60}",
        "fail  two: [bold]bad[/bold]",
        "      -> remedy it",
        "failed checks: 1, warnings: 0",
    ]


# The broker


def visit(fleet="f", device="a", **settings):
    found = verdicts(broker_checks.examine(Broker("127.0.0.1", **settings), fleet, device))
    gc.collect()
    return found


@pytest.mark.parametrize("kind", [pytest.param("mosquitto", marks=needs_mosquitto), "amqtt"])
def test_a_broker_that_takes_us(kind, tmp_path):
    with EmbeddedBroker.start(tmp_path, which=kind) as broker:
        found = visit(port=broker.port)
    rights = found.pop("access rights")
    assert (rights.verdict, "fleet f" in rights.found) == ("skip", True)
    assert ("state, up, update" in rights.found) == (kind == "mosquitto")
    assert {one.verdict for one in found.values()} == {"ok"}
    assert list(found) == ["broker's name", "connection", "TLS", "login", "round trip"]


def test_without_a_fleet_there_is_no_topic_to_try(broker_port):
    found = visit(port=broker_port, fleet=None)
    assert [name for name, one in found.items() if one.verdict == "skip"] == ["login"]


def test_the_walk_ends_where_it_fails():
    port = free_port()
    found = visit(port=port)
    assert {name: one.verdict for name, one in found.items()} == {
        "broker's name": "ok",
        "connection": "fail",
        "TLS": "skip",
        "login": "skip",
    }
    assert f"127.0.0.1:{port}" in found["connection"].found
    assert "start the broker" in found["connection"].remedy
    unknown = verdicts(broker_checks.examine(Broker("no-such-host.invalid"), "f", "a"))
    assert unknown["broker's name"].verdict == "fail"
    assert "DNS" in unknown["broker's name"].remedy


def test_a_broker_that_cannot_be_reached_has_a_remedy(monkeypatch):
    def hangs(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(broker_checks.socket, "create_connection", hangs)
    (result,) = broker_checks._connects(Broker("10.0.0.1", 1883))
    assert (result.verdict, "10.0.0.1:1883" in result.found) == ("fail", True)
    assert "firewall" in result.remedy


def test_a_password_in_the_clear_is_pointed_out(monkeypatch):
    monkeypatch.setattr(broker_checks, "_is_loopback", lambda _: False)
    found = visit(port=free_port(), username="me", password="secret")
    assert found["TLS"].verdict == "skip"
    (result,) = broker_checks._without_tls(Broker("10.0.0.1", password="secret"))
    assert (result.verdict, "password" in result.found) == ("warn", True)
    assert "mqtts://" in result.remedy


@pytest.fixture
def passwords(tmp_path):
    path = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", path, "me", "secret"], check=True, capture_output=True)
    return path


@needs_mosquitto
def test_a_wrong_password_and_none(tmp_path, passwords):
    with mosquitto(tmp_path / "b", "allow_anonymous false", f"password_file {passwords}") as port:
        assert visit(port=port, username="me", password="secret")["round trip"].verdict == "ok"
        wrong = visit(port=port, username="me", password="guess")
        nobody = visit(port=port)
    assert "'me'" in wrong["login"].found
    assert wrong["login"].remedy == broker_checks.REMEDIES["login"]
    assert nobody["login"].verdict == "fail"
    assert "access rights" not in wrong


@pytest.mark.parametrize("reason", get_args(RefusalReason))
def test_each_reason_of_a_broker_to_refuse_a_client_has_a_remedy(reason, monkeypatch):
    """The check uses the reason's code, not its text."""

    def refuses(self, patience_s=0.0):
        raise TransportError("broker:1883 refuses us: Text of its own", reason)

    monkeypatch.setattr(broker_checks.ProbeConnection, "open", refuses)
    (result,) = broker_checks._logs_in(parse_broker("127.0.0.1:1"), "f", "a")
    assert (result.verdict, result.remedy) == ("fail", broker_checks.REMEDIES[reason])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [("broken; remedy it", "remedy it"), ("broken", "look for the reason in the broker's log")],
)
def test_another_failure_of_the_connection_shows_the_remedy_of_its_error(line, remedy, monkeypatch):
    def fails(self, patience_s=0.0):
        raise TransportError(line)

    monkeypatch.setattr(broker_checks.ProbeConnection, "open", fails)
    (result,) = broker_checks._logs_in(parse_broker("127.0.0.1:1"), "f", "a")
    assert (result.found, result.remedy) == ("broken", remedy)


@needs_mosquitto
def test_a_topic_that_the_broker_does_not_let_us_write(tmp_path, passwords, monkeypatch):
    monkeypatch.setattr(broker_checks, "PATIENCE_S", 1.0)
    (tmp_path / "rules").write_text("user me\ntopic read fleetune/v1/f/a/#\n")
    access = ("allow_anonymous false", f"password_file {passwords}", f"acl_file {tmp_path}/rules")
    with mosquitto(tmp_path / "b", *access) as port:
        found = visit(port=port, username="me", password="secret")
    assert found["access rights"].verdict == "fail"
    assert all(one in found["access rights"].found for one in ("'me'", "fleetune/v1/f/a/probe"))
    remedy = found["access rights"].remedy
    assert all(one in remedy for one in ("--device me", "edge-coordinator broker-config"))
    assert "fleetune/v1/f/a/probe" in found["round trip"].found


@contextmanager
def amqtt_where_all_may_read(folder, *filters):
    """A broker without mosquitto's rules, which answers other subscriptions with a refusal; its port."""
    port = free_port()
    plugins = {
        "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
        "amqtt.plugins.topic_checking.TopicAccessControlListPlugin": {"acl": {"anonymous": filters}},
    }
    settings = {"listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}}, "plugins": plugins}
    (folder / "amqtt.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-P", "-m", "amqtt.scripts.broker_script", "-c", folder / "amqtt.yaml"]
    with serving(command, folder / "log", port):
        yield port


def test_a_subscription_that_the_broker_refuses_needs_no_coordinator_to_be_found(tmp_path):
    below = "fleetune/v1/f/a"
    with amqtt_where_all_may_read(tmp_path, f"{below}/probe", f"{below}/task") as port:
        found = visit(port=port)
    assert found["access rights"].verdict == "fail"
    assert found["access rights"].found == f"a client without user name may not read {below}/down"
    assert "broker-config" in found["access rights"].remedy


def test_it_does_not_throw_out_an_agent_that_runs(broker_port):
    events = queue.SimpleQueue()
    agent = MqttTransport(Broker("127.0.0.1", broker_port), "f-a", subscriptions=[], events=events)
    agent.connect()
    wait_for(events, is_connected)
    assert visit(port=broker_port)["round trip"].verdict == "ok"
    assert events.empty()
    agent.close()
    wait_for(events, is_disconnected)


# TLS

CA_CONF = """
[ca]
default_ca = it
[it]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = names
copy_extensions = copy
unique_subject = no
[names]
commonName = supplied
"""


class Authority:
    """Signs certificates for any span of days from today."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        (folder / "ca.cnf").write_text(CA_CONF.format(folder=folder))
        self.pem, self.key = folder / "ca.pem", folder / "ca.key"
        self.run(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "400", "-subj", f"/CN={folder.name}"),
            *("-keyout", self.key, "-out", self.pem),
        )

    def run(self, *words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

    def issue(self, name, *, names="IP:127.0.0.1", first=-1, last=365):
        """PEM files of a certificate that is valid from day `first` to day `last`, and its key."""
        cert, key, request = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={names}")
        self.run("req", "-newkey", "rsa:2048", "-nodes", *subject, "-keyout", key, "-out", request)
        span = [f"{datetime.now(UTC) + timedelta(days=day):%Y%m%d%H%M%SZ}" for day in (first, last)]
        self.run(
            *("ca", "-batch", "-notext", "-config", self.folder / "ca.cnf", "-cert", self.pem),
            *("-keyfile", self.key, "-startdate", span[0], "-enddate", span[1], "-in", request, "-out", cert),
        )
        return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


def visit_tls(tmp_path, certificate, **settings):
    with tls_mosquitto(tmp_path / "broker", *certificate) as port:
        return visit(port=port, tls=True, **settings)


@needs_openssl
@leaves_sockets
class TestTls:
    def test_a_broker_whose_certificate_is_good(self, tmp_path, authority):
        found = visit_tls(tmp_path, authority.issue("good", last=100.5), ca=str(authority.pem))
        assert found.pop("access rights").verdict == "skip", "there is no coordinator"
        assert {one.verdict for one in found.values()} == {"ok"}
        assert "valid for 100 more days" in found["broker's certificate"].found
        assert "round trip" in found

    def test_one_that_soon_expires(self, tmp_path, authority):
        found = visit_tls(tmp_path, authority.issue("soon", last=10.5), ca=str(authority.pem))
        assert found["broker's certificate"].verdict == "warn"
        assert "valid for 10 more days" in found["broker's certificate"].found
        assert found["round trip"].verdict == "ok"

    @pytest.mark.parametrize(
        ("settings", "said", "remedy"),
        [
            ({"first": -30, "last": -2.5}, "expired 2 days ago", "renew it on the broker"),
            ({"first": 2, "last": 30}, "not valid before", "set this device's clock"),
            (
                {"names": "DNS:edge.local"},
                "edge.local",
                "use one of its names in --broker",
            ),
        ],
    )
    def test_one_that_is_not_valid_here(self, tmp_path, authority, settings, said, remedy):
        found = visit_tls(tmp_path, authority.issue("bad", **settings), ca=str(authority.pem))
        assert said in found["broker's certificate"].found
        assert found["broker's certificate"].remedy.startswith(remedy)
        assert found["login"].verdict == "skip"

    def test_another_authority_or_none(self, tmp_path, authority, stranger):
        certificate = authority.issue("theirs")
        for n, ca in enumerate([str(stranger.pem), None]):
            found = visit_tls(tmp_path / str(n), certificate, ca=ca)["broker's certificate"]
            assert found.found.startswith("not signed by")
            assert found.remedy == "give the PEM file of the authority that signed it: --ca"

    def test_a_file_that_is_no_certificate(self, tmp_path, authority):
        (tmp_path / "empty.pem").write_text("nothing\n")
        certificate = authority.issue("server")
        for n, (ca, said) in enumerate(
            [(tmp_path / "empty.pem", "empty.pem"), (tmp_path / "none.pem", "No such file")]
        ):
            found = visit_tls(tmp_path / str(n), certificate, ca=str(ca))
            assert said in found["authority"].found
            assert "PEM file of the authority" in found["authority"].remedy
            assert found["broker's certificate"].verdict == "skip"

    def test_a_broker_without_tls(self, authority, broker_port):
        found = visit(port=broker_port, tls=True, ca=str(authority.pem))
        assert found["broker's certificate"].verdict == "fail"
        assert "mqtt://" in found["broker's certificate"].remedy
        assert found["login"].verdict == "skip"

    @needs_mosquitto
    def test_a_broker_that_asks_for_ours(self, tmp_path, authority, stranger):
        cert, key = authority.issue("server")
        lines = [f"certfile {cert}", f"keyfile {key}", f"cafile {authority.pem}", "require_certificate true"]
        lines += ["use_identity_as_username true", "allow_anonymous false"]
        ours, theirs = authority.issue("device", names="DNS:a"), stranger.issue("device", names="DNS:a")
        with mosquitto(tmp_path, *lines) as port:

            def shown(cert=None, key=None):
                files = {"cert": cert and str(cert), "key": key and str(key)}
                return visit(port=port, tls=True, ca=str(authority.pem), **files)

            assert shown(*ours)["round trip"].verdict == "ok"
            expired = authority.issue("old", first=-9, last=-2.5)
            missing = (ours[0].with_name("missing.pem"), ours[1])
            remedies = {
                (): "--cert and --key",
                theirs: "authority that the broker trusts",
                (ours[0], theirs[1]): "use the key that the certificate was made with",
                (None, ours[1]): "both options",
                missing: "check the paths",
                expired: "get a new one",
            }
            for files, remedy in remedies.items():
                assert remedy in shown(*files)["own certificate"].remedy, files

    def test_a_key_with_a_pass_phrase_asks_nobody(self, tmp_path, authority):
        cert, key = authority.issue("locked")
        locked = tmp_path / "locked.key"
        authority.run("rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked)
        found = visit_tls(tmp_path, authority.issue("server"), cert=str(cert), key=str(locked))
        assert "without a pass phrase" in found["own certificate"].remedy

    def test_dates_agree_with_openssl(self, authority):
        cert, _ = authority.issue("dates", first=-3, last=20_000)  # beyond 2049: GeneralizedTime
        said = subprocess.run(
            ["openssl", "x509", "-in", cert, "-noout", "-dates"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        wanted = tuple(
            datetime.fromtimestamp(ssl.cert_time_to_seconds(line.partition("=")[2]), UTC) for line in said
        )
        assert validity_of_file(cert) == wanted
        der = ssl.PEM_cert_to_DER_cert(cert.read_text())
        for cut in range(len(der) // 2):
            with raises(TransportError, "the broker"):
                validity_of_broker(der[:cut])


def test_a_damaged_certificate_of_the_user_is_not_the_broker_s_fault(tmp_path):
    path = tmp_path / "device.pem"
    for der in (b"", b"0\x82", b"none", b"0\x050\x030\x01\x00"):
        path.write_text(ssl.DER_cert_to_PEM_cert(der))
        with raises(TransportError, str(path), remedy="copy the file") as caught:
            validity_of_file(path)
        assert "broker" not in str(caught.value)


# The machine


def test_python_is_new_and_wide_enough():
    assert [one.verdict for one in host.python()] == ["ok"]
    (result,) = host.python(32, "armv7l")
    assert (result.verdict, "64-bit" in result.remedy) == ("fail", True)


@pytest.mark.parametrize(
    ("year", "kernel", "matters", "verdict"),
    [
        (1970, True, False, "warn"),
        (1970, True, True, "fail"),
        (2101, True, True, "fail"),
        (2027, True, True, "ok"),
        (2027, False, True, "warn"),
        (2027, None, False, "warn"),
    ],
)
def test_the_clock(year, kernel, matters, verdict):
    at = datetime(year, 6, 1, tzinfo=UTC).timestamp()
    (result,) = host.clock(Path("/"), matters=matters, now=lambda: at, kernel=lambda: kernel)
    if kernel or not Path("/run/systemd/timesync/synchronized").exists():
        assert result.verdict == verdict
        remedy = {"ok": "", "warn": "timedatectl" if year == 2027 else "date -s", "fail": "date -s"}[verdict]
        assert remedy in result.remedy
        effect = "valid certificates may be refused" if matters else "the log has wrong times"
        assert (effect in result.found) == (verdict != "ok")
        assert ("if it is wrong" in result.found) == (year == 2027 and not kernel), "known or unknown"


@pytest.mark.parametrize("file", ["run/systemd/timesync/synchronized", "run/chrony/chronyd.pid"])
def test_who_keeps_the_clock(tmp_path, file):
    (result,) = host.clock(tmp_path, matters=True, kernel=lambda: True)
    assert result.verdict == "warn", "this machine's kernel says nothing of a board in a folder"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    (result,) = host.clock(tmp_path, matters=True)
    assert result.verdict == "ok"


# Sensors and the policy


def sense(board, tmp_path, profile="generic", **policy):
    fake = board()
    found = sensors.examine(fake.build(tmp_path), Policy(**policy), load(profile), fake.run)
    return verdicts(found)


def test_a_sensor_that_the_policy_needs_and_the_board_lacks(tmp_path):
    found = sense(boards.pi_zero, tmp_path, charging_only=True, unmetered_only=True)
    assert (found["power supply"].verdict, found["metered traffic"].verdict) == ("fail", "fail")
    assert "charging_only" in found["power supply"].found
    assert "--charging-only" in found["power supply"].remedy
    assert "--unmetered-only" in found["metered traffic"].remedy
    assert found["temperature"].verdict == "ok"
    assert "policy" not in found


def test_the_same_sensor_does_not_matter_to_another_policy_or_board(tmp_path):
    assert sense(boards.pi_zero, tmp_path / "a")["power supply"].verdict == "ok"
    found = sense(boards.pi_zero, tmp_path / "b", "raspberry-pi-zero-2w", charging_only=True)
    assert found["power supply"].verdict == "ok", "its profile says that it has no battery"


def test_a_policy_that_is_against_training_just_now(tmp_path):
    found = sense(boards.pi_4_hot_on_a_modem, tmp_path, max_celsius=70)
    assert found["temperature"].verdict == "ok"
    assert all(one in found["policy"].found for one in ("max_celsius", "81.5 °C", "70 °C"))
    assert "change the policy" in found["policy"].remedy


def test_a_battery_whose_capacity_nobody_knows(tmp_path):
    found = sense(boards.phone, tmp_path, max_battery_percent_per_hour=2)
    assert found["battery capacity"].verdict == "fail"
    assert "battery_wh" in found["battery capacity"].remedy


@pytest.mark.parametrize("board", boards.ALL)
def test_every_board_can_be_looked_at(board, tmp_path):
    strict = {"charging_only": True, "unmetered_only": True, "max_celsius": 60, "min_battery": 20}
    assert len(sense(board, tmp_path, **strict)) >= 6


# The state folder


def store_with_a_run(folder, spec, weights):
    store = AgentStore(folder)
    enrolment = Enrolment(
        "r1", 0, spec, {"name": "fedavg"}, TrainingSection(), 0.0, 1.0, 0.1, 60.0, 1e3, 1e3, weights
    )
    store.enrolment("r1").write(codec.encode(enrolment, spec))
    return store


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder is looked at as that user")
def test_a_folder_that_cannot_be_written():
    with tempfile.TemporaryDirectory() as name:  # pytest keeps its own closed to others
        open_to_all = Path(name)
        open_to_all.chmod(0o755)
        store = AgentStore(open_to_all / "f" / "a")
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            (result,) = agent_state.folder(store)
            os._exit(0 if result.verdict == "fail" and "--state" in result.remedy else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (result,) = agent_state.folder(store)
        assert result.verdict == "ok"
        assert not list(open_to_all.iterdir())


def test_a_file_in_the_folder_s_place(tmp_path):
    (tmp_path / "state").write_text("")
    (result,) = agent_state.folder(AgentStore(tmp_path / "state"))
    assert (result.verdict, "Not a directory" in result.found) == ("fail", True)


def test_another_agent_with_the_same_folder(tmp_path):
    store = AgentStore(tmp_path)
    (result,) = agent_state.in_use(store)
    assert result.verdict == "ok"
    assert not (tmp_path / "lock").exists()
    with store.claim():
        (result,) = agent_state.in_use(store)
        assert (result.verdict, "systemctl stop" in result.remedy) == ("warn", True)
    (result,) = agent_state.in_use(store)
    assert result.verdict == "ok"


def test_what_is_kept_of_a_run_is_read(tmp_path, spec, weights):
    store = store_with_a_run(tmp_path, spec, weights)
    (result,) = agent_state.runs(store, "a")
    assert result.verdict == "ok"
    assert all(one in result.found for one in ("r1", "tiny", "fedavg"))
    for name in ("session", "enrolment"):
        path = tmp_path / "runs" / "r1" / name
        path.write_bytes(b"FLTN but not really")
        (result,) = agent_state.runs(store, "a")
        assert (result.verdict, "r1" in result.found) == ("fail", True)
        assert str(tmp_path / "runs" / "r1") in result.remedy


def test_room_on_the_disk(tmp_path, monkeypatch, spec, weights):
    store = store_with_a_run(tmp_path, spec, weights)
    enrolment = agent_state.latest_enrolment(store)
    assert enrolment is not None
    usage = shutil.disk_usage(tmp_path)

    def with_free(free):
        monkeypatch.setattr(agent_state.shutil, "disk_usage", lambda _: usage._replace(free=free))
        results = [next(iter(agent_state.room(store, one))) for one in (enrolment, None)]
        assert all("--state" in one.remedy for one in results if one.verdict != "ok")
        return [one.verdict for one in results]

    assert with_free(10**12) == ["ok", "ok"]
    assert with_free(10**8) == ["ok", "warn"]
    assert with_free(100) == ["fail", "warn"]


# Samples, trainer, memory


def test_samples_that_do_not_fit_the_run(tmp_path, spec, weights):
    enrolment = agent_state.latest_enrolment(store_with_a_run(tmp_path / "state", spec, weights))
    x, y = np.ones((30, 5), np.float32), np.arange(30) % 3
    np.savez(tmp_path / "five.npz", x=x, y=y)
    np.savez(tmp_path / "four.npz", x=x[:, :4], y=y)
    np.savez(tmp_path / "alike.npz", x=x * y[:, None], y=y * 0)
    good, few = training.data(f"npz:{tmp_path}/four.npz", 0.3, enrolment)
    assert (few.verdict, few.what, "training samples" in few.found) == ("warn", "privacy", True)
    assert "32" in few.remedy
    assert all(one in good.found for one in ("30 samples", "3 classes", "10 to 10", "tiny", "r1"))
    with raises(DataError, "five.npz", "(5,)"):
        list(training.data(f"npz:{tmp_path}/five.npz", 0.3, enrolment))
    alike, _ = training.data(f"npz:{tmp_path}/alike.npz", 0.3, None)
    assert (alike.verdict, "classes" in alike.remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("count", "noise", "warned"), [(32, None, 0), (31, None, 1), (31, "central", 1), (31, "local", 0)]
)
def test_few_training_samples_are_a_warning_unless_each_update_has_noise(count, noise, warned, spec):
    section = UNSET if noise is None else PrivacySection(clip=1, noise_multiplier=1, delta=1e-5, noise=noise)
    found = list(training._few_samples(count, SimpleNamespace(privacy=section)))
    assert [one.what for one in found] == ["privacy"] * warned


def trainer_results(*arguments, **options):
    return list(run_check("trainer", lambda: training.trainers(*arguments, **options)))


def test_whether_a_trainer_can_use_its_device():
    *_, found = trainer_results("auto", None, train_on=card.NAME)
    assert (found.verdict, found.found) == ("ok", f"torch computes on {card.NAME}")
    *_, found = trainer_results("onnx", None, train_on=card.NAME)
    assert found.verdict == "fail"
    assert f"--train-on {card.NAME}" in found.found
    assert "leave out --train-on" in found.remedy


def with_trainers(monkeypatch, *kinds):
    monkeypatch.setattr(trainers, "installed", lambda: kinds)


def test_a_trainer_that_is_not_installed(monkeypatch):
    with_trainers(monkeypatch)
    (result,) = trainer_results("auto", None)
    assert all(one in result.remedy for one in ("pip install onnxruntime", "pip install torch"))
    with_trainers(monkeypatch, "onnx")
    for kind, package in (("torch", "torch"), ("ort-training", "onnxruntime-training-cpu")):
        (result,) = trainer_results(kind, None)
        assert (result.verdict, "pip install" in result.remedy, package in result.remedy) == (
            "fail",
            True,
            True,
        )


def test_both_onnx_packages_at_once(monkeypatch):
    with_trainers(monkeypatch, "onnx", "ort-training")
    monkeypatch.setattr(
        training, "installed_packages", lambda: {"onnxruntime", "onnxruntime-training-cpu", "numpy"}
    )
    first, *_ = trainer_results("auto", None, lambda _: Tried("1.31.1", 10))
    assert (first.verdict, "pip uninstall onnxruntime" in first.remedy) == ("fail", True)


def test_an_old_onnxruntime_and_one_that_crashes(monkeypatch):
    with_trainers(monkeypatch, "onnx")
    (old,) = trainer_results("auto", None, lambda _: Tried("1.15.1", 10))
    assert "1.15.1" in old.found
    assert "pip install 'onnxruntime>=1.16'" in old.remedy
    (dead,) = trainer_results("auto", None, lambda _: Tried(problem="importing it ends with SIGILL"))
    assert (dead.verdict, "SIGILL" in dead.found) == ("fail", True)
    assert "--force-reinstall onnxruntime" in dead.remedy
    found = verdicts(trainer_results("auto", 10**10, lambda _: Tried("1.31.1", 33_000_000)))
    assert found["trainer"].found == "onnx 1.31.1"
    assert "onnx 33 MB" in found["memory"].found
    unknown = verdicts(trainer_results("auto", None, lambda _: Tried("1.31.1", 33_000_000)))
    assert unknown["memory"].verdict == "warn"
    assert "--max-memory-mb" in unknown["memory"].remedy


def test_a_trainer_that_does_not_fit_is_not_even_tried(monkeypatch):
    with_trainers(monkeypatch, "torch")

    def never(_):
        raise AssertionError

    found = verdicts(trainer_results("torch", IMPORT_BYTES["torch"], never))
    assert found["memory"].verdict == "fail"
    assert all(one in found["memory"].remedy for one in ("--trainer onnx", "MemoryMax"))


def test_a_trainer_that_takes_more_memory_than_predicted(monkeypatch):
    with_trainers(monkeypatch, "onnx")
    imported = []
    monkeypatch.setattr(trainers, "_problem_on", lambda kind, device: imported.append((kind, device)))
    held = training.process_memory().resident or 0
    tried = Tried("1.31.1", 10**9)
    found = verdicts(trainer_results("onnx", held + 2 * 10**8, lambda _: tried, train_on="cuda"))
    assert (found["memory"].verdict, "MemoryMax" in found["memory"].remedy) == ("fail", True)
    assert imported == [("onnx", "cpu")], "the doctor itself must not import what does not fit"


def test_the_forecast_of_the_latest_run(tmp_path, monkeypatch):
    store = SimpleNamespace(runs=lambda: ["r1"], ratio_controller=lambda _: SimpleNamespace(read=lambda: b""))
    for choice, verdict in ((0.4, "ok"), (None, "fail")):
        decision = SimpleNamespace(choice=choice, reason="the reason")
        controller = SimpleNamespace(decision=lambda _, decision=decision: decision)
        monkeypatch.setattr(training, "read_ratio_controller", lambda _, found=controller: found)
        (result,) = training.latest_run(store, None)
        assert (result.verdict, "r1" in result.found) == (verdict, True)
        assert ("edge-agent explain" in result.remedy) == (verdict == "fail")
    monkeypatch.setattr(training, "read_ratio_controller", lambda _: None)
    (result,) = training.latest_run(store, None)
    assert result.verdict == "skip"


def test_a_stream_with_rejected_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "check_stream", lambda _: None)
    monkeypatch.setattr(
        training.SampleStore, "open", lambda _: SimpleNamespace(close=lambda: None), raising=True
    )
    for refused, verdict in (({}, "ok"), ({"shape": (3, "why")}, "warn")):
        found = SimpleNamespace(classes=[SimpleNamespace(train=5, test=2)], num_bytes=10**6, refused=refused)
        monkeypatch.setattr(training, "status", lambda *_, found=found: found)
        result, few = training.stream("intake:", tmp_path, 0.3)
        assert few.what == "privacy"
        assert (result.verdict, "5 training and 2 test" in result.found) == (verdict, True)
        assert ("edge-agent samples" in result.remedy) == (verdict == "warn")


def test_an_import_is_tried_for_real(tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text(f"import os, signal\nos.kill(os.getpid(), {int(signal.SIGILL)})\n")
    (tmp_path / "fails.py").write_text("import no_such_library_of_ours\n")
    (tmp_path / "works.py").write_text("__version__ = '3.2'\nheld = bytearray(b'x') * 50_000_000\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert all(one in training.try_import("dies").problem for one in ("dies", "SIGILL"))
    assert "no_such_library_of_ours" in training.try_import("fails").problem
    works = training.try_import("works")
    assert works.version == "3.2"
    assert 45e6 < works.num_bytes < 80e6
