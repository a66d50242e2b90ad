"""The personal model as a file for an app: raw samples in, the device's own answers out."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from tests.helpers.linear_bundle import SPEC, bundle
from typer.testing import CliRunner

from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.extensions.session_state import SessionState
from fleetune.edge_agent.personal.inference_graph import Predictor, write_inference
from fleetune.edge_agent.personal.personal_model import personal_model
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.errors import DataError, ModelError, StoreError
from fleetune.protocols.methods import create
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transfer import digest_of

NAMES = ("cat", "dog", "größer")
WEIGHTS = np.array([1, -1, 0.5, 2, 0, 1, 0.1, 0.2, 0.3], np.float32)
X = np.array([[1, -1], [0.5, 2], [3, 0]], np.float32)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def call(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_an_app_gives_raw_samples_and_gets_the_devices_answers():
    made = bundle(mean=0.5, std=0.25, class_names=NAMES)
    data = write_inference(made, WEIGHTS, {"device": "d"})
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    predictor = Predictor.of(data)
    assert [predictor.name(label) for label in range(3)] == [*NAMES]
    backend = OnnxBackend(made)
    backend.load(WEIGHTS)
    wanted = softmax(backend.answer((X - np.float32(0.5)) / np.float32(0.25), "logits"))
    np.testing.assert_allclose(predictor.probabilities(X), wanted, rtol=1e-5, atol=1e-7)
    labels = predictor.session.run(["label"], {"input": X})[0]
    np.testing.assert_array_equal(labels, wanted.argmax(axis=1))
    assert predictor.session.get_modelmeta().custom_metadata_map["device"] == "d"


def test_bytes_of_images_count_as_a_255th():
    made = shipped_bundle("mlp", (1, 8, 8), 10)
    weights = Key.of("weights").generator().standard_normal(made.spec.size).astype(np.float32) / 5
    predictor = Predictor.of(write_inference(made, weights, {}))
    images = np.arange(300 * 64, dtype=np.int64).reshape(300, 8, 8) % 256
    wanted = predictor.probabilities((images / 255).astype(np.float32))
    np.testing.assert_allclose(predictor.probabilities(images.astype(np.uint8)), wanted, rtol=1e-4, atol=1e-6)
    assert wanted.shape == (300, 10)
    assert predictor.name(7) == "7"


def test_samples_of_another_shape_and_other_files_are_one_line(tmp_path):
    predictor = Predictor.of(write_inference(bundle(), WEIGHTS, {}))
    with pytest.raises(DataError, match=r"samples have shape \(3,\); the model takes \(2,\)"):
        predictor.probabilities(np.zeros((4, 3)))
    with pytest.raises(ModelError, match=r"cannot read .*missing\.onnx: no such file"):
        Predictor.of(tmp_path / "missing.onnx")
    (tmp_path / "other.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match="no model that edge-agent export wrote") as caught:
        Predictor.of(tmp_path / "other.onnx")
    assert "\n" not in str(caught.value)


@pytest.fixture
def state(tmp_path):
    """The folder of a device `d` of fleet `f` that has done round 7, and its weights."""
    model = {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10}
    enrolment = prepare(parse_run({"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}}))
    enrolment = replace(enrolment, run="r-1")
    store = AgentStore(tmp_path / "state" / "f" / "d")
    store.enrolment("r-1").write(codec.encode(enrolment, enrolment.spec))
    method = create("fedavg", enrolment.spec, {})
    weights = enrolment.weights + np.float32(0.25)
    kept = SessionState("r-1", method.init_device(weights), 7)
    store.session("r-1").write(codec.encode(kept, enrolment.spec))
    return store, weights


def test_export_and_predict_on_a_device(state, tmp_path):
    store, weights = state
    store.keep_bundle("r-1", shipped_bundle("mlp", (1, 8, 8), 10).encoded())
    found = personal_model(store)
    assert (found.record.run, found.record.round) == ("r-1", 7)
    np.testing.assert_array_equal(found.weights, weights)
    own = ["--fleet", "f", "--device", "d", "--state", tmp_path / "state"]
    out = tmp_path / "model.onnx"
    code, said = call("export", *own, "--out", out)
    assert (code, "run r-1, round 7" in said) == (0, True)
    code, said = call("predict", "--model", out, "--data", "digits", "--json")
    answer = json.loads(said)
    assert code == 0
    assert len(answer["labels"]) == 1797
    assert answer["names"][0] == str(answer["labels"][0])
    assert answer["model"] is None  # a file says nothing of where it comes from, but in its metadata
    code, said = call("predict", *own, "--data", "digits", "--json")
    assert code == 0
    assert json.loads(said) == answer | {"model": {"run": "r-1", "round": "7", "final_evaluation": "False"}}
    np.save(tmp_path / "few.npy", np.zeros((12, 1, 8, 8), np.float32))
    code, said = call("predict", "--model", out, "--data", tmp_path / "few.npy")
    assert (code, "and 2 more" in said, "right" in said) == (0, True, False)


def test_a_run_that_is_only_announced_changes_nothing(state, tmp_path):
    """Neither what an agent of before wrote, nor what is served since."""
    store, weights = state
    store.keep_bundle("r-1", shipped_bundle("mlp", (1, 8, 8), 10).encoded())
    enrolment = codec.decode(store.enrolment("r-1").read(), Enrolment, None)
    again = replace(enrolment, run="r-2")
    store.enrolment("r-2").write(codec.encode(again, again.spec))
    assert store.adopt_bundle("r-2", digest_of(shipped_bundle("mlp", (1, 8, 8), 10).encoded()))
    assert personal_model(store).record.run == "r-1"
    spec, best = enrolment.spec, weights + np.float32(1)
    record = ModelRecord("r-1", 5, False, spec.hash, (1, 8, 8), 10, validation_loss=0.25, accuracy=0.875)
    store.deployed.write(codec.encode(DeployedModel(record, best), spec))
    found = personal_model(store)
    np.testing.assert_array_equal(found.weights, best)
    own = ["--fleet", "f", "--device", "d", "--state", tmp_path / "state", "--data", "digits"]
    _, said = call("predict", *own)
    line = "model: run r-1, round 5; validation loss 0.25; 87.5% right on its own test samples"
    assert said.splitlines()[0] == line
    np.testing.assert_array_equal(personal_model(store, "r-1").weights, weights)
    assert personal_model(store, "r-2").record.round == 0
    store.deployed.write(b"damaged")
    code, said = call("predict", *own)
    assert (code, "deployed, the model that this device deploys, is damaged" in said) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["export", "--fleet", "f", "--device", "d", "--out", "m.onnx"], "no bundle of run r-1 is here"),
        (["export", "--fleet", "g", "--device", "d", "--out", "m.onnx"], "has joined no run yet"),
        (["export", "--fleet", "f", "--device", "d", "--run", "x", "--out", "m.onnx"], "no run x"),
        (
            ["export", "--fleet", "f", "--device", "d", "--out", "m.onnx", "--bundle", "nothing"],
            "cannot read bundle nothing",
        ),
        (["predict", "--data", "digits"], "give --model FILE.onnx, or the --fleet"),
        (["predict", "--fleet", "f", "--device", "d", "--data", "none.npy"], "cannot read none.npy"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(state, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    code, said = call(*options, *(["--state", tmp_path / "state"]))
    assert code == 2
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "m.onnx").exists()


def test_code_that_a_coordinator_names_is_imported_only_where_its_owner_says_so(state, tmp_path, monkeypatch):
    store, _ = state
    (tmp_path / "strange.py").write_text(
        "from fleetune.protocols.methods.fedavg import FedAvg as Mine\nopen('imported', 'w').close()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    enrolment = codec.decode(store.enrolment("r-1").read(), Enrolment, None)
    named = replace(enrolment, method={"name": "strange:Mine"})
    store.enrolment("r-1").write(codec.encode(named, named.spec))
    store.keep_bundle("r-1", shipped_bundle("mlp", (1, 8, 8), 10).encoded())
    own = ["--fleet", "f", "--device", "d", "--state", tmp_path / "state"]
    code, said = call("export", *own, "--out", tmp_path / "model.onnx")
    assert (code, "allow it with --trust strange" in said) == (2, True)
    assert not (tmp_path / "imported").exists()
    code, said = call("export", *own, "--out", tmp_path / "model.onnx", "--trust", "strange")
    assert code == 0, said


def test_a_bundle_of_another_model_is_named(state, tmp_path):
    store, _ = state
    path = tmp_path / "linear.bundle"
    path.write_bytes(bundle().encoded())
    with pytest.raises(StoreError, match=f"bundle of model {SPEC.hash}; the fleet's model is"):
        personal_model(store, None, path)
