"""A run ends as if nothing had happened, though the power fails and processes are killed.

A few here; many by `python -m tests.power_cuts` and `python -m tests.kills`, see there.
"""

import pytest
from tests import kills, power_cuts
from tests.helpers.fleet_processes import assert_equal
from tests.helpers.power import ForgetfulDisk

CUTS = 5


@pytest.mark.parametrize(("method", "seed"), [("fedavg", 1), ("fedspu", 2), ("kapc", 3), ("ditto", 4)])
def test_power_cuts_change_nothing(tmp_path, method, seed):
    wanted = power_cuts.undisturbed(tmp_path / "undisturbed", method)
    found, count = power_cuts.cut(tmp_path / "cut", method, seed, CUTS)
    assert count >= CUTS - 1  # the last may be due only after the end
    assert found == wanted


def test_without_syncing_folders_they_do(tmp_path, monkeypatch):
    monkeypatch.setattr(ForgetfulDisk, "sync_folder", lambda *_: None)
    with pytest.raises(AssertionError, match="an acknowledged round is lost"):
        play_often(tmp_path)


def play_often(folder):
    for seed in range(20):
        power_cuts.cut(folder / str(seed), "fedavg", seed, CUTS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return kills.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.nightly
@pytest.mark.fleet
@pytest.mark.parametrize(
    ("victims", "most"), [(["coordinator", "device-0", "device-1", "device-2"], 6), (["broker"], 5)]
)
def test_kills_change_nothing(tmp_path, calm, victims, most):
    found, counts = kills.struck(tmp_path, seed=1, most=most, mean_s=0.5, victims=victims)
    assert counts.total() >= 2
    assert_equal(found, calm)


@pytest.mark.fleet
@pytest.mark.nightly
def test_200_kills_of_agents_coordinator_and_broker_change_nothing(tmp_path):
    *_, last = kills.play(tmp_path, count=200, seed=0)
    assert ", 0 of them not equal" in last
    assert "broker" in last
