"""A device that is forgotten while its run is served by real processes: the run goes on with the others."""

import time
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from tests.helpers.fleet_processes import Child, Fleet, run_toml, wait_until
from tests.helpers.registered_fleet import needs_mosquitto

from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.forgetting.receipt import Receipt
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator.write_device_files import write_device_files

TOML = run_toml(rounds=8, epochs=20).replace("[run]", "[run]\nfinal_evaluation = false")


def closed(fleet):
    try:
        with stored_run(fleet.folder / "runs" / fleet.name) as kept:
            state = read_engine(kept.store)
    except FleetuneError:  # it is being made
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


def joined(fleet_folder, line, number, share):
    """An agent that has joined the fleet of this invitation, and trains."""
    state, log = fleet_folder / f"state{number}", fleet_folder / f"agent{number}.log"
    program = "fleetune.edge_agent.cli"
    child = Child("join", [program, "join", line, "--state", str(state), "--name", f"board {number}"], log)
    assert child.wait() == 0, child.text()
    command = [program, "run", "--state", str(state), "--data", f"npz:{share}", "--trainer", "onnx"]
    return Child(f"agent{number}", command, log)


@needs_mosquitto
@pytest.mark.nightly
def test_a_joined_device_is_disconnected_and_forgotten(tmp_path):
    (tmp_path / "run.toml").write_text(run_toml(rounds=3000, devices=2, start_with=2))
    shares = write_device_files(read_run(tmp_path / "run.toml"), tmp_path / "data")
    where, runs = ["--bind", "0.0.0.0", "--port", "0"], ["--runs", str(tmp_path / "runs")]
    with ExitStack() as stack:

        def start(name, command):
            child = Child(name, ["fleetune.coordinator.cli", *command, *runs], tmp_path / f"{name}.log")
            stack.callback(child.kill)
            return child

        serve = start("serve", ["serve", str(tmp_path / "run.toml"), *where])
        serve.wait_for("^to let a device join")
        invite = start("invite", ["invite", "--devices", "2", "--json", "--host", "127.0.0.1"])
        assert invite.wait() == 0, invite.text()
        line = msgspec.json.decode(invite.text())["line"]
        agents = [joined(tmp_path, line, number, share) for number, share in enumerate(shares)]
        for agent in agents:
            stack.callback(agent.kill)
        serve.wait_for(" round 3/")
        forget = start("forget", ["forget", "board 0", "--json"])
        assert forget.wait() == 0, forget.text()
        receipt = msgspec.json.decode(forget.text().splitlines()[-1], type=Receipt)
        assert receipt.removed["registry"] == {"device": 1}
        agents[0].wait_for("this device's certificate is revoked")
        number = len(serve.lines(" round "))
        wait_until(lambda: len(serve.lines(" round ")) > number + 2, "the run goes on with the other device")
        files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        mentioned = [path for path in files if receipt.device.encode() in path.read_bytes()]
        assert [path.parent.name for path in mentioned] == ["receipts"]
        listed = start("devices", ["devices", "--json"])
        assert listed.wait() == 0
        (one,) = msgspec.json.decode(listed.text())
        assert (one["name"], one["state"], one["known_by"]) == ("board 1", "accepted", "certificate")
        assert one["last_seen"] > one["joined_at"]
