"""Tasks are differences to what both sides hold: what one side has lost of that is never guessed."""

import shutil
import signal
import sqlite3
import time
from contextlib import closing, contextmanager
from itertools import chain

import numpy as np
import pytest
from tests.helpers.fleet_processes import Fleet, expected, run_toml, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

TOML = run_toml(method="fedavg", rounds=12, epochs=5)
LOSERS = ("device-0", "device-1")
LAST = "device-2"


def test_a_lost_base_costs_a_dense_task_and_the_run_ends_as_it_would_have(tmp_path, tmp_path_factory):
    """One agent loses its state, another one's is an older one; then the coordinator forgets what all hold.

    Of the third one nobody knows then what it holds, since its state is an older one, too.

    Devices train with ONNX Runtime: the simulation with torch comes to the same but for float32's rounding.
    """
    wanted = expected(TOML, tmp_path_factory.mktemp("simulated"))
    older = {device: tmp_path / f"older-{device}" for device in ("device-1", LAST)}
    with Fleet(tmp_path, TOML) as fleet:
        fleet.start(trainer="onnx")
        with round_held_open(fleet, 1):
            fleet.agents["device-1"].wait_for("update delivered")
            shutil.copy(session_of(fleet, "device-1"), older["device-1"])
        with round_held_open(fleet, 2):
            shutil.copy(session_of(fleet, LAST), older[LAST])
            for device in LOSERS:
                fleet.agents[device].kill()
            session_of(fleet, "device-0").unlink()
            shutil.copy(older["device-1"], session_of(fleet, "device-1"))
            for device in LOSERS:
                fleet.start_agent(device, trainer="onnx")
            for device in LOSERS:
                fleet.agents[device].wait_for("joined run")
        with round_held_open(fleet, 3):
            fleet.coordinator.kill()
            closed = len(fleet.coordinator.lines(r"round \d+/12"))
            forget_what_devices_hold(fleet)
            fleet.agents[LAST].kill()
            shutil.copy(older[LAST], session_of(fleet, LAST))
            fleet.start_agent(LAST, trainer="onnx").wait_for("connected")  # else a round may begin without it
            fleet.start_coordinator().wait_for("goes on")
        fleet.wait_finished()
        found, summary = fleet.outcome(), fleet.summary()
    # Updates are written with what tasks brought; one that came before its agent was killed comes again,
    # the last device's perhaps after its round.
    assert summary["refused"].keys() <= {
        "engine-gone",
        "engine-duplicate",
        "duplicate",
        "engine-late",
        "late",
    }
    np.testing.assert_allclose(model(found), model(wanted), atol=1e-5)
    assert [record[:3] for record in found.rounds] == [record[:3] for record in wanted.rounds]
    dense = [dense_tasks(*both) for both in zip(found.rounds, wanted.rounds, strict=True)]
    assert sorted(chain(*dense[:closed])) == sorted(LOSERS), "each once"
    again = list(chain(*dense[closed:]))
    assert len(again) == len(set(again)), "no more than once each: what a device says that it holds is enough"
    assert LAST in again, "which holds nothing that is known"
    assert dense[-1] == [], "differences again"


@contextmanager
def round_held_open(fleet, number):
    """No round closes in here: the last device stands still, once it has begun on so many more tasks.

    The others have replied: until then the round at hand may be one that it replied to before it was stopped.
    """
    last = fleet.agents[LAST]
    last.wait_for(": training", len(last.lines(": training")) + number)
    last.send(signal.SIGSTOP)
    for wait_s in (0, 0.3):  # a reply of its may be on the way
        time.sleep(wait_s)
        wait_until(lambda: replied(fleet) == sorted(LOSERS), "only the last device's reply is missing")
    yield
    last.send(signal.SIGCONT)


def session_of(fleet, device):
    [run] = (fleet.folder / "state" / fleet.name / device / "runs").iterdir()
    return run / "session"


def replied(fleet):
    """Devices whose reply to the open round is there."""
    with closing(state_of(fleet)) as state:
        return [device for (device,) in state.execute("SELECT device FROM reply ORDER BY device")]


def state_of(fleet):
    return sqlite3.connect(fleet.folder / "runs" / fleet.name / "state.sqlite")


def forget_what_devices_hold(fleet):
    with closing(state_of(fleet)) as state, state:
        assert state.execute("DELETE FROM held").rowcount == 3
        assert state.execute("DELETE FROM held_model").rowcount >= 1


def model(outcome):
    return np.frombuffer(outcome.shared, np.float32)


def dense_tasks(found, wanted):
    """Devices whose task was larger than in the simulation; rounding moves a difference by far less."""
    return [device for device, reply in found[3].items() if reply[0] > 1.02 * wanted[3][device][0]]
