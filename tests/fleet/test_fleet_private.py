"""A real fleet with [privacy]: killed in a round, resumed, and ended by its budget."""

import pytest
from tests.helpers.fleet_processes import Fleet, run_toml

from fleetune.coordinator.extensions.privacy.accountant import epsilon_of
from fleetune.coordinator.queries import queries
from fleetune.protocols.settings.run_toml import read_run

pytestmark = pytest.mark.fleet

PRIVACY = """
[privacy]
clip = 0.5
noise_multiplier = 4.0
delta = 1e-3
max_epsilon = 2.0
noise = "local"
"""


def test_a_fleet_that_is_killed_spends_its_budget_once_and_ends_before_it_is_exceeded(tmp_path):
    with Fleet(tmp_path, run_toml(devices=2, start_with=2, rounds=50, method="fedavg") + PRIVACY) as fleet:
        coordinator = fleet.start_coordinator()
        agents = [fleet.start_agent(device) for device in fleet.shares]
        agents[0].wait_for("privacy: steps are clipped to 0.5; noise of 4 times that is added on this device")
        agents[0].wait_for("round 1: training")
        coordinator.kill()
        fleet.start_coordinator()
        fleet.wait_finished()
        section = read_run(fleet.run_file).privacy
        spent = fleet.summary()["privacy"]
        assert spent["tasks"] == spent["most_tasks"]
        assert spent["epsilon"] == epsilon_of(section, spent["tasks"]) <= 2.0
        assert epsilon_of(section, spent["tasks"] + 1) > 2.0
        assert fleet.summary()["ended"] == "a further round would exceed privacy.max_epsilon = 2"
        assert fleet.summary()["rounds"] <= spent["tasks"]
        assert queries.status(tmp_path / "runs" / "fleet").privacy.epsilon == spent["epsilon"]
