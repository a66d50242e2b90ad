"""The commands of a device that has joined a fleet: they need neither --fleet, --broker nor --device."""

import gc
import shutil
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.helpers.errors import raises
from tests.helpers.own_authority import OwnAuthority
from typer.testing import CliRunner

from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.edge_agent import cli
from fleetune.edge_agent.doctor.diagnosis import AgentUnderDiagnosis, examine
from fleetune.edge_agent.joining.joined_fleet import Certificates, Credentials, JoinedFleet, joined_fleets
from fleetune.edge_agent.joining.membership import BrokerOptions
from fleetune.edge_agent.joining.signing_request import key_and_request
from fleetune.edge_agent.run_options import RunOptions
from fleetune.edge_agent.service.unit import SERVICE
from fleetune.edge_agent.starting import ready_agent
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import SettingError
from fleetune.protocols.systemd import environment, install
from fleetune.protocols.wire import topics


def joined(state, fleet="homes", device="d-7", **how):
    """A fleet that was joined in this folder."""
    authority, made = OwnAuthority(), key_and_request()
    credentials = Credentials.of(state, fleet)
    credentials.keep_pending(made)
    certificates = authority.for_request(made.request, device, **how)
    credentials.keep(made.key, Certificates(*certificates, authority.pem))
    found = JoinedFleet(credentials, fleet, device, "Kitchen", "127.0.0.1", 9)
    found.keep()
    return found


def options(state, **given):
    return BrokerOptions(**{"fleet": None, "broker": None, "device": None, "state": state, **given})


def run_command(*words, **variables):
    unset = dict.fromkeys(("FLEETUNE_BROKER", "FLEETUNE_FLEET", "FLEETUNE_DEVICE"))
    return CliRunner().invoke(cli.app, [*map(str, words)], env={**unset, **variables})


def test_run_needs_only_its_data(tmp_path):
    joined(tmp_path)
    agent = ready_agent(RunOptions(data="digits", state=tmp_path))
    settings = agent._device.settings
    assert (settings.fleet, settings.device, settings.name) == ("homes", "d-7", "Kitchen")
    transport = agent._connection._transport
    assert (transport._broker, transport._client_id) == (joined_fleets(tmp_path)[0].broker, "d-7")
    agent._device.close()


def test_a_name_that_the_owner_gives_later_stays(tmp_path):
    joined(tmp_path)
    for name in ("Cellar", None):
        agent = ready_agent(RunOptions(data="digits", state=tmp_path, name=name))
        assert agent._device.settings.name == "Cellar"
        agent._device.close()


def test_the_second_connection_has_its_own_identity(tmp_path):
    broker = joined(tmp_path).broker
    assert broker.second.cert == broker.probe_cert != broker.cert
    assert topics.probe("homes", "d-7", joined=True) == ("d-7~probe", "fleetune/v1/homes/d-7~probe/probe")
    assert topics.probe("homes", "d-7", joined=False) == ("homes-d-7-probe", "fleetune/v1/homes/d-7/probe")


def test_a_broker_that_is_given_is_used_as_before(tmp_path):
    joined(tmp_path)
    found = options(tmp_path, fleet="farms", broker="edge:99", device="x").membership()
    assert (found.fleet, found.device, found.joined, found.broker.joined) == ("farms", "x", None, False)
    with raises(SettingError, "--fleet is not given"):
        options(tmp_path, broker="edge:99").membership()


def test_the_address_alone_keeps_what_was_stored_at_joining(tmp_path):
    before = joined(tmp_path)
    found = options(tmp_path, broker="mqtts://edge:99", fleet="homes").membership()
    assert found.broker == msgspec.structs.replace(before.broker, host="edge", port=99)
    assert (found.device, found.present_broker()) == ("d-7", found.broker)
    assert options(tmp_path, broker="mqtts://edge:99").broker_and_fleet() == (found.broker, "homes")
    for other in ("edge:99", "mqtts://me:secret@edge:99"):
        assert options(tmp_path, broker=other, fleet="homes").membership().joined is None


# Paho leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_running_agent_reads_the_address_again_before_it_connects(tmp_path):
    before = joined(tmp_path)
    agent = ready_agent(RunOptions(data="digits", state=tmp_path))
    transport = agent._connection._transport
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(30)
        replace(before, port=elsewhere.getsockname()[1]).keep()  # as another `join` does
        transport.connect()
        elsewhere.accept()[0].close()
    assert transport._broker.port == joined_fleets(tmp_path)[0].port
    transport.close()
    agent._device.close()
    gc.collect()


def test_a_coordinator_that_has_moved(tmp_path):
    joined(tmp_path)
    done = run_command("doctor", "--state", tmp_path)
    assert "if the coordinator has moved, join again: edge-agent join LINE" in " ".join(done.stdout.split())


