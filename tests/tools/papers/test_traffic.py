"""What the papers say travels: counted without training as in a simulation; many cells in one command."""

import dataclasses
import re

import numpy as np
import pytest
from msgspec.structs import replace
from tests.conftest import tiny_spec
from tests.tools.papers.test_paper import play, quiet
from typer.testing import CliRunner

import fleetune.tools.papers.paper
from fleetune.coordinator.reports.report import summary_of
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods.fedspu import FedSPU
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update.paper_bytes import paper_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything
from fleetune.tools.cli import app
from fleetune.tools.compare.engine import Execution
from fleetune.tools.papers.measures import number
from fleetune.tools.papers.paper import run_cells
from fleetune.tools.papers.traffic import Traffic, count_traffic, participants
from fleetune.tools.simulator.runner import simulate


def tiny(method="fedspu", **sections):
    return parse_run(
        {
            "run": {"name": "tiny", "rounds": 3},
            "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
            "method": {"name": method},
            "training": {"batch_size": 10},
            "round": {"participants": 3},
            "fleet": {"devices": 5, "ratios": [0.5, 1.0]},
            "data": {"source": "digits", "partition": {"samples": 40}},
            **sections,
        }
    )


def test_bytes_are_counted_at_full_width():
    spec = tiny_spec()
    weights = np.zeros(spec.size, np.float32)
    bitmap = np.arange(spec.num_parameters) < 5
    assert paper_bytes(Patch.of(weights, Everything(), spec)) == 4 * spec.num_parameters
    assert paper_bytes(Patch.of(weights, Entries(bitmap), spec)) == 20 + spec.num_parameters / 8
    assert paper_bytes({"a": [weights], "b": ("text", 1.0)}) == 4 * spec.size


def test_traffic_counted_without_training_is_that_of_a_simulated_run(tmp_path, monkeypatch):
    settings, sent = tiny(), {"up": 0.0, "down": 0.0}
    work = FedSPU.work

    def watched(self, state, task, trainer, budget, key):
        state, update = work(self, state, task, trainer, budget, key)
        sent["down"] += paper_bytes(task)
        sent["up"] += paper_bytes(update)
        return state, update

    counted = count_traffic(settings)
    monkeypatch.setattr(FedSPU, "work", watched)
    settings = replace(settings, run=replace(settings.run, final_evaluation=False))
    run, _ = simulate(settings, tmp_path / "tiny", workers=0, fresh=True)
    asked = [record.participants for record in run.controller.records()]
    summary = summary_of(run, simulated=True)
    run.store.close()
    assert (summary.bytes.up_paper, summary.bytes.down_paper) == (sent["up"], sent["down"])
    assert asked == [
        participants(tuple(f"device-{i}" for i in range(5)), settings, number) for number in (1, 2, 3)
    ]
    assert counted.total == sent["up"] + sent["down"]
    assert counted.up == sent["up"] / 9


@pytest.mark.parametrize(
    ("name", "value"),
    [("fedpurin-fmnist-fedavg-up", "4.69"), ("fedpurin-cifar10-fedavg-up", "4.71")],
)
def test_table_3_of_fedpurin_to_the_digit(name, value, tmp_path):
    outcome, said = play(name, tmp_path, None, "run.rounds=1", "fleet.devices=1")
    assert number(outcome.ours.mean, None, "MB") == number(outcome.paper.value, None, "MB") == value
    assert f"{value} │ {value}" in said
    outcome = replace_label(outcome)
    assert outcome.verdict == "the paper's number, to the last digit that it prints"


def replace_label(outcome):
    """As if nothing had been shortened: here it is so that the test is quick."""
    return dataclasses.replace(outcome, label=dataclasses.replace(outcome.label, scaled=()))


# many cells


def test_many_cells_are_played_and_those_without_data_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEETUNE_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(fleetune.tools.papers.paper, "count_traffic", lambda _: Traffic(4.69 * 2**20, 1, 1))
    console = quiet()
    pattern = "fedpurin-fmnist-*-up"
    execution = Execution(tmp_path / "paper", 0, fresh=False, console=console)
    run_cells(pattern, execution, seeds=2)
    table = console.file.getvalue()
    assert (
        len(re.findall(r"^fedpurin-fmnist-\S+-up +[\d.]+ MB +4\.69 ± 0\.00 MB +full", table, re.MULTILINE))
        == 2
    )
    run_cells("kapc-mnist*", execution, seeds=1)
    assert console.file.getvalue().count("skipped: idx:mnist") == 5
    with pytest.raises(SettingError, match=r"no cell matches 'kpac\*'; known: dc-pfl-fmnist, "):
        run_cells("kpac*", execution, seeds=1)


def test_many_cells_take_no_changes():
    wrong = CliRunner().invoke(app, ["paper", "all", "--set", "run.rounds=1"])
    assert (wrong.exit_code, "go with one cell" in wrong.output) == (2, True)
