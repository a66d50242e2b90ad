"""The simulator beside others: plays are looked at from outside, and become tables."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.nightly import sooner
from typer.testing import CliRunner

from fleetune.protocols.errors import DataError
from fleetune.tools.bench.simulator.environments import Player, players, python_of
from fleetune.tools.bench.simulator.play import Played, PlayFailed, keep, play, recalled
from fleetune.tools.bench.simulator.report import rows, write_results
from fleetune.tools.bench.simulator.workloads import WORKLOADS, Workload, lay_out
from fleetune.tools.cli import app

SMALL = Workload("small", "mlp", devices=6, samples=60, participants=3, rounds=40, epochs=3)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    lay_out(SMALL, "digits", folder)
    return folder


@pytest.mark.parametrize("name", sooner(["fleetune-1", "bare"], kept=["fleetune-1"]))
def test_a_simulator_plays_a_workload_and_is_looked_at(name: str, workload: Path, tmp_path: Path) -> None:
    player = players(2)[name]
    played = play(player, python_of(player, tmp_path), workload, 0)
    assert (played.player, played.workload) == (name, "small")
    assert len(played.ended_s) == SMALL.rounds
    assert sorted(played.ended_s) == played.ended_s
    assert 0 < played.round_s < played.first_s  # nothing starts as fast as it goes on
    assert played.memory_bytes > 50e6
    assert played.accuracy > 0.3, "it has learned something"  # one class of ten is 0.1


def test_one_that_fails_says_why(workload: Path, tmp_path: Path) -> None:
    player = Player("nobody", "play_nobody.py")
    with pytest.raises(PlayFailed, match=r"play_nobody\.py"):
        play(player, python_of(player, tmp_path), workload, 0)


def test_a_card_that_is_not_here_is_one_line_and_nothing_is_made(tmp_path: Path) -> None:
    command = ["bench", "simulator", "--device", "gpu", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, command)
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert "device gpu: torch here has no such device" in found.output
    assert not (tmp_path / "out").exists()


def test_cards_have_players_of_their_own() -> None:
    there = players(16, "cuda:0")
    assert "flwr" not in there
    assert "fleetune-at-once" in there
    assert there["fleetune"].processes == 4
    assert players(2).keys() & there.keys() >= {"fleetune", "fleetune-1", "bare", "pfl"}


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes more than 7000"):
        lay_out(replace(SMALL, devices=100), "digits", tmp_path)


def test_windows_of_sensors_are_dealt_as_they_are_and_images_get_their_channel(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    windows = draws.standard_normal((80, 9, 128)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=windows, y=np.arange(80) % 6)
    sensors = replace(WORKLOADS["har-cnn"], devices=4, samples=5)
    lay_out(sensors, f"npz:{tmp_path / 'own.npz'}", tmp_path / "sensors")
    with np.load(tmp_path / "sensors" / "samples.npz") as dealt:
        assert dealt["x"].shape == (60, 9, 128)
        assert {one.tobytes() for one in dealt["x"]} < {one.tobytes() for one in windows}
    lay_out(replace(SMALL, samples=5), "digits", tmp_path / "images")
    with np.load(tmp_path / "images" / "samples.npz") as dealt:
        assert dealt["x"].shape[1:] == (1, 8, 8)


def _played(player: str, seconds: float, repeat: int = 0) -> Played:
    ended = [5.0 + seconds * number for number in range(1, 5)]
    return Played(player, "small", repeat, ended, [2 * one for one in ended], 10**9, 0.8)


def test_plays_become_medians_and_ratios_to_ours(tmp_path: Path) -> None:
    plays = [
        _played("pfl", 2.0),
        _played("fleetune", 1.0),
        _played("fleetune", 3.0, 1),
        _played("fleetune", 1.0, 2),
    ]
    table = rows(plays)
    assert [(row["simulator"], row["plays"], row["round_s"], row["times"]) for row in table] == [
        ("fleetune", 3, 1.0, 1.0),
        ("pfl", 1, 2.0, 2.0),
    ]
    text = write_results({"small": plays}, {"flwr": "no matching distribution"}, "a machine", tmp_path)
    assert "| pfl | 1 | 2.00 | 2.00 | 4.00 | 7.0 | 1,000 | 80.0 |" in text
    assert "flwr is missing: no matching distribution" in text
    assert json.loads((tmp_path / "results.json").read_bytes())["machine"] == "a machine"
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_a_play_is_kept(tmp_path: Path) -> None:
    assert recalled(tmp_path / "one.json") is None
    keep(_played("bare", 1.0), tmp_path / "one.json")
    assert recalled(tmp_path / "one.json") == _played("bare", 1.0)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--workloads", "cnm"], "known: cnn"),
        (["--only", "tff"], "known: fleetune, fleet"),
        (["--data", "idx:nowhere"], "nowhere"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(wrong: list[str], line: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "simulator", "--out", str(tmp_path / "out"), *wrong])
    assert done.exit_code == 2
    assert line in done.output
    assert not (tmp_path / "out").exists()
