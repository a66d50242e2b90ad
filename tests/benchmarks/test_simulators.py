"""The benchmark of simulators: workloads, measured runs, tables, and errors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.simulators.__main__ import app
from benchmarks.simulators.configurations import Configuration, configurations, python_of
from benchmarks.simulators.report import rows, write_results
from benchmarks.simulators.runs import Run, RunFailed, run, save, saved
from benchmarks.simulators.workloads import WORKLOADS, Workload, lay_out
from tests.helpers.nightly import sooner
from typer.testing import CliRunner

from fleetune.protocols.errors import DataError

SMALL = Workload("small", "mlp", devices=6, samples=60, participants=3, rounds=40, epochs=3)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    lay_out(SMALL, "digits", folder)
    return folder


@pytest.mark.parametrize("name", sooner(["fleetune-1", "bare"], kept=["fleetune-1"]))
def test_a_simulator_runs_a_workload_and_is_measured(name: str, workload: Path, tmp_path: Path) -> None:
    configuration = configurations(2)[name]
    found = run(configuration, python_of(configuration, tmp_path), workload, 0)
    assert (found.configuration, found.workload) == (name, "small")
    assert len(found.ended_s) == SMALL.rounds
    assert sorted(found.ended_s) == found.ended_s
    assert 0 < found.round_s < found.first_s  # nothing starts as fast as it goes on
    assert found.memory_bytes > 50e6
    assert found.accuracy > 0.3, "it has learned something"  # one class of ten is 0.1


def test_a_failed_script_reports_its_error(workload: Path, tmp_path: Path) -> None:
    configuration = Configuration("nobody", "run_nobody.py")
    with pytest.raises(RunFailed, match=r"run_nobody\.py"):
        run(configuration, python_of(configuration, tmp_path), workload, 0)


def test_a_card_that_is_not_here_is_one_line_and_nothing_is_made(tmp_path: Path) -> None:
    command = ["--device", "gpu", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, command)
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert "device gpu is unknown to torch" in found.output
    assert not (tmp_path / "out").exists()


def test_cards_have_their_own_configurations() -> None:
    there = configurations(16, "cuda:0")
    assert "flwr" not in there
    assert "fleetune-bfloat16" in there
    assert there["fleetune"].processes == 4
    assert configurations(2).keys() & there.keys() >= {"fleetune", "fleetune-1", "bare", "pfl"}


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes more than 7000"):
        lay_out(replace(SMALL, devices=100), "digits", tmp_path)


def test_sensor_windows_stay_unchanged_and_images_get_a_channel(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    windows = draws.standard_normal((80, 9, 128)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=windows, y=np.arange(80) % 6)
    sensors = replace(WORKLOADS["har-cnn"], devices=4, samples=5)
    lay_out(sensors, f"npz:{tmp_path / 'own.npz'}", tmp_path / "sensors")
    with np.load(tmp_path / "sensors" / "samples.npz") as assigned:
        assert assigned["x"].shape == (60, 9, 128)
        assert {one.tobytes() for one in assigned["x"]} < {one.tobytes() for one in windows}
    lay_out(replace(SMALL, samples=5), "digits", tmp_path / "images")
    with np.load(tmp_path / "images" / "samples.npz") as assigned:
        assert assigned["x"].shape[1:] == (1, 8, 8)


def _run(configuration: str, seconds: float, repeat: int = 0) -> Run:
    ended = [5.0 + seconds * number for number in range(1, 5)]
    return Run(configuration, "small", repeat, ended, [2 * one for one in ended], 10**9, 0.8)


def test_runs_become_medians_and_ratios_to_ours(tmp_path: Path) -> None:
    runs = [
        _run("pfl", 2.0),
        _run("fleetune", 1.0),
        _run("fleetune", 3.0, 1),
        _run("fleetune", 1.0, 2),
    ]
    table = rows(runs)
    assert [(row["simulator"], row["runs"], row["round_s"], row["times"]) for row in table] == [
        ("fleetune", 3, 1.0, 1.0),
        ("pfl", 1, 2.0, 2.0),
    ]
    text = write_results({"small": runs}, {"flwr": "no matching distribution"}, "a machine", tmp_path)
    assert "| pfl | 1 | 2.00 | 2.00 | 4.00 | 7.0 | 1,000 | 80.0 |" in text
    assert "flwr is missing: no matching distribution" in text
    assert json.loads((tmp_path / "results.json").read_bytes())["machine"] == "a machine"
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_a_run_is_saved(tmp_path: Path) -> None:
    assert saved(tmp_path / "one.json") is None
    save(_run("bare", 1.0), tmp_path / "one.json")
    assert saved(tmp_path / "one.json") == _run("bare", 1.0)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--workloads", "cnm"], "known: cnn"),
        (["--only", "tff"], "known: fleetune, fleet"),
        (["--data", "idx:nowhere"], "nowhere"),
    ],
)
def test_an_unknown_option_value_is_one_line(wrong: list[str], line: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "out"), *wrong])
    assert done.exit_code == 2
    assert line in done.output
    assert not (tmp_path / "out").exists()
