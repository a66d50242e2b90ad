"""Queries of a run by its folder: typed values that encode as JSON, of a run that is finished."""

import msgspec
import pytest
from tests.fleet.test_semi_asynchronous import settings
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.queries import queries
from fleetune.protocols.errors import SettingError
from fleetune.tools.simulator.runner import simulate

OLD_KEYS = [  # of `status --json` before queries were there, in their order
    *("run", "running", "stage", "round", "rounds", "devices", "devices_there", "waits"),
    *("broker_down_since", "problem", "troubles"),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries") / "run"
    run, summary = simulate(settings(rounds=3), folder, workers=0, fresh=True)
    run.store.close()
    return folder, summary


def test_a_status_says_how_far_the_run_is(played):
    folder, summary = played
    found = queries.status(folder)
    assert (found.stage, found.running, found.over, found.waits) == ("finished", False, True, "")
    assert found.devices == len(summary.by_device)
    assert [one.number for one in found.scores] == [1, 2, 3]
    assert (found.bytes_up, found.bytes_down) == (summary.bytes.up, summary.bytes.down)
    assert queries.status_and_devices(folder)[0] == found


def test_devices_have_what_they_sent(played):
    folder, summary = played
    found = queries.devices(folder)
    assert [one.device for one in found] == sorted(summary.by_device)
    assert {one.device: one.bytes_up for one in found} == {
        name: row.up for name, row in summary.by_device.items()
    }
    assert all(one.part == "idle" for one in found)


def test_rounds_since_one_are_those_after_it(played):
    folder, _ = played
    everything = queries.rounds(folder)
    assert [one.number for one in everything if not one.final_evaluation] == [1, 2, 3]
    assert queries.rounds(folder, since=2) == everything[2:]


def test_metrics_are_those_of_the_summary(played):
    folder, summary = played
    found = {one.name: one for one in queries.metrics(folder)}
    assert found["bytes_up"].value == summary.bytes.up
    assert found["bytes_up"].unit == "bytes"
    assert found["accuracy_personal_mean"].value == summary.accuracy.personal_mean


def test_the_shared_model_is_named(played):
    folder, summary = played
    (shared,) = queries.models(folder)
    assert (shared.kind, shared.round, shared.num_parameters) == ("shared", 3, summary.parameters)


def test_the_command_line_prints_exactly_these_values(played):
    folder, _ = played
    for command, value in ("status", queries.status(folder)), ("devices", queries.devices(folder)):
        printed = CliRunner().invoke(app, [command, str(folder), "--json"]).stdout
        assert printed.encode() == msgspec.json.encode(value) + b"\n"
    assert list(msgspec.to_builtins(queries.status(folder)))[: len(OLD_KEYS)] == OLD_KEYS


def test_a_folder_without_a_run_is_refused(tmp_path):
    for query in queries.status, queries.devices, queries.rounds, queries.metrics, queries.models:
        with pytest.raises(SettingError, match="holds no run"):
            query(tmp_path)
