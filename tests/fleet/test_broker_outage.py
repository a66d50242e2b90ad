"""The broker of a run dies, and a run ends as if it had not; `status` says since when it is down."""

import json
import re
import socket
from contextlib import suppress

import pytest
from tests.helpers.fleet_processes import Fleet, assert_equal, expected, run_toml, wait_until
from typer.testing import CliRunner

from fleetune.coordinator.cli import app

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

TOML = run_toml(epochs=40)


def status(fleet, *options):
    done = CliRunner().invoke(app, ["status", str(fleet.folder / "runs" / fleet.name), *options])
    assert done.exit_code == 0, done.output
    return done.output


def figures(fleet):
    return json.loads(status(fleet, "--json"))


def is_down(fleet):
    return lambda: figures(fleet)["broker_down_since"] is not None


def is_up(fleet):
    return lambda: figures(fleet)["broker_down_since"] is None


def kill_and_take_the_port(fleet):
    """Kill the coordinator's broker, and take its port before it is back."""
    while True:
        fleet.kill_embedded_broker()
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", fleet.port))


def test_the_embedded_broker_is_killed_and_its_port_taken_for_a_while(tmp_path, tmp_path_factory):
    wanted = expected(TOML, tmp_path_factory.mktemp("simulated"))
    with Fleet(tmp_path, TOML, embedded=True) as fleet:
        fleet.start_coordinator().wait_for("begins")
        assert "embedded" in fleet.coordinator.text().splitlines()[0]
        for device in fleet.shares:
            fleet.start_agent(device)
        fleet.agents["device-0"].wait_for("round 2: training")
        with kill_and_take_the_port(fleet):
            fleet.coordinator.wait_for("no broker can listen on .*; retrying")
            wait_until(is_down(fleet), "status says so")
            assert re.search(r"broker down since \d\d:\d\d:\d\d", status(fleet))
            assert figures(fleet)["running"]
        wait_until(is_up(fleet), "status says so")
        assert "broker down" not in status(fleet)
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)


def test_status_says_that_an_external_broker_is_down(tmp_path):
    with Fleet(tmp_path, TOML) as fleet:
        fleet.start_coordinator("--fresh").wait_for("begins")
        assert "from --broker" in fleet.coordinator.text().splitlines()[0]
        wait_until(is_up(fleet), "it is connected")
        fleet.broker.kill()
        wait_until(is_down(fleet), "status says so")
        assert "no program listens" in figures(fleet)["problem"] or "ended" in figures(fleet)["problem"]
        fleet.restart_broker()
        wait_until(is_up(fleet), "status says so")
