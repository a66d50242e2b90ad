"""A device that is forgotten while its run is served by real processes: the run goes on with the others."""

import time

import msgspec
import numpy as np
import pytest
from tests.helpers.fleet_processes import Child, Fleet, run_toml, wait_until

from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.forgetting.receipt import Receipt
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.device_rows import read_engine

TOML = run_toml(rounds=8, epochs=20).replace("[run]", "[run]\nfinal_evaluation = false")


def closed(fleet):
    try:
        with stored_run(fleet.folder / "runs" / fleet.name) as kept:
            state = read_engine(kept.store)
    except Exception:  # noqa: BLE001 - it is only just being made
        return 0
    return 0 if state is None else state.rounds_done


def forgetting(fleet, device, number=0):
    command = ["fleetune.coordinator.cli", "forget", device, "--runs", str(fleet.folder / "runs"), "--json"]
    return Child("forget", command, fleet.folder / f"forget-{number}.log")


def traces(fleet, device):
    """Files of the runs that contain the id, apart from the receipt."""
    files = [path for path in (fleet.folder / "runs").rglob("*") if path.is_file()]
    found = [path for path in files if device.encode() in path.read_bytes()]
    return [path.name for path in found if path.parent.name != "receipts"]


def begun(fleet, rounds):
    """A fleet that has closed some rounds, and the id of a device that has left since."""
    fleet.start(trainer="onnx", options=())
    wait_until(lambda: closed(fleet) >= rounds, f"{rounds} rounds are closed")
    gone = next(iter(fleet.shares))
    fleet.agents[gone].kill()
    return gone


def test_a_device_is_forgotten_while_its_run_goes_on(tmp_path):
    with Fleet(tmp_path, TOML, embedded=True) as fleet:
        gone = begun(fleet, 2)
        child = forgetting(fleet, gone)
        assert child.wait() == 0, child.text()
        receipt = msgspec.json.decode(child.text().splitlines()[-1], type=Receipt)
        assert receipt.removed[fleet.name]["member"] == 1
        assert receipt.removed[fleet.name]["device_round"] >= 2
        assert fleet.coordinator.running
        broker = fleet.embedded_broker()
        assert broker is not None
        assert fleet.coordinator.wait() == 0
        assert traces(fleet, gone) == []
        assert sorted(fleet.summary()["by_device"]) == sorted(set(fleet.shares) - {gone})
        assert closed(fleet) == 8
        assert len(fleet.coordinator.lines("^broker: embedded")) == 1, "the broker stays"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_kills_in_the_middle_leave_no_trace_and_the_run_ends(tmp_path, seed):
    rng = np.random.default_rng(seed)
    with Fleet(tmp_path, TOML, embedded=True) as fleet:
        gone = begun(fleet, 2)
        for number in range(4):
            child = forgetting(fleet, gone, number)
            time.sleep(rng.exponential(1.0))
            victim = rng.choice(["forget", "coordinator"])
            if victim == "forget":
                child.kill()
            else:
                fleet.coordinator.kill()
                fleet.start_coordinator()
                child.kill()
        last = forgetting(fleet, gone, "last")
        assert last.wait() == 0, last.text()
        receipt = msgspec.json.decode(last.text().splitlines()[-1], type=Receipt)
        assert receipt.removed[fleet.name]["member"] == 1
        assert receipt.removed[fleet.name]["device_round"] >= 2
        assert read_control(fleet.folder / "runs" / fleet.name).forget == ()
        code = fleet.coordinator.wait()
        assert code == 0 or fleet.coordinator.lines("finished run"), fleet.coordinator.text()
        assert traces(fleet, gone) == []
        assert closed(fleet) == 8
