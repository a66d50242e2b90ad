"""edge-sim table: every cell of a table can be read, has the paper's number, and is played once."""

import json

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from fleetune.coordinator.metrics.readable import UNKNOWN
from fleetune.protocols.errors import DataError, SettingError
from fleetune.tools.cli import app
from fleetune.tools.compare.comparison import Spread
from fleetune.tools.papers import paper_tables
from fleetune.tools.papers.cells import cell_names, read_cell
from fleetune.tools.papers.measures import MEASURES, CellResult, Label
from fleetune.tools.papers.table_files import cells_of_table, read_table, table_names


@pytest.mark.parametrize("name", table_names())
def test_every_cell_of_a_table_is_one_and_has_the_paper_s_number(name):
    table = read_table(name)
    cells = cells_of_table(name, table)
    assert len(cells) == len(table.methods) * len(table.settings)
    there = [cell for cell in cells if not cell.lacks]
    assert there
    assert len({cell.name for cell in there}) == len(there)
    for cell in there:
        settings, _ = cell.read()
        times = 100 if MEASURES[settings.paper.accuracy].unit == "%" else 1
        value, deviation = cell.printed if isinstance(cell.printed, tuple) else (cell.printed, None)
        assert times * settings.paper.value == pytest.approx(value), cell.name
        if deviation is not None:
            assert times * settings.paper.deviation == pytest.approx(deviation), cell.name
        assert settings.run.name == cell.name


def test_what_is_a_cell_of_tools_papers_is_the_same_run_there():
    known, shared = set(cell_names()), 0
    for name in table_names():
        for cell in cells_of_table(name, read_table(name)):
            if not cell.lacks and cell.name in known:
                found, own = cell.read()[0], read_cell(cell.name)[0]
                assert found == replace(own, paper=replace(own.paper, rows={}))
                shared += 1
    assert shared > 25


def test_a_setting_changes_what_it_says_and_a_method_s_keys_go_with_it():
    cells = {
        cell.name: cell.read()[0] for cell in cells_of_table("kapc-1", read_table("kapc-1")) if not cell.lacks
    }
    moon = cells["kapc-1-fmnist-03-moon"]
    assert moon.method == {"name": "moon"}
    assert moon.data.source == "idx:fashion-mnist"
    assert moon.data.partition.alpha == 0.3
    assert not any(key.startswith("method.") for key in moon.paper.open)
    assert cells["kapc-1-mnist-03-kapc-bls"].method["equal_sharing"] == 0.5


def test_a_name_that_is_none_has_a_hint():
    with pytest.raises(SettingError, match="no table 'kapc-2'; did you mean 'kapc-1'"):
        read_table("kapc-2")


@pytest.fixture
def played(monkeypatch):
    """Cells in the order in which they are played; those of CIFAR-10 lack their data."""
    names = []

    class Measured(CellResult):
        ours = Spread(0.5, 0.01, 3)

    def run_cell_settings(name, cell, asked, command, seeds, execution):
        names.append(name)
        if cell.data.source.startswith("cifar"):
            raise DataError("no such folder: cifar-10-batches-py")
        return Measured(name, cell.paper, Label(("run.rounds=1",), (), ()), [])

    monkeypatch.setattr(paper_tables, "run_cell_settings", run_cell_settings)
    return names


def test_all_that_can_be_is_played_the_cheapest_first_and_the_rest_says_why(tmp_path, played):
    words = ["table", "fedpurin-1", "--runs", str(tmp_path), "--set", "run.rounds=1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    cells = [cell for cell in cells_of_table("fedpurin-1", read_table("fedpurin-1")) if not cell.lacks]
    assert sorted(played) == sorted(cell.name for cell in cells)
    text = (tmp_path / "paper" / "table-fedpurin-1.md").read_text()
    assert "| FedAvg | 97.05 ± 1.21 / 50.00 ± 1.00* |" in text
    assert f"84.15 ± 1.77 / {UNKNOWN}" in text
    assert "21 cells: no such folder: cifar-10-batches-py" in text
    assert "21 cells: CIFAR-100: the paper's larger ResNet" in text
    kept = json.loads((tmp_path / "paper" / "table-fedpurin-1.json").read_text())
    (one,) = [cell for cell in kept["cells"] if cell["cell"] == "fedpurin-fmnist"]
    assert (one["paper"], one["ours"]["mean"], one["why"]) == ([92.15, 0.18], 0.5, None)


def test_show_plays_nothing(tmp_path, played):
    done = CliRunner().invoke(app, ["table", "dc-pfl-2", "--runs", str(tmp_path), "--show"])
    assert done.exit_code == 0, done.output
    assert played == []
    assert "not run yet" in done.output
    assert "dc-pfl-2" in CliRunner().invoke(app, ["table"]).output


def test_a_mistake_is_told_before_anything_is_played(tmp_path, played):
    for words, problem in [
        (["--set", "run.round=1"], "run.round: unknown key"),
        (["--seeds", "0"], "--seeds 0: the number of seeds must be at least 1"),
    ]:
        done = CliRunner().invoke(app, ["table", "dc-pfl-2", "--runs", str(tmp_path), *words])
        assert done.exit_code == 2
        assert problem in done.output
    assert played == []
