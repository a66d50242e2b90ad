"""The options of `run`, and that `doctor` takes its line."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetune.edge_agent import cli, starting
from fleetune.edge_agent.doctor import cli as doctor_cli
from fleetune.edge_agent.run_options import RunOptions, takes_run_options
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire import topics

GIVEN = {"fleet": "f", "broker": "b:1", "data": "digits"}
LINE = [word for name, value in GIVEN.items() for word in (f"--{name}", value)]


def parameters(command):
    return inspect.signature(command).parameters


def test_doctor_takes_every_option_of_run_but_the_last_and_needs_none():
    run, doctor = parameters(cli.run), parameters(doctor_cli.doctor)
    assert [*run] == [one.name for one in fields(RunOptions)]
    assert [*doctor] == [*(name for name in run if name != "leave_after_run"), "as_json"]
    for name in doctor.keys() & run.keys():
        assert doctor[name].annotation == run[name].annotation
        assert doctor[name].default == (None if name in GIVEN else run[name].default)


def test_what_is_given_and_what_is_not_arrives_by_name(monkeypatch):
    seen = []

    def agent(options):
        seen.append(options)
        raise SystemExit(0)

    monkeypatch.setattr(starting, "ready_agent", agent)
    line = ["run", *LINE, "--trust", "a.b", "--trust", "c", "--ratio", "0.5", "--charging-only"]
    assert CliRunner().invoke(cli.app, line).exit_code == 0
    (options,) = seen
    expected = RunOptions(**GIVEN, trust=["a.b", "c"], ratio=0.5, charging_only=True)
    assert options == expected
    assert (expected.root, expected.unmetered_only, expected.leave_after_run) == (Path("/"), None, False)


@pytest.mark.parametrize("left_out", GIVEN)
def test_run_needs_its_fleet_its_broker_and_its_data(left_out, monkeypatch):
    monkeypatch.delenv("FLEETUNE_BROKER", raising=False)
    at = LINE.index(f"--{left_out}")
    found = CliRunner().invoke(cli.app, ["run", *LINE[:at], *LINE[at + 2 :]])
    assert found.exit_code == 2
    assert f"--{left_out}" in found.output


def test_lists_that_are_options_are_not_shared_between_calls():
    @takes_run_options()
    def first(options):
        """Nothing."""

    @takes_run_options()
    def second(options):
        """Nothing."""

    assert parameters(first)["trust"].default is not parameters(second)["trust"].default


@pytest.mark.parametrize(
    ("name", "valid"),
    [("raspberrypi.local", "raspberrypi-local"), ("küche 2", "k-che-2"), ("..", None), ("a" * 70, "a" * 64)],
)
def test_a_name_that_is_none_comes_with_one_that_is(name, valid):
    with pytest.raises(SettingError) as caught:
        topics.check_name(name, "device")
    assert str(caught.value).endswith(f"; use {valid}" if valid else "digits, '_' or '-'")
    if valid:
        assert topics.check_name(valid, "device") == valid
