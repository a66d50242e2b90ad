"""`Agent` in somebody's program, beside a real coordinator and broker; program and child are killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

TOML = (
    run_toml(method="fedavg", rounds=100_000, devices=1, start_with=1)
    .replace("[run]", "[run]\nfinal_evaluation = false")
    .replace("learning_rate = 0.02", "learning_rate = 0.2")
)
PROGRAM = """
import json, sys
import numpy as np
from fleetune import Agent

def tell(**what):
    print(json.dumps(what), flush=True)

def known(state):
    return state.deployed is not None and state.connection == "connected" and state.round > int(sys.argv[4])

digits = np.load(sys.argv[3])
with Agent(sys.argv[1], fleet="fleet", device="device-0", store=sys.argv[2], trainer="onnx") as agent:
    before = agent.state
    answer = agent.predict(digits["x"][0])
    tell(samples=before.samples.train, served=before.deployed is not None, answer=answer is not None)
    names = [agent.add(x) for x in digits["x"]]
    for name, y in zip(names, digits["y"]):
        agent.label(name, y)
    agent.flush()
    state = agent.wait_for(known)
    told = [agent.predict(x) for x in digits["x"]]
    right = np.mean([one.label == y for one, y in zip(told, digits["y"])])
    tell(samples=state.samples.train, round=state.round, right=right)
    for _ in sys.stdin:
        state = agent.state
        tell(round=state.round, connection=state.connection, error=state.last_error)
print(agent.state, flush=True)
"""


class Program:
    """It, as a process of its own."""

    def __init__(self, fleet, folder, after=0):
        (folder / "program.py").write_text(PROGRAM)
        given = [fleet.address(fleet.broker.port), folder / "state", folder / "digits.npz", after]
        self.process = subprocess.Popen(
            [sys.executable, folder / "program.py", *map(str, given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def told(self):
        return json.loads(self.process.stdout.readline())

    def asked(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.told()

    @property
    def child(self):
        """Pid of the process that connects and trains; None: there is none just now."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in found for pid in path.read_text().split()]
        return pids[0] if pids else None

    def kill(self):
        with self.process:  # its pipes are closed
            self.process.kill()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def cli(folder, *words):
    here = ["--fleet", "fleet", "--device", "device-0", "--state", str(folder / "state")]
    done = subprocess.run(
        [sys.executable, "-m", "fleetune.edge_agent.cli", *words, *here, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_samples_rounds_predictions_and_kills(tmp_path):
    digits = load_digits()
    x = (digits.images[:200] / 16)[:, None].astype(np.float32)
    np.savez(tmp_path / "digits.npz", x=x, y=digits.target[:200])
    with Fleet(tmp_path, TOML) as fleet:
        fleet.start_coordinator()
        program = Program(fleet, tmp_path, after=12)
        try:
            assert program.told() == {"samples": 0, "served": False, "answer": False}
            first = program.told()
            assert 110 < first["samples"] < 170
            assert first["round"] > 12
            assert first["right"] > 0.5
            child = program.child
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: program.child not in (None, child), "another child")
            wait_until(lambda: program.asked()["connection"] == "connected", "it is connected again")
            assert "signal SIGKILL" in program.asked()["error"]
            last, child = program.asked()["round"], program.child
            program.kill()
            wait_until(lambda: not is_running(child), "the child ends with its parent")
            program = Program(fleet, tmp_path, after=last)
            assert program.told() == {"samples": first["samples"], "served": True, "answer": True}
            again = program.told()
            assert again["samples"] == first["samples"]
            assert again["round"] > last
            rows = cli(tmp_path, "samples")["classes"]
            assert sum(row["train"] + row["test"] for row in rows) == 200
            assert [row["deployed"] for row in cli(tmp_path, "models")["versions"]] == [True]
            child = program.child
            said, _ = program.process.communicate(timeout=60)  # the end of its input: it closes the agent
            assert program.process.returncode == 0
            assert "fleet/device-0: closed; run fleet-" in said
            assert not is_running(child)
        finally:
            program.kill()
        fleet.coordinator.stop()
        assert not fleet.coordinator.lines("Traceback|over-claim")
