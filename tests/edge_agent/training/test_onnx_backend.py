"""The ONNX backend on a model small enough to check by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.helpers.linear_bundle import SPEC, bundle, training_graph
from tests.helpers.places import ROOT

from fleetune.edge_agent.training import onnx_sessions
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.bundle.bundle import ANSWER
from fleetune.protocols.bundle.graph import Node
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection

KEY = Key.of("test")
WEIGHTS = np.array([1, -1, 0.5, 2, 0, 1, 0.1, 0.2, 0.3], np.float32)
X = np.array([[1, -1], [0.5, 2], [3, 0]], np.float32)
Y = np.array([0, 2, 1])


@pytest.fixture
def backend():
    made = OnnxBackend(bundle())
    made.load(WEIGHTS)
    return made


def _expected(weights, x, y):
    """Mean loss, and its gradient as a flat vector."""
    weight, bias = weights[:6].reshape(3, 2).astype(float), weights[6:].astype(float)
    logits = x @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    excess = (p - np.eye(3)[y]) / len(y)
    return -np.log(p[np.arange(len(y)), y]).mean(), np.concatenate([(excess.T @ x).ravel(), excess.sum(0)])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradient(backend, count, training):
    loss, gradient = _expected(WEIGHTS, X[:count], Y[:count])
    assert backend.step(X[:count], Y[:count], KEY, training=training) == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(backend.gradient, gradient, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(backend.weights, WEIGHTS)


def test_the_runtime_finds_nothing_out_by_an_exception(backend):
    """Each would take as long as a small network's step; Python's runtime looks up an option that way."""
    backend.step(X, Y, KEY)
    raised = []

    def note(_, event, called):
        if event == "c_exception":
            raised.append(called.__name__)

    sys.setprofile(note)
    try:
        backend.step(X, Y, KEY)
    finally:
        sys.setprofile(None)
    assert set(raised) <= {"next", "issubclass"}  # an iterator's end, and NumPy's


@pytest.mark.parametrize(
    ("output", "larger"),
    [
        ("loss", Node("Neg", ("each",), ("loss",), {})),
        ("gradient:out.bias", Node("Neg", ("dlogits",), ("gradient:out.bias",), {})),
    ],
)
def test_a_graph_that_gives_more_than_there_is_room_for_is_ended_by_the_runtime(output, larger):
    """Its results go right into arrays of ours."""
    graph = training_graph()
    nodes = tuple(larger if output in node.outputs else node for node in graph.nodes)
    ports = tuple(
        replace(port, shape=("n", *((3,) if output != "loss" else ()))) if port.name == output else port
        for port in graph.outputs
    )
    larger_graph = replace(graph, nodes=nodes, outputs=ports)
    backend = OnnxBackend(bundle(graphs={**bundle().graphs, "train": larger_graph}))
    with pytest.raises(ModelError, match="cannot compute"):
        backend.step(X, Y, KEY)


@pytest.mark.parametrize(("cache_bytes", "keeps"), [(0, False), (100, False), (2**20, True)])
def test_the_memory_of_a_small_run_is_kept_where_that_is_asked_for(monkeypatch, backend, cache_bytes, keeps):
    runtime, options = onnx_sessions.runtime(), []

    def started(model, given, **places):
        options.append(given)
        return session(model, given, **places)

    session = runtime.InferenceSession
    monkeypatch.setattr(runtime, "InferenceSession", started)
    keeping = OnnxBackend(bundle(), cache_bytes=cache_bytes)
    keeping.load(WEIGHTS)
    assert keeping.step(X, Y, KEY) == backend.step(X, Y, KEY)
    np.testing.assert_array_equal(keeping.gradient, backend.gradient)
    assert [one.enable_cpu_mem_arena for one in options] == [keeps, False]


def test_only_the_gradients_that_are_wanted(backend):
    backend.step(X, Y, KEY)
    whole = backend.gradient.copy()
    backend.step(X, Y, KEY, tensors=frozenset({"out.bias"}))
    assert not backend.gradient[:6].any()
    np.testing.assert_array_equal(backend.gradient[6:], whole[6:])
    loss = backend.step(X, Y, KEY, tensors=frozenset())
    assert not backend.gradient.any()
    assert loss == pytest.approx(_expected(WEIGHTS, X, Y)[0], rel=1e-6)


def test_writing_to_the_weights_changes_the_model(backend):
    backend.weights[:] = 0
    assert backend.step(X, Y, KEY) == pytest.approx(np.log(3), rel=1e-6)


def test_what_is_bound_once_is_read_and_written_as_it_is_then(backend):
    for count, scale in ((3, 1), (2, -0.5), (3, 2), (1, 0.1)):
        backend.load(np.float32(scale) * WEIGHTS)
        backend.gradient[:] = np.nan
        loss, gradient = _expected(scale * WEIGHTS, X[:count], Y[:count])
        assert backend.step(X[:count], Y[:count], KEY) == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(backend.gradient, gradient, rtol=1e-5, atol=1e-7)


def test_an_output_goes_where_it_is_asked_for_each_time():
    sessions = onnx_sessions.Sessions(bundle())
    feeds = {"x": X, "y": Y, "out.weight": WEIGHTS[:6].reshape(3, 2), "out.bias": WEIGHTS[6:]}
    names, gradient = frozenset({"loss", "gradient:out.bias"}), _expected(WEIGHTS, X, Y)[1][6:]
    first, second = np.zeros(3, np.float32), np.zeros(3, np.float32)
    for place in (first, None, first, second, None):
        for one in (first, second):
            one[:] = 7
        found = sessions.run("train", names, feeds, {} if place is None else {"gradient:out.bias": place})
        given = found.pop("gradient:out.bias") if place is None else place
        np.testing.assert_allclose(given, gradient, rtol=1e-5)
        assert found.keys() == {"loss"}
        assert all((one == 7).all() for one in (first, second) if one is not place)


class Binding:
    """Notes what is bound."""

    def __init__(self):
        self.bound = []

    def bind_cpu_input(self, name, array):
        self.bound.append(name)

    def bind_output(self, name, *_):
        pass

    def get_outputs(self):
        return []


@pytest.mark.parametrize(("reads_in_place", "times"), [(True, 1), (False, 3)])
def test_a_card_is_given_what_it_reads_each_time(reads_in_place, times):
    binding = Binding()
    runtime = SimpleNamespace(io_binding=lambda: binding, run_with_iobinding=lambda *_: None)
    session = onnx_sessions._Session(runtime, ["x"], [], reads_in_place=reads_in_place)
    for _ in range(3):
        session.run({"x": X}, {}, None)
    assert binding.bound == ["x"] * times


def test_evaluation_sums_losses_and_gives_the_outputs(backend):
    total, outputs = backend.evaluate(X, Y)
    assert total == pytest.approx(3 * _expected(WEIGHTS, X, Y)[0], rel=1e-6)
    logits = X @ WEIGHTS[:6].reshape(3, 2).T + WEIGHTS[6:]
    np.testing.assert_allclose(outputs, logits, rtol=1e-6)
    assert backend.losses(X, Y).sum() == total
    np.testing.assert_allclose(backend.answer(X, "logits"), logits, rtol=1e-6)
    np.testing.assert_array_equal(backend.answer(X, "features"), X)


def test_very_large_logits_have_a_finite_loss(backend):
    backend.weights[:] *= 1e4
    total, _ = backend.evaluate(X, Y)
    assert np.isfinite(total)


def test_the_local_loop_descends(backend):
    data = DeviceData(X, Y, X[:0], Y[:0], X, Y)
    trainer = LocalTrainer(backend, data, TrainingSection(epochs=30, batch_size=2, learning_rate=0.3))
    fit = trainer.fit(WEIGHTS, FitPlan(), KEY)
    assert trainer.loss(fit.weights) < 0.5 * trainer.loss(WEIGHTS)
    frozen = np.ones(SPEC.size, np.bool_)
    frozen[:6] = False
    fit = trainer.fit(WEIGHTS, FitPlan(trainable=frozen), KEY)
    np.testing.assert_array_equal(fit.weights[:6], WEIGHTS[:6])
    assert (fit.weights[6:] != WEIGHTS[6:]).all()


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (X, np.array([0, 3, 1]), "label 3 is unknown: model hand:made has classes 0..2"),
        (X, np.array([0, -1, 1]), "label -1"),
        (X[:, :1], Y, r"takes samples of shape \(2,\); got a batch of \(3, 1\)"),
        (X[:2], Y, "with 3 labels"),
        (X[:0], Y[:0], "got a batch of"),
        (X, Y.astype(float), "got float32 and float64"),
        (X.astype(str), Y, "takes numbers"),
    ],
)
def test_what_the_runtime_would_take_for_granted_is_refused(backend, x, y, match):
    for compute in (lambda: backend.step(x, y, KEY), lambda: backend.evaluate(x, y)):
        with pytest.raises(ModelError, match=match):
            compute()


def test_weights_of_another_model_are_refused(backend):
    with pytest.raises(ModelError, match="has 9 weights"):
        backend.load(WEIGHTS[:5])


def test_a_loss_term_that_the_bundle_cannot_compute_is_named(backend):
    extra_loss = ExtraLoss(Distillation(WEIGHTS, 1.0, 2.0), (np.zeros((3, 3), np.float32),))
    with pytest.raises(ModelError, match=r"has no graph 'train\+distillation'"):
        backend.step(X, Y, KEY, extra_loss=extra_loss)


def test_features_that_the_model_does_not_have_are_named():
    graphs = dict(bundle().graphs)
    graphs[ANSWER] = graphs[ANSWER].keeping({"logits"})
    with pytest.raises(ModelError, match="choose another method or model"):
        OnnxBackend(bundle(graphs=graphs)).answer(X, "features")


def test_an_operator_that_the_runtime_lacks_is_one_line(monkeypatch):
    unknown = write_onnx(replace(training_graph(), nodes=(Node("Later", ("x",), ("loss",), {}),)))
    monkeypatch.setattr(onnx_sessions, "write_onnx", lambda _: unknown)
    backend = OnnxBackend(bundle())
    with pytest.raises(ModelError, match="cannot load model hand:made") as caught:
        backend.step(X, Y, KEY, tensors=frozenset())
    assert "\n" not in str(caught.value)


def test_an_old_runtime_is_named(monkeypatch):
    old = SimpleNamespace(__version__="1.15.1", __spec__=ModuleSpec("onnxruntime", None))
    monkeypatch.setitem(sys.modules, "onnxruntime", old)
    with raises(ModelError, "1.15.1", remedy="pip install 'onnxruntime>=1.16'"):
        onnx_sessions.runtime()


def test_no_runtime_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match="pip install"):
        OnnxBackend(bundle())


def test_few_sessions_are_kept(backend):
    names = ["out.bias", "out.weight"]
    for graph in (True, False):
        for wanted in ([], names[:1], names[1:], names):
            backend.step(X, Y, KEY, training=graph, tensors=frozenset(wanted))
    backend.evaluate(X, Y)
    assert len(backend._sessions._open) == onnx_sessions.MAX_SESSIONS


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from tests.helpers.linear_bundle import bundle\n"
        "from fleetune.edge_agent.training.onnx_backend import OnnxBackend\n"
        "from fleetune.protocols.randomness import Key\n"
        "import numpy as np\n"
        "OnnxBackend(bundle()).step(np.ones((2, 2), np.float32), np.array([0, 1]), Key(0))\n"
        "print([m for m in ('torch', 'onnx', 'matplotlib', 'ray', 'amqtt', 'scipy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_runtime_keeps_nothing_about_its_user(tmp_path):
    code = (
        "from tests.helpers.linear_bundle import bundle\n"
        "from fleetune.edge_agent.training.onnx_backend import OnnxBackend\n"
        "import numpy as np; from fleetune.protocols.randomness import Key\n"
        "OnnxBackend(bundle()).step(np.ones((2, 2), np.float32), np.array([0, 1]), Key(0))"
    )
    without = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment = {**without, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    assert [*tmp_path.rglob("*")] == []
