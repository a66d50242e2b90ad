"""A sub-model trained as a smaller network: what masking makes to a millionth, or masked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.nightly import sooner
from torch import nn

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.coordinator.spec.spec_from_torch import describe
from fleetune.edge_agent.training import smaller_network
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates
from fleetune.edge_agent.training.smaller_network import sub_model_of
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.edge_agent.training.trainers import trains_smaller
from fleetune.protocols.method.averaging import PersonalModel
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.submodels import Task, cut
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.methods.fjord import FjORD
from fleetune.protocols.model.smaller import has_smaller
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import ChosenNeurons, draw_neurons

SHAPES = {"cnn-kapc": (1, 28, 28), "resnet8": (1, 28, 28), "har-cnn": (9, 128), "lenet5": (1, 28, 28)}
PLAIN = TrainingSection(epochs=1, batch_size=8, learning_rate=0.01)
ALL = structs.replace(PLAIN, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
# A step moves by up to learning_rate / eps times what rounding moves a gradient by: no more than that here.
ADAMW = structs.replace(PLAIN, optimiser="adamw", learning_rate=0.001, eps=1e-3, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    """LeNet-5 is masked with torch, for it gains too little; here it is not."""
    monkeypatch.setattr(smaller_network, "TORCH_LEAST_PRODUCTS", 0)


@pytest.fixture(scope="module")
def backends():
    """Of each model with each trainer, and weights to begin with."""
    torch.set_num_threads(1)
    made = {}
    for name, shape in SHAPES.items():
        bundle = make_bundle(name, shape, 10, Key(1))
        torch_backend = TorchBackend.from_spec(bundle.spec)
        weights = torch_backend.weights.copy()
        made |= {(name, "torch"): (torch_backend, weights), (name, "onnx"): (OnnxBackend(bundle), weights)}
    return made


def samples(shape, num=24, classes=10):
    draw = Key.of("test", "smaller").generator()
    x, y = draw.standard_normal((num, *shape)).astype(np.float32), draw.integers(0, classes, num)
    return DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])


def drawn(spec, ratio, key=7):
    return ChosenNeurons(np.concatenate(draw_neurons(spec.groups, ratio, key)))


def plans(spec, weights, part):
    """Weights to begin with, and how they are trained masked and alone."""
    mask = part.mask(spec)
    masked = FitPlan(trainable=mask, pull=Pull(weights, 0.05))
    return cut(weights, mask, spec), masked, replace(masked, neurons=part)


def both(backend, weights, part, training, states=(None, None)):
    start, masked, alone = plans(backend.spec, weights, part)
    trainer = LocalTrainer(backend, samples(backend.spec.input_shape), training)
    return [
        replace(trainer, optimiser_states=state).fit(start, plan, Key(3))
        for plan, state in zip((masked, alone), states, strict=True)
    ]


@pytest.mark.parametrize("training", sooner([PLAIN, ALL, ADAMW], kept=[ALL]), ids=["plain", "all", "adamw"])
@pytest.mark.parametrize("ratio", sooner([0.2, 0.4, 0.6, 0.9], kept=[0.4]))
@pytest.mark.parametrize("trainer", ["torch", "onnx"])
@pytest.mark.parametrize("name", SHAPES)
def test_it_trains_what_masking_trains(name, trainer, ratio, training, backends):
    backend, weights = backends[name, trainer]
    part = drawn(backend.spec, ratio)
    assert sub_model_of(backend, *plans(backend.spec, weights, part)[::2])
    masked, alone = both(backend, weights, part, training)
    size = backend.spec.num_parameters
    assert np.abs(masked.weights - cut(weights, part.mask(backend.spec), backend.spec))[:size].max() > 1e-4
    np.testing.assert_allclose(alone.weights, masked.weights, rtol=0, atol=1e-6)
    assert not alone.weights[:size][~part.mask(backend.spec)[:size]].any()
    assert (alone.num_steps, alone.loss) == (masked.num_steps, pytest.approx(masked.loss, rel=1e-6))


@pytest.mark.parametrize("trainer", ["torch", "onnx"])
@settings(deadline=None, max_examples=15)
@given(bits=st.lists(st.booleans(), min_size=226, max_size=226))
def test_any_neurons_will_do(trainer, backends, bits):
    """Of LeNet-5's groups of 6, 16, 120 and 84; a group may have none, and is then masked."""
    backend, weights = backends["lenet5", trainer]
    masked, alone = both(backend, weights, ChosenNeurons(np.array(bits)), ALL)
    np.testing.assert_allclose(alone.weights, masked.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [ALL, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("trainer", ["torch", "onnx"])
def test_what_the_optimiser_keeps_is_the_same(trainer, training, backends):
    """Over three rounds, in which the part changes: what is outside is remembered."""
    backend, weights = backends["har-cnn", trainer]
    kept = [(), ()]
    for round_ in range(3):
        states = [RoundOptimiserStates(one) for one in kept]
        both(backend, weights, drawn(backend.spec, 0.5, round_), training, states)
        kept = [state.after for state in states]
    (masked,), (alone,) = kept
    assert len(masked.vectors) == (3 if training is ADAMW else 1)
    for ours, theirs in zip(alone.vectors, masked.vectors, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_methods_train_a_smaller_network(backends, monkeypatch):
    backend, weights = backends["har-cnn", "onnx"]
    method = FjORD(backend.spec)
    task = Task(Patch.of(weights, method.first_selection(0.4), backend.spec), 0.4)
    trainer = LocalTrainer(backend, samples(backend.spec.input_shape), ALL)
    steps = []
    whole = backend.step
    backend.smaller_network((12, 25, 25))
    monkeypatch.setattr(backend, "step", lambda *given, **more: steps.append(1) or whole(*given, **more))
    _, update = method.work(PersonalModel(weights), task, trainer, Budget(), Key(5))
    assert not steps
    assert update.patch.values.size == np.count_nonzero(method.first_selection(0.4).mask(backend.spec))


@pytest.mark.parametrize("trainer", ["torch", "onnx"])
def test_a_network_is_built_once_for_all_parts_of_a_size(trainer, backends):
    backend, _ = backends["lenet5", trainer]
    assert backend.smaller_network((2, 6, 48, 33)) is backend.smaller_network((2, 6, 48, 33))
    assert backend.smaller_network(backend.spec.groups) is None
    assert backend.smaller_network((0, 6, 48, 33)) is None


def test_a_broken_promise_is_noticed_and_masked(backends):
    backend, weights = backends["lenet5", "onnx"]
    start, _, alone = plans(backend.spec, weights, drawn(backend.spec, 0.5))
    assert sub_model_of(backend, start, alone)
    assert sub_model_of(backend, weights, alone) is None
    assert sub_model_of(backend, start, replace(alone, trainable=None)) is None
    everything = np.arange(backend.spec.size) < backend.spec.num_parameters
    assert sub_model_of(backend, start, replace(alone, trainable=everything)) is None
    assert sub_model_of(backend, start, replace(alone, keep_last_gradient=True)) is None


class Net(nn.Module):
    """Two layers and what stands between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.between, self.out = nn.Linear(12, 10), between, nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.between(self.first(x)))


class Centred(nn.Module):
    """The mean over neurons counts them all: fewer of them have another one."""

    def forward(self, x):
        return (x - x.sum(1, keepdim=True) / x.shape[1]).relu()


class Counting(nn.Module):
    """Looks at how many neurons there are."""

    def forward(self, x):
        return x.relu().view(-1, 10)


class Shifted(nn.Module):
    """Statistics of absent neurons do not fade to 0: they see sigmoid(0)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(x.sigmoid())


DIFFERENT = {
    "dropout": nn.Sequential(nn.ReLU(), nn.Dropout(0.001)),
    "random": nn.RReLU(),
    "layer norm": nn.LayerNorm(10),
    "centred": Centred(),
    "counting": Counting(),
    "shifted": Shifted(),
}
SAME = {
    "sigmoid": nn.Sigmoid(),
    "batch norm": nn.Sequential(nn.BatchNorm1d(10, momentum=0.3), nn.ReLU()),
    "mean of batches": nn.Sequential(nn.BatchNorm1d(10, momentum=None), nn.ReLU()),
    "prelu": nn.PReLU(10),
}


def user_backend(between):
    module = Net(between)
    return TorchBackend(describe("user", module, (12,), 3), module)


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_would_be_another_function_is_masked(which):
    backend = user_backend(DIFFERENT[which])
    if backend.spec.groups:
        assert backend.smaller_network((5,)) is None


@pytest.mark.parametrize("which", SAME)
def test_what_is_the_same_function_trains_the_same(which):
    backend = user_backend(SAME[which])
    assert has_smaller(backend.spec)
    assert backend.smaller_network((5,)) is not None
    weights, part = backend.weights.copy(), drawn(backend.spec, 0.5)
    start, masked, alone = plans(backend.spec, weights, part)
    trainer = LocalTrainer(backend, samples((12,), classes=3), ALL)
    wanted, found = (trainer.fit(start, plan, Key(3)) for plan in (masked, alone))
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=0, atol=1e-6)
    assert not np.array_equal(wanted.weights, start)


def test_torch_leaves_small_networks_whole(backends, monkeypatch):
    monkeypatch.undo()
    specs = {name: backends[name, "torch"][0].spec for name in SHAPES}
    assert [name for name, spec in specs.items() if not trains_smaller("torch", spec)] == ["lenet5"]
    assert trains_smaller("onnx", specs["lenet5"])
    assert not trains_smaller("ort-training", specs["resnet8"])
    assert TorchBackend.from_spec(specs["lenet5"]).smaller_network((2, 6, 48, 33)) is None
