"""--fresh replaces a run, and nothing else that lies in its folder."""

import sqlite3

import pytest
from tests.helpers.power import ForgetfulDisk, PowerCut
from tests.tools.simulator.test_simulate import settings
from typer.testing import CliRunner

from fleetune.coordinator.reports.pictures import plots
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.store.run_folder import PICTURES, clear
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.tools.cli import app
from fleetune.tools.compare.runs import PlannedRun, execute
from fleetune.tools.simulator.show import show_run

SMALL = {
    "run": {"name": "sim", "rounds": 1},
    "data": {"partition": {"kind": "iid", "samples": 20}},
    "fleet": {"devices": 2, "boards": {}},
}
MINE = {
    "notes.txt": b"mine",
    "models/mine.safetensors": b"mine",
    "photos/cat.png": b"mine",
    "cat.png": b"mine",
}


def add_mine(folder):
    for name, content in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files(folder):
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sim"
    show_run(settings(**SMALL), folder, workers=0, fresh=True)
    return folder


@pytest.fixture
def finished(played, tmp_path):
    """A folder with a finished run, its report, and what an embedded broker and devices leave."""
    folder = tmp_path / "sim"
    folder.mkdir()
    for name, content in files(played).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in ("broker/mosquitto.log", "incoming/pi/0.part", "summary.json.new"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"ours")
    return folder


def test_all_that_a_run_left_goes(finished):
    assert "report.html" in files(finished)
    assert {"models/shared.safetensors", "bytes-by-round.png"} <= set(files(finished))
    clear(finished)
    assert list(finished.iterdir()) == []


def test_every_picture_is_known():
    assert set(PICTURES) == set(plots._PLOTS)


def test_files_of_others_stay(finished):
    add_mine(finished)
    model = {"input_shape": [1, 8, 8], "num_classes": 10}
    open_run(settings(**SMALL, model=model), finished, fresh=True).store.close()
    left = files(finished)
    assert {name: left[name] for name in MINE} == MINE
    assert {name for name in left if not name.startswith("state.sqlite")} - {"lock"} == set(MINE)


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path):
    add_mine(tmp_path)
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "letter").write_bytes(b"mine")
    before = files(tmp_path)
    clear(tmp_path)
    assert files(tmp_path) == before


def test_a_database_of_another_program_stays_and_is_named(tmp_path):
    add_mine(tmp_path)
    with sqlite3.connect(tmp_path / "state.sqlite") as other:
        other.execute("CREATE TABLE recipe (name TEXT)")
    other.close()
    before = files(tmp_path)
    with pytest.raises(StoreError, match=r"state.sqlite is not the state of a run \(it has tables recipe\)"):
        clear(tmp_path)
    assert files(tmp_path) == before
    (tmp_path / "state.sqlite").write_bytes(b"a novel, not a database" * 100)
    with pytest.raises(StoreError, match="not the state of a run"):
        clear(tmp_path)


def test_a_run_that_a_coordinator_has_open_is_not_replaced(finished):
    before = set(files(finished))
    store = RunStore.open(finished / "state.sqlite")
    with pytest.raises(StoreError, match="another coordinator runs") as caught:
        clear(finished)
    assert "\n" not in str(caught.value)
    assert before <= set(files(finished))
    store.close()
    clear(finished)
    assert files(finished) == {}


def test_a_first_start_that_was_killed_can_be_replaced(tmp_path):
    (tmp_path / "state.sqlite").touch()
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", range(0, 12, 3))
def test_a_removal_that_was_cut_short_goes_on(finished, at):
    power = ForgetfulDisk(finished)
    power.cut_at = at
    with power.in_place(), pytest.raises(PowerCut):
        clear(finished)
    clear(finished)
    assert list(finished.iterdir()) == []


def test_a_cell_of_a_comparison_keeps_files_of_others_too(tmp_path):
    add_mine(tmp_path / "seed-0")
    execute(
        PlannedRun("fedspu", settings(**SMALL), tmp_path / "seed-0", tmp_path),
        workers=0,
        on_closed=lambda _: None,
    )
    left = files(tmp_path / "seed-0")
    assert set(left) == {*MINE, "run.json", "summary.json", "rounds.jsonl"}


def test_the_command_says_it_in_one_line(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "r"\n[model]\nname = "mlp"\n[method]\nname = "fedavg"\n[data]\nsource = "digits"\n'
    )
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "state.sqlite").write_bytes(b"a novel, not a database" * 100)
    command = [
        "run",
        str(tmp_path / "run.toml"),
        "--runs",
        str(tmp_path / "runs"),
        "--fresh",
        "--workers",
        "0",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    (line,) = [line for line in done.output.splitlines() if "state.sqlite" in line]
    assert "delete it yourself" in line
