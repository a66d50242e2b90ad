"""Tasks are differences to what both sides hold: what one side has lost of that is never guessed."""

import shutil
import signal
import sqlite3
from contextlib import closing, contextmanager
from itertools import chain

import numpy as np
import pytest
from tests.helpers.fleet_processes import Fleet, expected, run_toml

pytestmark = pytest.mark.fleet

TOML = run_toml(method="fedavg", rounds=12, epochs=5)
LOSERS = ("device-0", "device-1")


def test_a_lost_base_costs_a_dense_task_and_the_run_ends_as_it_would_have(tmp_path, tmp_path_factory):
    """One agent loses its state, another one's is an older one; then the coordinator forgets what all hold.

    Devices train with ONNX Runtime: the simulation with torch comes to the same but for float32's rounding.
    """
    wanted = expected(TOML, tmp_path_factory.mktemp("simulated"))
    older = tmp_path / "older"
    with Fleet(tmp_path, TOML) as fleet:
        fleet.start(trainer="onnx")
        with round_held_open(fleet, 1):
            fleet.agents["device-1"].wait_for("update delivered")
            shutil.copy(session_of(fleet, "device-1"), older)
        with round_held_open(fleet, 2):
            for device in LOSERS:
                fleet.agents[device].kill()
            session_of(fleet, "device-0").unlink()
            shutil.copy(older, session_of(fleet, "device-1"))
            for device in LOSERS:
                fleet.start_agent(device, trainer="onnx")
            for device in LOSERS:
                fleet.agents[device].wait_for("joined run")
        with round_held_open(fleet, 3):
            fleet.coordinator.kill()
            closed = len(fleet.coordinator.lines(r"round \d+/12"))
            forget_what_devices_hold(fleet)
            fleet.start_coordinator().wait_for("goes on")
        fleet.wait_finished()
        found, summary = fleet.outcome(), fleet.summary()
    # Updates are written with what tasks brought; one that came before its agent was killed comes again.
    assert summary["refused"].keys() <= {"engine-gone", "engine-duplicate", "duplicate"}
    np.testing.assert_allclose(model(found), model(wanted), atol=1e-5)
    assert [record[:3] for record in found.rounds] == [record[:3] for record in wanted.rounds]
    dense = [dense_tasks(*both) for both in zip(found.rounds, wanted.rounds, strict=True)]
    assert sorted(chain(*dense[:closed])) == sorted(LOSERS), "each once"
    again = list(chain(*dense[closed:]))
    assert len(again) == len(set(again)), "no more than once each: what a device says that it holds is enough"
    assert "device-2" in again, "which had not worked on its task yet, and held nothing that was known"
    assert dense[-1] == [], "differences again"


@contextmanager
def round_held_open(fleet, number):
    """No round closes in here: device-2 stands still, once it has begun on so many more tasks."""
    last = fleet.agents["device-2"]
    last.wait_for(": training", len(last.lines(": training")) + number)
    last.send(signal.SIGSTOP)
    yield
    last.send(signal.SIGCONT)


def session_of(fleet, device):
    [run] = (fleet.folder / "state" / fleet.name / device / "runs").iterdir()
    return run / "session"


def forget_what_devices_hold(fleet):
    with closing(sqlite3.connect(fleet.folder / "runs" / fleet.name / "state.sqlite")) as state, state:
        assert state.execute("DELETE FROM held").rowcount == 3
        assert state.execute("DELETE FROM held_model").rowcount >= 1


def model(outcome):
    return np.frombuffer(outcome.shared, np.float32)


def dense_tasks(found, wanted):
    """Devices whose task was larger than in the simulation; rounding moves a difference by far less."""
    return [device for device, reply in found[3].items() if reply[0] > 1.02 * wanted[3][device][0]]
