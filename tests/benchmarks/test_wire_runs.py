"""The wire benchmark: bytes and accuracy of a run, targets, tables, and resuming."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.wire import all_runs
from benchmarks.wire.all_runs import Wanted, run_all
from benchmarks.wire.fleet import Fleet, Setting
from benchmarks.wire.report import markdown, rows
from benchmarks.wire.run import Configuration, Run, run_to_end
from rich.console import Console

from fleetune.protocols.errors import SettingError

DIGITS = Setting("digits", '{ kind = "iid", samples = 200 }', "mlp", 3, 2, 2, 0.3)


def run(configuration, seed, bytes_up, accuracy):
    return Run("har", configuration, seed, bytes_up, accuracy, 100, 1.0)


DENSE = run("dense", 0, [1000.0, 2000.0, 3000.0], [0.7, 0.8, 0.9])  # the mean of the last rounds: 0.8
THIN = run("thin", 0, [10.0, 20.0, 30.0], [0.7, 0.75, 0.79])


def test_a_small_fleet_learns_and_every_byte_counts():
    fleet = Fleet(DIGITS, 0)
    dense = run_to_end(fleet, "digits", Configuration("dense"))
    size = 4 * fleet.spec.size
    assert dense.bytes_up == [2 * size, 4 * size]
    assert dense.bytes_down == 2 * size
    assert dense.accuracy[-1] > fleet.accuracy(fleet.first_weights)
    again = run_to_end(Fleet(DIGITS, 0), "digits", Configuration("dense"))
    assert again.accuracy == dense.accuracy
    for configuration, times in (("sparse-50", 50), ("lowrank-4", 100)):
        thin = run_to_end(fleet, "digits", Configuration(configuration))
        assert thin.bytes_up[-1] < dense.bytes_up[-1] / times


def test_dense_federated_averaging_is_the_products():
    fleet = Fleet(DIGITS, 1)
    drawn = fleet.participants(1)
    samples = np.array([fleet.num_samples(device) for device in drawn])
    trained = [fleet.trained(fleet.first_weights, device, 1) for device in drawn]
    mean = np.average(trained, axis=0, weights=samples)
    accuracy = run_to_end(fleet, "digits", Configuration("dense")).accuracy[0]
    assert accuracy == pytest.approx(fleet.accuracy(mean.astype(np.float32)), abs=1e-6)


def test_inputs_are_scaled_as_the_setting_says():
    rows = np.arange(5)
    plain, scaled = (
        Fleet(setting, 0).trainers[0].data.batch("train", rows)[0]
        for setting in (DIGITS, replace(DIGITS, mean=-10.0, std=5.0))
    )
    np.testing.assert_allclose(scaled, (plain + 10) / 5, rtol=1e-5)


def test_bytes_are_those_of_the_first_round_that_is_good_enough():
    assert THIN.bytes_to(0.72) == 20
    assert THIN.bytes_to(0.8) is None
    assert THIN.final == pytest.approx((0.7 + 0.75 + 0.79) / 3)


def test_a_row_holds_against_dense_of_the_same_seed():
    dense, thin = rows([DENSE, THIN, run("thin", 1, [1.0], [0.9])])
    assert dense["up"] == [2000, 2000, 2000]  # to 0.72, 0.76, 0.792
    assert dense["both"] == 2000 + 2 * 100
    assert thin["seeds"] == 1  # the other has no dense run
    assert thin["up"] == [20, 30, None]
    assert thin["reached"] == [1, 1, 0]
    assert "| thin | 1 | 0 (100x) | 0 (67x) | \u2013 |" in markdown("har", [dense, thin])


def test_a_mean_needs_every_seed():
    slow = run("thin", 1, [10.0, 20.0], [0.1, 0.2])
    other = run("dense", 1, [1000.0, 2000.0], [0.8, 0.8])
    dense, thin = rows([DENSE, other, THIN, slow])
    assert thin["up"] == [None, None, None]
    assert thin["reached"] == [1, 1, 0]
    assert "\u2013 (1 of 2)" in markdown("har", [dense, thin])


@pytest.fixture
def recorded(monkeypatch):
    """Labels of what was truly run."""
    labels = []

    def fake(fleet, name, configuration):
        labels.append(f"{configuration.label} {fleet}")
        return run(configuration.label, fleet, [1.0, 2.0], [0.5, 0.6])

    monkeypatch.setattr(all_runs, "Fleet", lambda _, seed: seed)
    monkeypatch.setattr(all_runs, "run_to_end", fake)
    return labels


def wanted(out, **changes):
    words = {"settings": "har", "seeds": 2, "only": "stc-50", "rate": 1.0, "momentum": 0.0}
    return Wanted(out=out, **{**words, "rounds": None, "data": None, "steps": False, **changes})


def test_the_same_command_goes_on_and_tables_are_of_all_runs(tmp_path, recorded):
    run_all(wanted(tmp_path, seeds=1), Console(quiet=True))
    run_all(wanted(tmp_path), Console(quiet=True))
    assert recorded == ["dense 0", "stc-50 0", "dense 1", "stc-50 1"]
    run_all(wanted(tmp_path, rate=0.5), Console(quiet=True))
    assert recorded[4:] == ["stc-50 rate 0.5 0", "stc-50 rate 0.5 1"]
    table = json.loads((tmp_path / "results.json").read_text())["har"]
    assert {row["configuration"]: row["seeds"] for row in table} == {
        "dense": 2,
        "stc-50": 2,
        "stc-50 rate 0.5": 2,
    }
    assert (tmp_path / "har.png").stat().st_size > 1000
    run_all(wanted(tmp_path, rounds=3, seeds=1), Console(quiet=True))
    assert recorded[6:] == ["dense 0", "stc-50 0"]  # runs of another length are others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": "harr"}, "--settings: unknown 'harr'"),
        ({"only": "stc-51"}, "--only: unknown 'stc-51'"),
        ({"settings": "har,fashion-iid", "data": "digits"}, "--data goes with one"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, changes, message):
    with pytest.raises(SettingError, match=message):
        run_all(wanted(tmp_path, **changes), Console(quiet=True))


def test_a_damped_coordinator_is_for_those_that_average(tmp_path, recorded):
    run_all(wanted(tmp_path, seeds=1, only="stc-50,fedpm", rate=0.5, momentum=0.5), Console(quiet=True))
    assert recorded == ["dense 0", "stc-50 rate 0.5 momentum 0.5 0", "fedpm 0"]
