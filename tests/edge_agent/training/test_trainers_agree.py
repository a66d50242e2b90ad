"""The same local training with torch and with ONNX Runtime: step by step, with all that a plan can ask."""

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.nightly import sooner

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import TrainingStopped
from fleetune.protocols.method.trainer import FitPlan, LowerLayers, Pull
from fleetune.protocols.model.compute_cost import below_largest
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.selection import Neurons

CLASSES = 7
SHAPES = {"mlp": (1, 8, 8), "har-cnn": (9, 64), "cnn-fedspu-cifar": (3, 16, 16), "resnet8": (1, 16, 16)}
CNNS = ("lenet5", "cnn-kapc", "har-cnn")
NORMED = ("cnn-fedspu-cifar", "cnn-fedspu-emnist")
SETTINGS = TrainingSection(epochs=2, batch_size=4, learning_rate=0.02, momentum=0.9, weight_decay=1e-3)
STEPS = 20
USER_MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.grouped = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8), nn.GELU())
        self.dropped = nn.Dropout2d(0.3)
        pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Sequential(pool, nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, classes))

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.dropped(x + self.grouped(x)))

def net(shape, classes):
    return Net(classes)

class Words(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.inner = nn.Linear(12, 16)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(16, classes)

    def forward(self, x):
        return self.out(self.drop(self.inner(self.words(x).mean(1)).tanh()))

def words(shape, classes):
    return Words(classes)
"""


@pytest.fixture
def user_models(tmp_path, monkeypatch):
    (tmp_path / "user_models_agree.py").write_text(USER_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))


_bundles = {}


def backends(name, shape=None):
    shape = shape or SHAPES.get(name, (1, 16, 16))
    if (name, shape) not in _bundles:
        _bundles[name, shape] = make_bundle(name, shape, CLASSES, Key(5))
    bundle = _bundles[name, shape]
    return TorchBackend.from_spec(bundle.spec), OnnxBackend(bundle)


def samples(shape, *, words=False):
    """38 for training: nine batches of four and one of two."""
    draw = Key.of("samples", *shape).generator()
    x = draw.integers(0, 30, (50, *shape)) if words else draw.standard_normal((50, *shape))
    x, y = x.astype(np.float32), draw.integers(0, CLASSES, 50)
    return DeviceData(x[:38], y[:38], x[:0], y[:0], x[38:], y[38:])


def trained(backend, data, plan, weights, settings=SETTINGS):
    return LocalTrainer(backend, data, settings).fit(weights, plan, Key.of("fit"))


def error(found, wanted):
    return np.linalg.norm(found.astype(float) - wanted) / np.linalg.norm(wanted.astype(float))


def plans(spec, weights):
    """Plain; a part of the neurons; held near other weights; the last layer only; lower ones seldom."""
    pull = Pull(weights + np.float32(0.1), 0.05)
    last = np.zeros(spec.size, np.bool_)
    last[spec.layers[[*spec.layers][-1]]] = True
    return {
        "plain": FitPlan(),
        "masked": FitPlan(trainable=Neurons(0.5, 3).mask(spec), pull=pull),
        "pulled": FitPlan(pull=pull, keep_last_gradient=True),
        "head": FitPlan(trainable=last, keep_last_gradient=True),
        "shallow": FitPlan(trainable=Neurons(0.5, 3).mask(spec), lower=LowerLayers(below_largest(spec), 0.4)),
    }


@pytest.mark.parametrize(
    "which", sooner(["plain", "masked", "pulled", "head", "shallow"], kept=["masked", "shallow"])
)
@pytest.mark.parametrize("name", CNNS)
def test_twenty_steps_end_within_a_millionth(name, which):
    torch_backend, onnx_backend = backends(name)
    spec, weights = torch_backend.spec, torch_backend.weights.copy()
    data, plan = samples(spec.input_shape), plans(spec, weights)[which]
    wanted, found = (trained(each, data, plan, weights) for each in (torch_backend, onnx_backend))
    assert wanted.num_steps == found.num_steps == STEPS
    assert error(found.weights, wanted.weights) < 1e-6
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    if plan.keep_last_gradient:
        assert error(found.last_gradient, wanted.last_gradient) < 1e-4
    if plan.trainable is not None:
        frozen = ~plan.trainable[: spec.num_parameters]
        np.testing.assert_array_equal(
            found.weights[: spec.num_parameters][frozen], weights[: spec.num_parameters][frozen]
        )


@pytest.mark.parametrize("optimiser", ["adamw", "rmsprop"])
def test_other_optimisers_clipping_and_augmentation_are_the_same_with_both(optimiser):
    torch_backend, onnx_backend = backends("lenet5")
    spec, weights = torch_backend.spec, torch_backend.weights.copy()
    data, plan = samples(spec.input_shape), plans(spec, weights)["masked"]
    settings = replace(SETTINGS, momentum=0.0, optimiser=optimiser, learning_rate=0.001, eps=1e-4)
    settings = replace(settings, clip_norm=1.0, augment=("crop", "flip"))
    wanted, found = (trained(each, data, plan, weights, settings) for each in (torch_backend, onnx_backend))
    assert error(found.weights, wanted.weights) < 1e-5
    plain = trained(onnx_backend, data, plan, weights, replace(settings, clip_norm=None, augment=()))
    assert error(plain.weights, wanted.weights) > 1e-3


@pytest.mark.parametrize("name", sooner([*NORMED, "resnet8"], kept=NORMED))
def test_batch_norm_trains_alike_and_keeps_the_same_statistics(name):
    """Where its inputs nearly cancel, rounding is what decides: a few steps, not a trajectory. They are of
    like size: on the few samples that batches of 16 leave, torch parts from itself by 1e-3, too, when
    ResNet-8's weights move by 1e-6.
    """
    torch_backend, onnx_backend = backends(name)
    spec, weights = torch_backend.spec, torch_backend.weights.copy()
    data = samples(spec.input_shape)
    settings = TrainingSection(epochs=1, batch_size=13, learning_rate=0.01)
    wanted, found = (
        trained(each, data, FitPlan(), weights, settings) for each in (torch_backend, onnx_backend)
    )
    assert error(found.weights, wanted.weights) < 1e-5
    np.testing.assert_allclose(
        found.weights[spec.num_parameters :], wanted.weights[spec.num_parameters :], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("name", "shape"), [("net", (2, 12, 12)), ("words", (9,))])
def test_dropout_drops_the_same_entries_in_a_users_model(name, shape, user_models):
    torch_backend, onnx_backend = backends(f"user_models_agree:{name}", shape)
    weights, data = torch_backend.weights.copy(), samples(shape, words=name == "words")
    settings = TrainingSection(epochs=1, batch_size=8, learning_rate=0.02)
    wanted, found = (
        trained(each, data, FitPlan(), weights, settings) for each in (torch_backend, onnx_backend)
    )
    assert error(found.weights, wanted.weights) < 1e-5
    one, other = Key.of("one"), Key.of("other")
    x, y = data.batch("train", np.arange(8))
    losses = []
    for key in (one, other, one):
        onnx_backend.load(weights)
        losses.append(onnx_backend.step(x, y, key))
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("kind", [Distillation, Contrast])
def test_loss_terms_are_the_same_terms(kind):
    torch_backend, onnx_backend = backends("lenet5")
    weights = torch_backend.weights.copy()
    others = [
        weights + np.float32(0.05) * Key.of(n).generator().standard_normal(weights.size, np.float32)
        for n in "ab"
    ]
    loss_term = Distillation(others[0], 0.7, 2.0) if kind is Distillation else Contrast(*others, 0.7, 0.5)
    data = samples(torch_backend.spec.input_shape)
    plan = FitPlan(loss_term=loss_term)
    plain, wanted, found = (
        trained(each, data, what, weights)
        for each, what in ((onnx_backend, FitPlan()), (torch_backend, plan), (onnx_backend, plan))
    )
    assert error(found.weights, wanted.weights) < 1e-6
    assert error(found.weights, plain.weights) > 1e-4


@pytest.mark.parametrize(
    "name", sooner(["mlp", "lenet5", "cnn-fedspu-cifar", "har-cnn", "resnet8"], kept=["lenet5", "har-cnn"])
)
def test_evaluation_and_its_gradient_agree(name):
    torch_backend, onnx_backend = backends(name)
    spec, weights = torch_backend.spec, torch_backend.weights.copy()
    weights[spec.num_parameters :] += np.float32(0.3)  # statistics of batch norm that have seen something
    data = samples(spec.input_shape)
    wanted, found = (LocalTrainer(each, data, SETTINGS) for each in (torch_backend, onnx_backend))
    for part in ("train", "test"):
        assert found.loss(weights, part) == pytest.approx(wanted.loss(weights, part), rel=1e-5)
        assert found.accuracy(weights, part) == wanted.accuracy(weights, part)
    assert error(found.gradient(weights), wanted.gradient(weights)) < 1e-5
    np.testing.assert_array_equal(onnx_backend.weights, weights)


def test_training_stops_between_two_steps_and_changes_nothing():
    _, backend = backends("lenet5")
    data, asked = samples(backend.spec.input_shape), []

    def stop():
        asked.append(1)
        return "enough" if len(asked) == 4 else None

    with pytest.raises(TrainingStopped, match="after 3 of 20 steps: enough"):
        LocalTrainer(backend, data, SETTINGS, stop).fit(backend.weights.copy(), FitPlan(), Key(1))
