"""An agent whose data grow: samples are dropped into its folder while the run goes on, and it is killed."""

import json
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until

from fleetune.edge_agent.stream import store_values
from fleetune.edge_agent.stream.sample_store import SampleStore

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

TOML = run_toml(method="fedavg", rounds=5000, devices=2, start_with=2, quorum=2).replace(
    "[run]", "[run]\nfinal_evaluation = false"
)
SHARD = 150


def drop(folder, number):
    """A shard of digits, as a sensor's program would write it."""
    digits = load_digits()
    rows = slice(number * SHARD, (number + 1) * SHARD)
    x, y = (digits.images[rows] / 16)[:, None].astype(np.float32), digits.target[rows]
    draft = folder / f"{number}.npz.tmp.npz"
    np.savez(draft, x=x, y=y)
    draft.rename(folder / f"{number}.npz")


def trained_on(fleet, device="device-0"):
    """By round, how many samples it was that the device trained on."""
    journal = fleet.folder / "runs" / fleet.name / "rounds.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    rounds = (json.loads(line) for line in lines if line.endswith("}"))
    return [
        one["devices"][device]["measures"]["num_samples"]
        for one in rounds
        if device in one.get("devices", {})
    ]


def test_later_rounds_train_on_samples_that_came_and_a_kill_loses_none(tmp_path):
    folder = tmp_path / "sensor"
    folder.mkdir()
    with Fleet(tmp_path, TOML) as fleet:
        fleet.start_coordinator()
        fleet.start_agent("device-1", trainer="onnx", options=())
        grows = {"trainer": "onnx", "data": f"watch:{folder}", "options": ()}
        agent = fleet.start_agent("device-0", **grows)
        agent.wait_for("not joining yet: declined: .*at least one sample to train on and one to test on")
        drop(folder, 0)
        wait_until(lambda: trained_on(fleet), "a round with the first samples")
        first = trained_on(fleet)[-1]
        assert 0.5 * SHARD < first < 0.9 * SHARD
        drop(folder, 1)
        wait_until(lambda: trained_on(fleet)[-1] > 1.5 * first, "a round with more samples")
        agent.kill()
        drop(folder, 2)
        second = trained_on(fleet)[-1]
        agent = fleet.start_agent("device-0", **grows)
        wait_until(lambda: trained_on(fleet)[-1] > 1.2 * second, "a round after the kill with all of them")
        assert not agent.lines("ERROR|Traceback|trains on the rest")
        assert agent.stop() == 0
        here = ["--fleet", fleet.name, "--device", "device-0", "--state", str(tmp_path / "state")]
        told = subprocess.run(
            [sys.executable, "-m", "fleetune.edge_agent.cli", "samples", *here, "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert sum(row["train"] + row["test"] for row in json.loads(told.stdout)["classes"]) == 3 * SHARD
        fleet.coordinator.stop()
        assert "over-claim" not in fleet.coordinator.text()
        assert not fleet.coordinator.lines("samples, but the device reported|Traceback")
    store = SampleStore.open(tmp_path / "state" / "fleet" / "device-0" / "samples.sqlite")
    assert store_values.get_number(store._connection, "trained") > 0
    store.close()
