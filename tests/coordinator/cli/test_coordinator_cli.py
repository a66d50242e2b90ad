"""edge-coordinator's commands over a run's folder, and the one line of each mistake."""

import os
import shutil
import socket
import sqlite3
import stat
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from safetensors.numpy import load_file
from tests.tools.simulator.test_simulate import settings
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.queries.run_status import StatusReader
from fleetune.coordinator.reports.tables import fleet_table
from fleetune.coordinator.rounds.engine_state import EngineState, Introduction, Member
from fleetune.coordinator.rounds.records import Ledger
from fleetune.coordinator.run.stored_run import look_at
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.simulator.runner import simulate


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sim"
    run, _ = simulate(settings(fleet={"ratios": [0.2, 1.0]}), folder, workers=0, fresh=True)
    weights = run.controller.shared_model
    run.store.close()
    return folder, run.enrolment.spec, weights


def call(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_report_is_written_anew(finished):
    folder, _, _ = finished
    result = call("report", folder)
    assert result.exit_code == 0, result.output
    assert "fedspu" in result.output
    assert (folder / "report.html").read_bytes().startswith(b"<!")
    assert len((folder / "rounds.jsonl").read_bytes().splitlines()) == 5


def test_devices_are_listed_with_board_and_ratio(finished):
    folder, _, _ = finished
    result = call("devices", folder, "--run")
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if "device-" in line]
    assert len(rows) == 12, "a row in the fleet's table and one in the run's"
    assert "1970-01-01" in rows[0]
    assert "0.2" in rows[6]


def statuses(state):
    settings = parse_run({"run": {"name": "a"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}})
    return StatusReader(settings, 10).devices(state, Ledger())


def test_a_device_is_listed_with_its_conditions_and_what_became_of_it():
    conditions = Conditions(
        memory_bytes=412_000_000, power="battery", battery=0.43, celsius=41.2, throttled=True, metered=True
    )
    report = DeviceReport("a", "raspberry-pi-4b", 120, 0.4, "as wanted", round_s=14.2, conditions=conditions)
    members = {
        "a": Member(
            report,
            ready=True,
            declined_round=2,
            declined_reason="41 °C of 40 °C",
            introduction=Introduction(agent="fleetune 0.2.0.dev900"),
        ),
        "b": Member(
            DeviceReport("b", conditions=Conditions(power="mains", watts=5.2)), ready=True, left=True
        ),
        "c": Member(DeviceReport("c", conditions=Conditions(battery=0.5, throttled=False))),
        "d": Member(refusal="512 MB of 600 MB\x1b[2J"),
    }
    console = Console(width=300, color_system=None)
    with console.capture() as capture:
        console.print(fleet_table(statuses(EngineState(rounds_done=2, members=members))))
    rows, last = {}, ""
    for line in capture.get().splitlines()[3:]:
        last = line[:1].strip() or last
        rows[last] = rows.get(last, "") + line.rstrip() + "\n"
    for wanted in (
        "rpi-4b",
        "0.4",
        "120",
        "14 s",
        "as wanted",
        "idle; declined round 2: 41 °C of 40 °C",
    ):
        assert wanted in rows["a"]
    assert "battery 43 %, 41 °C, throttled, metered, 412 MB to use" in rows["a"]
    assert "mains, 5.2 W" in rows["b"]
    assert "left" in rows["b"]
    assert "battery 50 %\n" in rows["c"]
    assert "away" in rows["c"]
    assert "takes no part: 512 MB of 600 MB" in rows["d"]
    assert "\x1b" not in rows["d"]


def test_a_device_that_declines_the_open_round_is_listed_so_once():
    turn = (3, 1)
    declined = {"asked": turn, "answer": "declined", "declined_round": 3, "declined_reason": "hot"}
    member = Member(DeviceReport("a"), ready=True, **declined)
    state = EngineState("training", rounds_done=2, participants=("a",), members={"a": member})
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(fleet_table(statuses(state)))
    assert capture.get().count("declined") == 1


def test_weights_writes_the_shared_model_by_name(finished, tmp_path):
    folder, spec, weights = finished
    assert call("weights", folder, tmp_path / "model.safetensors").exit_code == 0
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {tensor.name for tensor in spec.tensors if tensor.kind != "stat"}
    for tensor, view in spec.views(weights):
        if tensor.kind != "stat":
            assert np.array_equal(tensors[tensor.name], view)


def test_a_run_is_its_owners_alone_and_what_is_asked_for_as_the_umask_says(finished, tmp_path):
    folder, _, _ = finished
    folder.chmod(0o755)  # as an older release left it
    RunStore.open(folder / "state.sqlite").close()
    before = os.umask(0o026)
    try:
        assert call("weights", folder, tmp_path / "out" / "model.safetensors").exit_code == 0
        assert call("report", folder).exit_code == 0
    finally:
        os.umask(before)
    wanted = {
        folder: 0o700,
        folder / "state.sqlite": 0o600,
        folder / "lock": 0o600,
        folder / "report.html": 0o640,
        tmp_path / "out": 0o751,
        tmp_path / "out" / "model.safetensors": 0o640,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in wanted} == wanted