def test_a_device_with_a_secret_has_a_user_for_its_second_connection(tmp_path):
    authority = Authority.open(FleetFolder.of("homes", tmp_path), time.time())
    (tmp_path / "a.pem").write_text(authority.bundle)
    broker = "mqtts://panel:secret@edge:8884"
    found = options(tmp_path, fleet="homes", broker=broker, ca=str(tmp_path / "a.pem")).membership().broker
    assert (found.joined, found.second.username) == (True, "panel~probe")
    (tmp_path / "own.pem").write_text(OwnAuthority().pem)
    for changed in ({"ca": str(tmp_path / "own.pem")}, {"fleet": "farms"}):
        given = {"fleet": "homes", "broker": broker, "ca": str(tmp_path / "a.pem")} | changed
        assert not options(tmp_path, **given).membership().broker.joined


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fleet": "farms"}, "has joined no fleet 'farms'"),
        ({"device": "other"}, "as d-7; leave out --device"),
        ({"ca": "a.pem"}, "--ca is for a broker of your own"),
    ],
)
def test_options_that_contradict_what_was_joined(tmp_path, given, said):
    joined(tmp_path)
    with raises(SettingError, said):
        options(tmp_path, **given).membership()


def test_a_device_that_joined_nothing_learns_how(tmp_path):
    done = run_command("run", "--data", "digits", "--state", tmp_path)
    assert done.exit_code == 2
    assert "edge-agent join LINE" in done.stderr
    assert "--broker localhost" in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_commands_find_the_joined_device(tmp_path):
    joined(tmp_path)
    assert AgentStore.of(tmp_path, None).folder == tmp_path / "homes" / "d-7"
    for command in ("explain", "models", "unpin"):
        done = run_command(command, "--state", tmp_path)
        assert f"{tmp_path / 'homes' / 'd-7'}: this device has" in done.stderr
    joined(tmp_path, "farms")
    assert "choose one with --fleet" in run_command("explain", "--state", tmp_path).stderr


def test_doctor_finds_the_broker_and_reads_the_certificate(tmp_path):
    broker = joined(tmp_path, life=timedelta(days=20)).broker
    done = run_command("doctor", "--state", tmp_path, "--json")
    assert "127.0.0.1:9" in done.stdout
    assert "--broker is not given" not in done.stdout
    from fleetune.edge_agent.doctor import tls

    (result,) = tls.own_certificate(broker)
    assert (result.verdict, "start the agent to renew it" in result.remedy) == ("warn", True)
    assert examine(AgentUnderDiagnosis(device="d-7", broker=broker))


def test_an_expired_certificate_says_what_to_do(tmp_path):
    begins = datetime.now(UTC) - timedelta(days=9)
    broker = joined(tmp_path, begins=begins, life=timedelta(days=5)).broker
    from fleetune.edge_agent.doctor import tls

    (result,) = tls.own_certificate(broker)
    assert result.verdict == "fail"
    assert "join again: edge-agent join LINE" in result.remedy


def test_wipe_keeps_the_identity_unless_it_is_named(tmp_path):
    joined(tmp_path)
    AgentStore.of(tmp_path, None).claim().close()
    done = run_command("wipe", "--state", tmp_path, "--yes")
    assert "kept: the identity of d-7 in fleet homes; --identity removes it" in done.stdout
    assert not (tmp_path / "homes").exists()
    assert len(joined_fleets(tmp_path)) == 1
    assert run_command("wipe", "--state", tmp_path, "--yes", "--identity").exit_code == 0
    assert joined_fleets(tmp_path) == []


@pytest.mark.skipif(not shutil.which("systemctl"), reason="systemd is not installed")
def test_the_service_of_a_joined_device_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(install.Service, "executable", lambda _: "/opt/fleetune/bin/edge-agent")
    before = ("--fleet", "homes", "--broker", "mqtt://join:secret@edge", "--data", "digits")
    assert run_command("service", "install", "--into", tmp_path, *before).exit_code == 0
    joined(tmp_path / SERVICE.state_folder)
    done = run_command("service", "install", "--into", tmp_path)
    assert done.exit_code == 0, done.output
    text = (tmp_path / SERVICE.settings_file).read_text()
    assert environment.read(text, "agent.env") == {"FLEETUNE_FLEET": "homes", "FLEETUNE_SOURCE": "digits"}
    for path in (tmp_path / "etc").rglob("*"):
        assert not path.is_file() or "secret" not in path.read_text()


@pytest.mark.skipif(not shutil.which("systemctl"), reason="systemd is not installed")
def test_the_service_of_a_joined_device_needs_only_data(tmp_path, monkeypatch):
    monkeypatch.setattr(install.Service, "executable", lambda _: "/opt/fleetune/bin/edge-agent")
    joined(tmp_path / SERVICE.state_folder)
    done = run_command("service", "install", "--into", tmp_path, "--data", "npz:/srv/x.npz")
    assert done.exit_code == 0, done.output
    joined(tmp_path / SERVICE.state_folder, "farms")
    (tmp_path / SERVICE.settings_file).unlink()
    assert (
        "--fleet: needed" in run_command("service", "install", "--into", tmp_path, "--data", "digits").output
    )
