"""onnxruntime-training against torch. It takes onnxruntime's place, so it runs in processes of its own, which
find it in a folder that lies before the others.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from tests.helpers import linear_bundle
from tests.helpers.errors import raises
from tests.helpers.nightly import sooner
from tests.helpers.ort_training_scripts import (
    BATCHES,
    FITTED,
    KEY,
    LINEAR_WEIGHTS,
    LINEAR_X,
    LINEAR_Y,
    MODELS,
    NUM_CLASSES,
    SIZES,
    batch,
    fitted,
    subsets,
)
from tests.helpers.places import ROOT

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.ort_training_package import training_api
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.bundle.graph import Constant, Graph, Node, Port
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.bundle.ort_training import cut
from fleetune.protocols.bundle.protobuf import fields, number, real, text, texts
from fleetune.protocols.errors import ModelError, PacketCorrupt


@pytest.fixture(scope="session")
def results(ort_training, tmp_path_factory):
    """What a coordinator and an agent made of the models."""
    folder = tmp_path_factory.mktemp("ort-training")
    root = ROOT
    paths = os.pathsep.join(map(str, (ort_training, root)))
    for part in ("export", "train"):
        command = [sys.executable, "-m", "tests.helpers.ort_training_scripts", part, folder]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "onnxruntime" not in done.stdout + done.stderr  # it would report each of its passes
    return folder


@pytest.fixture(scope="session")
def found(results):
    with np.load(results / "found.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def told(results):
    return json.loads((results / "told.json").read_text())


def torch_backend(name):
    spec, weights = draw(name, MODELS[name], NUM_CLASSES, KEY)
    backend = TorchBackend.from_spec(spec)
    backend.load(weights)
    return backend, weights


def error(found, wanted):
    """The difference as a part of the size."""
    return np.linalg.norm(found.astype(float) - wanted) / np.linalg.norm(wanted.astype(float))


def largest_error(spec, found, wanted):
    """Of all tensors' gradients, beyond what sums that cancel out lose: in front of a batch normalisation a
    bias has no gradient but rounding.
    """
    rounding = 1e-6 * np.linalg.norm(wanted)
    pairs = zip(spec.views(found - wanted), spec.views(wanted), strict=True)
    lost = [(np.linalg.norm(difference), np.linalg.norm(part)) for (_, difference), (_, part) in pairs]
    return max((difference - rounding) / (size or 1.0) for difference, size in lost)


@pytest.mark.parametrize("size", sooner(SIZES, kept=1))
@pytest.mark.parametrize("name", MODELS)
def test_one_step_is_torchs(found, name, size):
    backend, weights = torch_backend(name)
    spec, errors = backend.spec, []
    for which in BATCHES:
        backend.load(weights)
        loss = backend.step(*batch(name, size, which), KEY)
        assert found[f"{name} {size} {which} loss"] == pytest.approx(loss, rel=1e-5)
        gradient, after = found[f"{name} {size} {which} gradient"], found[f"{name} {size} {which} weights"]
        errors.append(largest_error(spec, gradient, backend.gradient))
        assert not gradient[spec.num_parameters :].any()
        assert np.array_equal(after[: spec.num_parameters], weights[: spec.num_parameters])
        np.testing.assert_allclose(after, backend.weights, rtol=1e-5, atol=1e-6)
    assert min(errors) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_what_is_wanted_is_the_same_and_the_rest_zero(found, name):
    spec, _ = draw(name, MODELS[name], NUM_CLASSES, KEY)
    loss, gradient, weights = (
        found[f"{name} {SIZES[0]} first {what}"] for what in ("loss", "gradient", "weights")
    )
    for count, tensors in enumerate(subsets(spec)):
        wanted = gradient.copy()
        for tensor, part in spec.views(wanted):
            part[...] *= tensor.name in tensors
        assert np.array_equal(found[f"{name} part {count} gradient"], wanted)
        assert found[f"{name} part {count} loss"] == loss
        assert np.array_equal(found[f"{name} part {count} weights"], weights)


@pytest.mark.parametrize("name", FITTED)
def test_twenty_steps_with_mask_pull_and_momentum(found, name):
    backend, weights = torch_backend(name)
    fit = fitted(backend, weights)
    assert fit.num_steps == 20
    assert error(fit.weights, weights) > 1e-2  # it went somewhere
    assert error(found[f"{name} fit"], fit.weights) < 1e-6
    assert error(found[f"{name} fit gradient"], fit.last_gradient) < 1e-5


def test_evaluation_and_its_gradient_are_the_graphs(found):
    backend = OnnxBackend(linear_bundle.bundle())
    backend.load(LINEAR_WEIGHTS)
    np.testing.assert_allclose(found["linear evaluate"], backend.evaluate(LINEAR_X, LINEAR_Y)[0], rtol=1e-6)
    loss = backend.step(LINEAR_X, LINEAR_Y, KEY, training=False)
    assert found["linear loss"] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(found["linear gradient"], backend.gradient, rtol=1e-5, atol=1e-7)


def test_an_agent_loads_nothing_of_torch(told):
    loaded = {name.partition(".")[0] for name in told["modules"]}
    assert not loaded & {"torch", "onnx", "google", "flatbuffers", "matplotlib", "sympy", "coordinator"}
    inside = {name for name in told["modules"] if name.startswith("onnxruntime.training")}
    assert "onnxruntime.training.api" in inside
    assert not {"onnxruntime.training", "onnxruntime.training.ortmodule"} & inside  # no stubs are left


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("label", "ModelError: label 3 is unknown: model hand:made has classes 0..2"),
        ("shape", "ModelError: model hand:made takes samples of shape (2,)"),
        ("guide", "ModelError: the bundle of model hand:made has no graph 'train+distillation'"),
        ("missing", "ModelError: the bundle of model hand:made has no part for onnxruntime-training"),
        ("damaged", "PacketCorrupt: a protobuf message is cut short"),
        ("foreign", "PacketForeign: bundle of model hand:made: its part for onnxruntime-training"),
        ("mixed up", "ModelError: onnxruntime-training cannot load model hand:made"),
    ],
)
def test_bad_input_gets_a_line(told, what, words):
    assert told["refusals"][what].startswith(words)
    assert "\n" not in told["refusals"][what]


def test_an_operator_without_gradient_is_named(results):
    line = (results / "refusal.txt").read_text()
    assert line.startswith("ModelError: model hand:made: onnxruntime-training has no gradient of Sign")


def test_what_differs_from_torch_is_not_shipped(results):
    line = (results / "wrong.txt").read_text()
    assert line.startswith("ModelError: model 'mlp' cannot be exported: ")
    assert "differs from torch's" in line


def test_without_the_package_an_agent_says_how_to_get_it():
    """Here is onnxruntime, which looks much like it."""
    remedy = "pip install --no-deps onnxruntime-training-cpu==1.19.2"
    with raises(ModelError, remedy=(remedy, "--trainer onnx")):
        training_api()
    assert not [name for name in sys.modules if name.startswith("onnxruntime.training")]


def chain():
    """x -> a -> b -> c, and d from a: outputs b, c, d."""
    nodes = [Node("Mul", ("x", "two"), ("a",), {}), Node("Neg", ("a",), ("b",), {})]
    nodes += [Node("Add", ("b", "y"), ("c",), {}), Node("Abs", ("a",), ("d",), {})]
    ports = [Port(name, "f4", ("n",)) for name in "xybcd"]
    two = Constant("two", np.array([2], np.float32))
    return Graph(tuple(ports[:2]), tuple(ports[2:]), tuple(nodes), (two,))


def test_cut_leaves_what_the_outputs_need():
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(cut(write_onnx(chain(), about={"a": "b"}), ["d", "b"]))
    assert [port.name for port in session.get_inputs()] == ["x"]
    assert [port.name for port in session.get_outputs()] == ["d", "b"]
    d, b = session.run(None, {"x": np.array([1, -3], np.float32)})
    assert (d.tolist(), b.tolist()) == ([2, 6], [-2, 6])
    assert b"Add" not in cut(write_onnx(chain()), ["d", "b"])
    assert b"two" not in cut(write_onnx(replace(chain(), nodes=chain().nodes[2:3])), ["c"])


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_damaged_model_is_refused(size):
    with pytest.raises(PacketCorrupt):
        cut(write_onnx(chain())[:size], ["b", "c", "d"])


def test_protobuf_fields_are_read_as_written():
    data = number(3, -5) + real(2, 0.5) + text(1, "one") + text(1, "two") + number(200, 1 << 40)
    assert [field.number for field in fields(data)] == [3, 2, 1, 1, 200]
    assert b"".join(field.whole for field in fields(data)) == data
    assert texts(data, 1) == ["one", "two"]


def _with_file(model):
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[2], data_location=1)
    tensor.external_data.add(key="location", value="/etc/passwd")


def _with_branch(model):
    branch = onnx.GraphProto(name="then")
    model.graph.node.add(op_type="If", input=["x"], output=["y"]).attribute.add(name="then", g=branch, type=5)


def _with_tensor_of_a_file(model):
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=1)
    model.graph.node.add(op_type="Constant", output=["y"]).attribute.add(name="value", t=tensor, type=4)


def _with_sparse_tensor(model):
    model.graph.sparse_initializer.add().dims.append(2**40)


def _with_function(model):
    model.functions.add(name="f", domain="mine")


def _with_remainder(model):
    model.graph.node.add(op_type="Mod", input=["x", "x"], output=["y"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_with_file, "a tensor in a file of its own"),
        (_with_tensor_of_a_file, "a tensor in a file of its own"),
        (_with_branch, "a graph in a node"),
        (_with_sparse_tensor, "a sparse tensor"),
        (_with_function, "functions"),
        (_with_remainder, "operator 'Mod'"),
    ],
)
def test_a_training_model_leads_nowhere_else(change, told):
    model = onnx.load_from_string(write_onnx(chain()))
    assert cut(model.SerializeToString(), ["b"])
    change(model)
    with pytest.raises(PacketCorrupt, match=told):
        cut(model.SerializeToString(), ["b"])
