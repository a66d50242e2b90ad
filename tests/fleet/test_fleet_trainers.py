"""Agents with different trainers in one fleet, over MQTT: the same updates, models and bundle."""

import os
import shutil
import subprocess
import sys
import venv

import msgspec
import numpy as np
import pytest
from tests.helpers.fleet_processes import PATIENCE_S, ROOT, Fleet, expected, run_toml

from fleetune.coordinator.store.device_rows import read_ledger
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.wire.transfer import digest_of

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

METHODS = ("fedspu", "srp-pfed", "kapc", "kapc-bls", "fedpurin", "dc-pfl")


def flat(data):
    return np.frombuffer(data, np.float32)


def close(found, wanted, rtol):
    """Relative to the vector's length."""
    return np.linalg.norm(flat(found) - flat(wanted)) <= rtol * np.linalg.norm(flat(wanted))


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A Python in which `pip install .[onnx]` was all that was done."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    source = folder / "source"  # building leaves files behind
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{source}[onnx]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install here: {done.stderr.strip().splitlines()[-1]}")
    return str(python)


@pytest.fixture
def third(request):
    """What the third agent trains with, and where its packages are."""
    try:
        folder = request.getfixturevalue("ort_training")
    except pytest.skip.Exception:  # there is none for this Python or processor
        return "onnx", {}
    return "ort-training", {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}


def one_step(method):
    """A run of one round with one step of training on each device."""
    toml = run_toml(name=f"one-{method}", method=method, rounds=1, model="lenet5")
    return toml.replace("batch_size = 16", "batch_size = 1000")


@pytest.mark.nightly
def test_one_step_of_every_method_is_the_same_with_every_trainer(tmp_path, third):
    trainer, paths = third
    with Fleet(tmp_path, one_step(METHODS[0])) as fleet:
        for device, which in zip(fleet.shares, ("torch", "onnx", trainer), strict=True):
            fleet.start_agent(device, trainer=which, options=(), **(paths if which == trainer else {}))
        for method in METHODS:
            toml = one_step(method)
            fleet.run_file.write_text(toml)
            fleet.start_coordinator("--fleet", fleet.name, **paths)
            assert fleet.coordinator.wait() == 0
            wanted = expected(toml, tmp_path / "simulated" / method)
            found = fleet.outcome(f"one-{method}")
            assert close(found.shared, wanted.shared, 1e-6), method
            assert found.personal.keys() == wanted.personal.keys()
            for device, weights in wanted.personal.items():
                assert close(found.personal[device], weights, 1e-6), (method, device)


def test_a_mixed_fleet_comes_to_what_a_torch_fleet_comes_to(tmp_path, third):
    trainer, paths = third
    toml = run_toml(name="mixed", rounds=4, epochs=2, model="lenet5")
    wanted = expected(toml, tmp_path / "simulated")
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator(**paths)
        for device, which in zip(fleet.shares, ("torch", "onnx", trainer), strict=True):
            fleet.start_agent(device, trainer=which, **(paths if which == trainer else {}))
        fleet.wait_finished()
        found, store = fleet.outcome(), RunStore.open(tmp_path / "runs" / "mixed" / "state.sqlite")
        payload = store.get("bundle")
        ledger = read_ledger(store)
        store.close()
        states = [tmp_path / "state" / "mixed" / device for device in fleet.shares]
        kept = [[path.name for path in (state / "bundles").glob("*")] for state in states]
    assert close(found.shared, wanted.shared, 1e-3)
    for (_, _, _, replies), (_, _, _, simulated) in zip(found.rounds, wanted.rounds, strict=True):
        for device, (_, _, measures) in replies.items():
            assert abs(measures.after - simulated[device][2].after) <= 0.03
    bundle = read_bundle(payload)
    assert bundle.spec.name == "lenet5"
    assert bool(bundle.ort_training) == (trainer == "ort-training")
    assert kept == [[], [digest_of(payload)], [digest_of(payload)]]
    enrolments = [ledger.traffic[device].enrolment for device in fleet.shares]
    assert enrolments[1] == enrolments[2] == enrolments[0] + len(payload)


@pytest.mark.nightly
def test_a_model_that_has_no_bundle_is_trained_by_those_with_torch(tmp_path):
    (tmp_path / "branching_model.py").write_text(
        "from torch import nn\n"
        "class Branching(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.out = nn.Linear(64, classes)\n"
        "    def forward(self, x):\n"
        "        x = x.flatten(1)\n"
        "        return self.out(x if x.sum() > 0 else -x)\n"
        "def net(shape, classes):\n"
        "    return Branching(classes)\n"
    )
    toml = run_toml(name="branching", rounds=2, model="branching_model:net", start_with=3)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    trust = ("--leave-after-run", "--trust", "branching_model")
    sys.path.insert(0, str(tmp_path))
    try:
        fleet = Fleet(tmp_path, toml)
    finally:
        sys.path.remove(str(tmp_path))
    with fleet:
        fleet.start_coordinator(**paths)
        for device, trainer in zip(fleet.shares, ("onnx", "auto", "torch"), strict=True):
            fleet.start_agent(device, trainer=trainer, options=trust, **paths)
        fleet.wait_finished()
        declined, fallen_back, _ = fleet.agents.values()
        (line,) = declined.lines("cannot join run")
        assert "lets values of the data decide" in line
        assert "torch.where" in line
        assert fallen_back.lines("round 2: update delivered")
        assert fleet.coordinator.lines("devices without torch cannot take part")


def test_an_agent_installed_without_torch_trains_in_a_fleet(tmp_path, no_torch):
    heavy = ("torch", "matplotlib", "ray", "amqtt", "onnx", "scipy", "pydantic")
    code = f"import importlib.util as u; print([m for m in {heavy} if u.find_spec(m)])"
    found = subprocess.run([no_torch, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    toml = run_toml(name="light", rounds=2, model="lenet5")
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        for device in fleet.shares:
            fleet.start_agent(device, trainer="auto", python=no_torch)
        fleet.wait_finished()
        wanted = expected(toml, tmp_path / "simulated")
        assert close(fleet.outcome().shared, wanted.shared, 1e-4)
        device = next(iter(fleet.shares))
        state = ["--fleet", "light", "--device", device, "--state", tmp_path / "state"]
        exported = tmp_path / "personal.onnx"
        edge_agent = [no_torch, "-m", "fleetune.edge_agent.cli"]
        subprocess.run([*edge_agent, "export", *state, "--out", exported], check=True, timeout=PATIENCE_S)
        command = [
            *edge_agent,
            "predict",
            "--json",
            "--model",
            exported,
            "--data",
            f"npz:{fleet.shares[device]}",
        ]
        said = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        own = subprocess.run(
            [*edge_agent, "predict", "--json", *state, "--data", f"npz:{fleet.shares[device]}"],
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
    answer, own_answer = msgspec.json.decode(said.stdout), msgspec.json.decode(own.stdout)
    assert answer.pop("model") is None, "a file does not know where it comes from"
    assert own_answer.pop("model")["run"].startswith("light-")
    assert answer == own_answer
    assert len(answer["labels"]) == len(answer["probabilities"])
    assert 0 < answer["accuracy"] <= 1
