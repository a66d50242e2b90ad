"""A fleet that trains a part of a pretrained model: the rest travels once, and an app's file is whole."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.helpers.fleet_processes import Fleet, expected, run_toml
from tests.helpers.nightly import sooner

from fleetune.coordinator.run.models import find_model
from fleetune.coordinator.store.device_rows import read_ledger
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.transfer import digest_of

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]


def pretrained(path):
    """A file of the whole model, as an earlier training would leave it."""
    model = {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10}
    found = find_model(
        parse_run({"run": {"name": "r", "seed": 7}, "model": model, "method": {"name": "fedavg"}})
    )
    save_file({tensor.name: view.copy() for tensor, view in found.spec.views(found.weights)}, path)


def toml_of(name, weights, numbers):
    toml = run_toml(name=name, method="fedavg", rounds=2, devices=2, start_with=2)
    part = f'weights = "{weights}"\ntrainable = ["out"]\nadapters = {{ rank = 2, of = ["fc*"] }}\n'
    if numbers == "int8":
        part += 'backbone = "int8"\n'
    return toml.replace("input_shape", f"{part}input_shape", 1)


def enrolment_bytes(folder, name):
    store = RunStore.open(folder / "runs" / name / "state.sqlite")
    sizes = {device: traffic.enrolment for device, traffic in read_ledger(store).traffic.items()}
    sizes["said"] = len(store.get("enrolment"))
    sizes["bundle"] = len(store.get("bundle") or b"")
    store.close()
    return sizes


def agent_says(*words):
    command = [sys.executable, "-m", "fleetune.edge_agent.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("numbers", sooner(["float32", "int8"], kept=["int8"]))
def test_the_frozen_part_travels_once_and_both_trainers_agree_with_the_simulation(tmp_path, numbers):
    weights = tmp_path / "pretrained.safetensors"
    pretrained(weights)
    first, second = (toml_of(name, weights, numbers) for name in ("first", "second"))
    wanted = expected(first, tmp_path / "simulated")
    with Fleet(tmp_path, first) as fleet:
        with_torch, with_onnx = fleet.shares
        fleet.start_agent(with_torch, options=())
        fleet.start_agent(with_onnx, trainer="onnx", options=())
        fleet.start_coordinator()
        assert fleet.coordinator.wait() == 0
        backbone = (tmp_path / "runs" / "first" / "backbone.safetensors").read_bytes()
        found, sizes = fleet.outcome("first"), enrolment_bytes(tmp_path, "first")
        assert sizes[with_torch] == sizes["said"] + len(backbone)
        assert sizes[with_onnx] == sizes["said"] + len(backbone) + sizes["bundle"]
        shared = [np.frombuffer(one.shared, np.float32) for one in (found, wanted)]
        assert np.linalg.norm(shared[0] - shared[1]) <= 1e-5 * np.linalg.norm(shared[1])

        fleet.run_file.write_text(second)
        fleet.start_coordinator("--fleet", fleet.name)
        assert fleet.coordinator.wait() == 0
        sizes = enrolment_bytes(tmp_path, "second")
        assert sizes[with_torch] == sizes[with_onnx] == sizes["said"]  # backbone and bundle are there
        for device in fleet.shares:
            kept = [path.name for path in (tmp_path / "state" / fleet.name / device / "backbones").iterdir()]
            assert kept == [digest_of(backbone)]

        own = ("--fleet", fleet.name, "--device", with_onnx, "--state", str(tmp_path / "state"))
        agent_says("export", *own, "--out", str(tmp_path / "app.onnx"))
        data = ("--data", f"npz:{fleet.shares[with_onnx]}", "--json")
        app = json.loads(agent_says("predict", "--model", str(tmp_path / "app.onnx"), *data))
        here = json.loads(agent_says("predict", *own, *data))
        assert app["labels"] == here["labels"]
        assert app["accuracy"] == here["accuracy"]


def test_a_users_frozen_layer_and_random_buffer_are_the_same_on_all_devices(tmp_path):
    toml = run_toml(
        name="frozen",
        method="fedavg",
        rounds=2,
        devices=2,
        start_with=2,
        model="tests.helpers.frozen_models:frozen_and_random",
    )
    wanted = expected(toml, tmp_path / "simulated")
    with Fleet(tmp_path, toml) as fleet:
        with_torch, with_onnx = fleet.shares
        trust = ("--leave-after-run", "--trust", "tests.helpers.frozen_models")
        fleet.start_agent(with_torch, options=trust)
        fleet.start_agent(with_onnx, trainer="onnx", options=trust)
        fleet.start_coordinator()
        fleet.wait_finished()
        found = fleet.outcome("frozen")
    shared = [np.frombuffer(one.shared, np.float32) for one in (found, wanted)]
    assert np.linalg.norm(shared[0] - shared[1]) <= 1e-5 * np.linalg.norm(shared[1])
    sent = load_file(tmp_path / "runs" / "frozen" / "backbone.safetensors")
    assert sent.keys() == {"inner.weight", "inner.bias", "projection.projection"}
    whole = load_file(tmp_path / "runs" / "frozen" / "models" / "shared.safetensors")
    for name, value in sent.items():
        np.testing.assert_array_equal(whole[name], value)
