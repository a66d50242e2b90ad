"""`round.robust` on a real fleet: to the last bit its simulation, also when the coordinator is killed."""

import pytest
from tests.helpers.fleet_processes import Fleet, assert_equal, expected, run_toml
from tests.helpers.nightly import sooner

pytestmark = pytest.mark.fleet

CASES = [("clip", "fedspu"), ("median", "fedspu"), ("trimmed-mean", "fedavg"), ("krum", "fedavg")]
SPARSE = '[encoding]\nup = { name = "sparse", density = 0.2 }\n'


@pytest.mark.parametrize(("rule", "method"), sooner(CASES, kept=1))
def test_robust_rounds_over_mqtt_are_their_simulation_though_the_coordinator_is_killed(
    tmp_path, tmp_path_factory, rule, method
):
    toml = run_toml(name="robust", method=method, rounds=4, quorum=3, selection=f'robust = "{rule}"') + SPARSE
    toml = toml.replace("[run]", "[run]\nfinal_evaluation = false")
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("round 2/4")
        fleet.coordinator.kill()
        fleet.start_coordinator()
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)
