"""Two real agents that were started with one name: the first goes on, the second is told and waits."""

import pytest
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until
from tests.protocols.wire.test_transport import KINDS

from fleetune.coordinator.queries import queries

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

DEVICE = "device-0"


@pytest.mark.parametrize("which", KINDS)
def test_the_first_goes_on_and_the_second_is_told(tmp_path, which):
    toml = run_toml(devices=1, start_with=1, rounds=100_000, method="fedavg")
    with Fleet(tmp_path, toml, which) as fleet:
        coordinator = fleet.start_coordinator()
        first = fleet.start_agent(DEVICE)
        first.wait_for("update delivered")
        second = fleet.start_agent(DEVICE, options=("--state", str(tmp_path / "more")), log="second")
        second.wait_for(f"another device uses the id {DEVICE}: this agent tries again in 10 s;.*--device")
        coordinator.wait_for(f"two devices use the id {DEVICE}", count=1)
        delivered = len(second.lines("update delivered"))
        first.wait_for("update delivered", count=len(first.lines("update delivered")) + 3)
        wait_until(
            lambda: any(DEVICE in one for one in queries.status(tmp_path / "runs" / "fleet").troubles),
            "status names the device",
        )
        second.wait_for(f"another device uses the id {DEVICE}: this agent tries again in 20 s")
        first.wait_for("update delivered", count=len(first.lines("update delivered")) + 3)
        assert len(second.lines("update delivered")) == delivered
        assert len(coordinator.lines("two devices use the id")) == 1


def test_a_broker_that_stops_and_starts_is_not_taken_for_a_second_device(tmp_path):
    with Fleet(tmp_path, run_toml(devices=1, start_with=1, rounds=100_000, method="fedavg")) as fleet:
        fleet.start_coordinator()
        agent = fleet.start_agent(DEVICE)
        for count in range(1, 4):
            agent.wait_for("connected; fleet", count=count)
            fleet.broker.kill()
            agent.wait_for("not connected: ", count=count)
            fleet.restart_broker()
        agent.wait_for("connected; fleet", count=4)
        assert "another" not in agent.text()
