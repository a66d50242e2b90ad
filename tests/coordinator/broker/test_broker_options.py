"""Which broker a command uses, and why, is said first; options of another broker beside it are refused."""

import socket

import pytest
from tests.helpers.errors import raises
from typer.testing import CliRunner

from fleetune.coordinator.broker.broker_options import broker_at, origin_of
from fleetune.coordinator.broker.open_fleet import served_once
from fleetune.coordinator.cli import app
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.edge_agent.cli import app as agent
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.wire.transport.mqtt import Broker

URL = "mqtt://me:secret@edge:1884"


def sources(**given):
    return {name: given.get(name, "DEFAULT") for name in ("broker", "bind", "port", "ca", "cert", "key")}


def test_where_the_url_comes_from():
    assert origin_of(sources()) == ""
    assert origin_of(sources(bind="COMMANDLINE", port="COMMANDLINE")) == ""
    assert origin_of(sources(broker="COMMANDLINE", ca="COMMANDLINE")) == "from --broker"
    assert origin_of(sources(broker="ENVIRONMENT")) == "from FLEETUNE_BROKER in the environment"
    assert origin_of(sources(broker="ENVIRONMENT"), supervised=True) == "from the service"


@pytest.mark.parametrize("option", ["bind", "port"])
@pytest.mark.parametrize("broker", ["COMMANDLINE", "ENVIRONMENT"])
def test_an_option_of_the_embedded_broker_beside_another_is_refused(option, broker):
    with pytest.raises(SettingError, match=f"--{option} is for the embedded broker"):
        origin_of(sources(broker=broker, **{option: "COMMANDLINE"}))


@pytest.mark.parametrize("option", ["ca", "cert", "key"])
def test_files_for_tls_without_a_broker_of_ones_own_are_refused(option):
    with pytest.raises(SettingError, match=f"--{option} is for a broker of your own"):
        origin_of(sources(**{option: "COMMANDLINE"}))


def test_the_commands_refuse_bind_beside_the_variable_in_one_line(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "new"\n[model]\nname = "mlp"\ninput_shape = [1, 8, 8]\nnum_classes = 10\n'
        '[method]\nname = "fedspu"\n'
    )
    for command in (["serve", str(tmp_path / "run.toml")], ["service", str(tmp_path)]):
        done = CliRunner().invoke(app, [*command, "--bind", "0.0.0.0"], env={"FLEETUNE_BROKER": URL})
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
        assert "--bind is for the embedded broker, but FLEETUNE_BROKER in the environment" in done.output
        assert "unset FLEETUNE_BROKER, or leave out --bind" in done.output
        assert "secret" not in done.output


def test_the_first_line_says_which_broker_and_why(tmp_path, capsys):
    given = Broker("edge", 1884, "me", "secret")
    with broker_at(given, tmp_path, "f", bind="127.0.0.1", port=0, origin="from --broker") as (
        where,
        devices,
    ):
        assert (where, devices.identity("a", "").known_by) == (given, "claim")
    assert capsys.readouterr().out == "broker: mqtt://edge:1884, from --broker\n"
    with broker_at(None, tmp_path / "run", "f", bind="::1", port=0) as (where, _):
        first = capsys.readouterr().out.splitlines()[0]
        socket.create_connection((where.host, where.port), timeout=5).close()
    assert first.startswith("broker: embedded ")
    assert first.endswith(f", listens on [::1]:{where.port}; no --broker or FLEETUNE_BROKER is given")


@pytest.mark.parametrize("program", [app, agent])
@pytest.mark.parametrize(
    "arguments",
    [
        ["mqtt://me:secret@h"],
        ["serve", "run.toml", "mqtt://me:secret@h"],
        ["run", "--fleet", "f", "--threads", "mqtt://me:secret@h"],
        ["run", "--fleet", "f", "--broker", "h", "--data", "digits", "mqtt://me:secret@h"],
    ],
)
def test_a_wrong_command_line_is_said_without_the_password(program, arguments):
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 2
    assert "secret" not in result.output


def test_one_coordinator_serves_a_fleet_beyond_the_loopback(tmp_path):
    files = FleetFolder.of("f", tmp_path)

    def serve():
        with served_once(files):
            pass

    with served_once(files), raises(StoreError, "another coordinator serves fleet f: stop it"):
        serve()
    serve()
