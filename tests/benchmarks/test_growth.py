"""The growth benchmark: one run, the fitted power, the sum of updates, and resuming."""

import json

import numpy as np
import pytest
from benchmarks.growth import runs, summing
from benchmarks.growth.__main__ import app
from benchmarks.growth.report import markdown
from benchmarks.growth.runs import AXES, Axis, Run, exponent, run, save
from benchmarks.growth.summing import summed
from typer.testing import CliRunner

from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.update.combine import CoveredMean


def test_a_run_is_measured():
    found = run(Axis("devices", (12,)), 12, 0)
    assert (found.axis, found.value) == ("devices", 12)
    assert 0 < found.round_s < found.first_s
    assert found.round_processor_s > 0
    assert found.memory_bytes > 50e6


def test_a_failed_run_reports_its_error():
    with pytest.raises(FleetuneError, match=r"devices 0: .*fleet\.devices"):
        run(AXES["devices"], 0, 0)


def test_a_network_of_each_size_has_about_as_many_parameters():
    from benchmarks.growth import networks

    for power in (4, 5, 6):
        module = getattr(networks, f"p{power}")((1, 8, 8), 10)
        assert sum(one.numel() for one in module.parameters()) == pytest.approx(10**power, rel=0.01)
        assert AXES["parameters"].settings(10**power)["model.name"].endswith(f":p{power}")


def a_run(value, seconds):
    return Run("devices", value, seconds, 2 * seconds, 10 * seconds, 10**8)


def test_the_power_is_that_of_a_straight_line_through_the_logarithms():
    assert exponent([a_run(10, 0.1), a_run(1000, 10.0)]) == pytest.approx(1)
    assert exponent([a_run(10, 0.1)]) is None
    assert "grows with its power of 0.50" in markdown("devices", [a_run(10, 0.1), a_run(1000, 1.0)])


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


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    for value, seconds in ((100, 0.1), (1000, 0.2)):
        save(a_run(value, seconds), tmp_path / "runs" / f"devices-{value}.json")
    monkeypatch.setattr(runs, "run", None)
    words = ["--out", str(tmp_path), "--only", "devices,summing", "--most", "1000"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["value"] for one in found["runs"]["devices"]] == [100, 1000]
    assert found["exponents"]["devices"] == pytest.approx(0.30103)
    assert "| 1,000 | 0.200 | 0.400 | 2.0 | 100 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_axis_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "x"), "--only", "speed"])
    assert done.exit_code == 2
    known = "devices, participants, parameters, summing"
    assert done.stderr == f"benchmarks.growth: --only speed: unknown; known: {known}\n"
    assert not (tmp_path / "x").exists()
