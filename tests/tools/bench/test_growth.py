"""`edge-sim bench growth`: plays of larger and larger fleets and models, and the power they grow with."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.update.covered_mean import CoveredMean
from fleetune.tools.bench.growth import courses, summing
from fleetune.tools.bench.growth.courses import COURSES, Course, Play, exponent, keep, play
from fleetune.tools.bench.growth.report import markdown
from fleetune.tools.bench.growth.summing import summed
from fleetune.tools.cli import app


def test_a_fleet_is_played_and_looked_at():
    found = play(Course("devices", (12,)), 12, 0)
    assert (found.course, found.value) == ("devices", 12)
    assert 0 < found.round_s < found.first_s
    assert found.round_processor_s > 0
    assert found.memory_bytes > 50e6


def test_one_that_cannot_be_played_says_why():
    with pytest.raises(FleetuneError, match=r"devices 0: .*fleet\.devices"):
        play(COURSES["devices"], 0, 0)


def test_a_network_of_each_size_has_about_as_many_parameters():
    from fleetune.tools.bench.growth import networks

    for power in (4, 5, 6):
        module = getattr(networks, f"p{power}")((1, 8, 8), 10)
        assert sum(one.numel() for one in module.parameters()) == pytest.approx(10**power, rel=0.01)
        assert COURSES["parameters"].settings(10**power)["model.name"].endswith(f":p{power}")


def a_play(value, seconds):
    return Play("devices", value, seconds, 2 * seconds, 10 * seconds, 10**8)


def test_the_power_is_that_of_a_straight_line_through_the_logarithms():
    assert exponent([a_play(10, 0.1), a_play(1000, 10.0)]) == pytest.approx(1)
    assert exponent([a_play(10, 0.1)]) is None
    assert "grows with its power of 0.50" in markdown("devices", [a_play(10, 0.1), a_play(1000, 1.0)])


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_as_many_entries_as_were_asked_for_are_summed(density, monkeypatch):
    added, whole = [], CoveredMean.add

    def add(mean, patch, weight):
        whole(mean, patch, weight)
        added.append(patch.values.size)
        assert np.count_nonzero(mean.weights) == patch.values.size

    monkeypatch.setattr(CoveredMean, "add", add)
    found = summed(50_000, density)
    assert (found.parameters, found.density) == (50_000, density)
    assert added == [pytest.approx(density * 50_000, rel=0.02)] * summing.TURNS


def test_what_was_played_is_not_played_again(tmp_path, monkeypatch):
    for value, seconds in ((100, 0.1), (1000, 0.2)):
        keep(a_play(value, seconds), tmp_path / "plays" / f"devices-{value}.json")
    monkeypatch.setattr(courses, "play", None)
    words = ["bench", "growth", "--out", str(tmp_path), "--only", "devices,summing", "--most", "1000"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["value"] for one in found["plays"]["devices"]] == [100, 1000]
    assert found["exponents"]["devices"] == pytest.approx(0.30103)
    assert "| 1,000 | 0.200 | 0.400 | 2.0 | 100 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_what_there_is_not_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["bench", "growth", "--out", str(tmp_path / "x"), "--only", "speed"])
    assert done.exit_code == 2
    known = "devices, participants, parameters, summing"
    assert done.stderr == f"edge-sim: --only speed: there is none; known: {known}\n"
    assert not (tmp_path / "x").exists()
