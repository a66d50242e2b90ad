"""A run with [adoption] on a real fleet: to the last bit its simulation, also when an agent is killed."""

import msgspec
import pytest
from tests.helpers.fleet_processes import Fleet, assert_equal, read_outcome, run_toml

from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.runner import simulate, write_results

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

ADOPTION = """
[adoption]
enabled = true
confidence = 0.8
"""
CANARIES = """compare_alone = 0
canary = 0.4
watch = 1
held_out = 0.4
"""


def test_what_devices_adopt_is_what_they_adopt_in_the_simulation(tmp_path, tmp_path_factory):
    toml = run_toml(method="fedavg", rounds=4, quorum=3) + ADOPTION
    folder = tmp_path_factory.mktemp("simulated") / "run"
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("round 2/4")
        victim = next(iter(fleet.shares))
        fleet.agents[victim].kill()
        fleet.start_agent(victim)
        fleet.wait_finished()
        found, models, summary = fleet.outcome(), fleet.served_models(), fleet.summary()
        run, _ = leave_simulated(fleet, folder)
    devices = run.folder / "devices"
    wanted = read_outcome(run.folder, lambda device, _: devices / f"{device}.state")
    assert_equal(found, wanted)
    for device, model in models.items():
        theirs = read_deployed(starting_models.deployed_file(devices, device).read())
        assert model.weights.tobytes() == theirs.weights.tobytes()
        assert model.record.origin[1:] == theirs.record.origin[1:]  # but for the run's id
    assert summary["adoption"]["devices"] == 3


@pytest.mark.nightly
def test_a_roll_out_goes_on_when_its_coordinator_is_killed_and_is_that_of_the_simulation(
    tmp_path, tmp_path_factory
):
    toml = run_toml(method="fedavg", rounds=4, quorum=3) + ADOPTION + CANARIES
    folder = tmp_path_factory.mktemp("simulated") / "run"
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("round 2/4")
        fleet.coordinator.kill()
        fleet.start_coordinator()
        fleet.coordinator.wait_for("goes out to all")
        fleet.wait_finished()
        found, models, summary = fleet.outcome(), fleet.served_models(), fleet.summary()
        run, theirs = leave_simulated(fleet, folder)
    devices = run.folder / "devices"
    assert_equal(found, read_outcome(run.folder, lambda device, _: devices / f"{device}.state"))
    for device, model in models.items():
        assert (
            model.weights.tobytes()
            == read_deployed(starting_models.deployed_file(devices, device).read()).weights.tobytes()
        )
    assert summary["rollout"] == msgspec.to_builtins(theirs.rollout)
    assert summary["rollout"]["went_out"] > 0


def leave_simulated(fleet, folder):
    run, summary = simulate(read_run(fleet.run_file), folder, workers=0, fresh=True)
    write_results(run, summary)
    return run, summary