def test_looking_at_a_run_changes_nothing(finished):
    folder, _, _ = finished

    def content():
        store = RunStore.open(folder / "state.sqlite")
        try:
            return [store.get(name) for name in ("engine", "ledger", "state", "settings")]
        finally:
            store.close()

    before = content()
    call("devices", folder)
    call("report", folder)
    assert content() == before


def test_mistakes_are_one_line_and_exit_2(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text('[run]\nname = "x"\n[model]\nname = "mlp"\n[method]\nname = "fedspu"\n')
    for arguments in (
        ("report", tmp_path),
        ("devices", tmp_path / "nowhere"),
        ("weights", tmp_path, tmp_path / "out"),
        ("serve", tmp_path / "nowhere.toml"),
        ("serve", run_file, "--runs", tmp_path, "--set", "run.rouds=3"),
        ("serve", run_file, "--runs", tmp_path),  # no data to read the model's shape from
        ("serve", run_file, "--runs", tmp_path, "--broker", "http://x"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2, arguments
        assert len(result.output.strip().splitlines()) == 1, result.output
        assert result.output.startswith("edge-coordinator: ")


@pytest.fixture
def live(finished, tmp_path):
    """The folder of a run that a coordinator has open, and its store."""
    folder = shutil.copytree(finished[0], tmp_path / "sim")
    with closing(RunStore.open(folder / "state.sqlite")) as store:
        yield folder, store


def test_a_run_is_looked_at_while_a_coordinator_writes_it(live, tmp_path):
    folder, store = live
    with store.step():
        store.put("opened", b"1.0")  # under way, not yet told to anybody
        for command in (("devices", folder), ("report", folder), ("weights", folder, tmp_path / "w")):
            result = call(*command)
            assert result.exit_code == 0, result.output
    with store.step():  # nobody who looked is in the way
        store.put("opened", b"2.0")


def test_what_is_looked_at_is_of_one_moment(live):
    folder, store = live
    before = len(store.records())
    with look_at(folder) as run:
        with store.step():
            store.add_record(replace(store.records()[-1], number=99))
        assert len(run.controller.records()) == before
    with look_at(folder) as run:
        assert len(run.controller.records()) == before + 1
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            run.store.put("opened", b"3.0")


def test_a_second_coordinator_of_a_run_is_refused_by_name(live, tmp_path):
    folder, line = live[0], "another coordinator runs {}: stop it, or give this run another run.name"
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[run]\nname = "{folder.name}"\n[model]\nname = "mlp"\ninput_shape = [1, 8, 8]\nnum_classes = 10\n'
        '[method]\nname = "fedspu"\n'
    )
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    for options in ((), ("--fresh",)):
        result = call("serve", run_file, "--runs", folder.parent, "--port", 0, *options)
        assert result.exit_code == 2
        assert result.output == f"edge-coordinator: {line.format(folder)}\n"
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


def test_a_run_of_another_user_is_looked_at_in_a_folder_that_cannot_be_written(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "other")
    for left in folder.glob("state.sqlite-*"):
        left.unlink()
    folder.chmod(0o555)
    try:
        with mock.patch("os.access", lambda path, _: path != folder):  # root may write everywhere
            assert call("devices", folder).exit_code == 0
        assert not list(folder.glob("state.sqlite-*"))
    finally:
        folder.chmod(0o755)


def run_file_in(folder, name="new"):
    path = folder / "run.toml"
    path.write_text(
        f'[run]\nname = "{name}"\n[model]\nname = "mlp"\ninput_shape = [1, 8, 8]\nnum_classes = 10\n'
        '[method]\nname = "fedspu"\n'
    )
    return path


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(tmp_path, port):
    result = call("serve", run_file_in(tmp_path), "--runs", tmp_path, "--port", port)
    assert result.exit_code == 2
    assert "is not in the range 0<=x<=65535" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no broker can listen on 127.0.0.1:"),
        (("--broker", "http://x"), "it is not mqtt:// or mqtts://; use host:port"),
        (("--fleet", "no/name"), "fleet"),
        (("--set", "model.name=no.module:here", "--port", 0), "no.module"),
    ],
)
def test_a_start_that_fails_leaves_no_run_and_takes_none_away(finished, tmp_path, options, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = () if "--broker" in options else ("--port", taken.getsockname()[1])
        file = run_file_in(tmp_path)
        result = call("serve", file, "--runs", tmp_path, *port, *options)
        assert result.exit_code == 2
        assert said in result.output
        assert len(result.output.splitlines()) == 1
        assert not (tmp_path / "new").exists()
        folder = shutil.copytree(finished[0], tmp_path / "old")
        before = (folder / "state.sqlite").read_bytes()
        file = run_file_in(tmp_path, "old")
        assert call("serve", file, "--runs", tmp_path, "--fresh", *port, *options).exit_code == 2
        assert (folder / "state.sqlite").read_bytes() == before
