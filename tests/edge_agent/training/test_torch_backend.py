"""The torch backend: gradients, statistics and training against plain torch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training import torch_steps
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer, batch_slices
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model import architectures
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.torch_draws import GivenDraws
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection

KEY = Key.of("test", "torch")
MODELS = [
    ("mlp", (1, 8, 8)),
    ("lenet5", (3, 32, 32)),
    ("lenet5", (1, 28, 28)),
    ("cnn-fedspu-cifar", (3, 32, 32)),
    ("cnn-fedspu-emnist", (1, 28, 28)),
    ("resnet8", (3, 32, 32)),
    ("resnet8", (1, 28, 28)),
    ("har-cnn", (9, 128)),
]


def batch(shape, n=6):
    rng = KEY.generator()
    return rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(10, size=n)


def module_with(spec, weights):
    """The same model as a plain module, without any of our views."""
    module = architectures.build(spec.name, spec.input_shape, spec.num_classes)
    state = {tensor.name: torch.tensor(part) for tensor, part in spec.views(weights)}
    module.load_state_dict(state, strict=False)
    return module


def flat(spec, module):
    state = module.state_dict()
    return np.concatenate([state[tensor.name].numpy().ravel() for tensor in spec.tensors])


def loaded(name, shape):
    spec, weights = draw(name, shape, 10, KEY)
    backend = TorchBackend.from_spec(spec)
    backend.load(weights)
    return backend, spec, weights


@pytest.mark.parametrize(("name", "shape"), MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_plain_autograd(name, shape, training):
    backend, spec, weights = loaded(name, shape)
    x, y = batch(shape)
    module = module_with(spec, weights).train(training)
    loss = functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()
    wanted = np.concatenate([p.grad.numpy().ravel() for p in module.parameters()])
    for _ in range(2):  # a second step does not add to the first
        backend.load(weights)
        assert backend.step(x, y, KEY, training=training) == pytest.approx(loss.item(), rel=1e-5)
    gradient = backend.gradient[: spec.num_parameters]
    np.testing.assert_allclose(gradient, wanted, atol=2e-5 * np.abs(wanted).max())
    assert not backend.gradient[spec.num_parameters :].any()
    np.testing.assert_allclose(backend.weights, flat(spec, module), atol=1e-6)
    assert np.array_equal(backend.weights[: spec.num_parameters], weights[: spec.num_parameters])


def parts_of(spec):
    """Some tensors to train: none, one layer each, the last two layers, every weight, and all."""
    layers = {layer: {t.name for t in spec.tensors if t.layer == layer} for layer in spec.layers}
    parts = [set(), *layers.values(), set.union(*list(layers.values())[-2:])]
    return [*parts, {t.name for t in spec.tensors if t.kind == "weight"}, {t.name for t in spec.tensors}]


@pytest.mark.parametrize(("name", "shape"), MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_some_tensors_are_the_same_to_the_bit(name, shape, training):
    backend, spec, weights = loaded(name, shape)
    loss = backend.step(*batch(shape), KEY, training=training)
    whole, after = backend.gradient.copy(), backend.weights.copy()
    for tensors in parts_of(spec):
        backend.load(weights)
        assert backend.step(*batch(shape), KEY, training=training, tensors=tensors) == loss
        assert np.array_equal(backend.weights, after)  # statistics follow the data all the same
        for tensor, gradient in spec.views(backend.gradient):
            expected = whole[spec.slices[tensor.name]] if tensor.name in tensors else np.float32(0)
            assert np.array_equal(gradient.ravel(), np.broadcast_to(expected, tensor.size))
    backend.load(weights)
    backend.step(*batch(shape), KEY, training=training)
    assert np.array_equal(backend.gradient, whole)


def test_what_only_the_other_gradients_would_need_is_not_computed():
    backend, spec, _ = loaded("lenet5", (3, 32, 32))

    def flops(**settings):
        with FlopCounterMode(display=False) as counter:
            backend.step(*batch((3, 32, 32), 2), KEY, **settings)
        return counter.get_total_flops()

    forward, head = flops(tensors=()), 2 * 2 * 84 * 10
    assert flops(tensors={"out.weight", "out.bias"}) == forward + head
    assert flops(tensors={"fc2.bias"}) == forward + head
    assert flops(tensors={"fc2.weight"}) == forward + head + 2 * 2 * 120 * 84
    first = 2 * 2 * (28 * 28) * (6 * 3 * 5 * 5)  # whose input needs no gradient
    assert flops(tensors={tensor.name for tensor in spec.tensors}) == flops() == 3 * forward - first


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn-fedspu-emnist"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 1e-2)])
def test_training_equals_torch_sgd(name, momentum, weight_decay):
    backend, spec, weights = loaded(name, (1, 28, 28))
    x, y = batch((1, 28, 28), 19)
    settings = TrainingSection(
        epochs=2, batch_size=6, learning_rate=0.02, momentum=momentum, weight_decay=weight_decay
    )
    fit = LocalTrainer(backend, DeviceData(x, y, x[:0], y[:0], x, y), settings).fit(weights, FitPlan(), KEY)
    module = module_with(spec, weights)
    rates = {"lr": 0.02, "momentum": momentum, "weight_decay": weight_decay}
    optimiser = torch.optim.SGD(module.parameters(), **rates)
    losses = []
    for epoch in range(2):
        order = KEY.child("epoch", epoch).permutation(19)
        for rows in [order[part] for part in batch_slices(19, 6)]:
            optimiser.zero_grad()
            loss = functional.cross_entropy(module(torch.tensor(x[rows])), torch.tensor(y[rows]))
            loss.backward()
            optimiser.step()
            losses.append((loss.item(), len(rows)))
    learned, plain = (np.split(vector, [spec.num_parameters]) for vector in (fit.weights, flat(spec, module)))
    np.testing.assert_allclose(learned[0], plain[0], atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(learned[1], plain[1], atol=1e-5)  # sums over images, in another order
    assert fit.num_steps == len(losses) == 6
    assert fit.loss == pytest.approx(sum(loss * size for loss, size in losses[3:]) / 19, rel=1e-5)


def test_evaluation_is_in_evaluation_mode_and_changes_nothing():
    backend, spec, weights = loaded("cnn-fedspu-emnist", (1, 28, 28))
    x, y = batch((1, 28, 28), 20)
    backend.step(x, y, KEY)  # leaves training mode behind
    backend.load(weights)
    module = module_with(spec, weights).eval()
    with torch.no_grad():
        logits = module(torch.from_numpy(x))
    loss, outputs = backend.evaluate(x, y)
    assert loss == pytest.approx(functional.cross_entropy(logits, torch.from_numpy(y)).item() * 20, rel=1e-5)
    np.testing.assert_allclose(outputs, logits.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(backend.losses(x, y).sum(), loss, rtol=1e-6)
    assert np.array_equal(backend.weights, weights)


def test_weights_and_gradient_stay_the_same_memory():
    backend, _, weights = loaded("cnn-fedspu-emnist", (1, 28, 28))
    w, g = backend.weights, backend.gradient
    x, y = batch((1, 28, 28))
    backend.step(x, y, KEY)
    backend.evaluate(x, y)
    backend.load(weights * 2)
    assert np.array_equal(w, weights * 2)
    assert np.shares_memory(w, backend.weights)
    assert np.shares_memory(g, backend.gradient)
    w[:] = 0
    assert backend.evaluate(x, y)[0] == pytest.approx(len(y) * np.log(10), rel=1e-6)


def test_dropout_is_drawn_from_the_key_and_the_global_generator_is_left_alone():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    backend = TorchBackend(describe("dropout", module, (1, 8, 8), 10), module)
    x, y = batch((1, 8, 8))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (backend.step(x, y, key) for key in (KEY, KEY, KEY.child("other")))
    assert torch.equal(torch.rand(3), expected)
    assert first == again != other


def test_dropout_drops_what_every_backend_drops():
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 10)
    )
    backend = TorchBackend(describe("dropout", module, (1, 8, 8), 10), module)
    x, y = batch((1, 8, 8))
    channels = torch.from_numpy(Noise(("n", 4, 1, 1), 0.4).draw(KEY, 0, 6))
    entries = torch.from_numpy(Noise(("n", 144), 0.5).draw(KEY, 1, 6))
    for _ in range(2):
        hidden = module[0](torch.from_numpy(x)) * channels
        logits = module[4](hidden.flatten(1) * entries)
        expected = functional.cross_entropy(logits, torch.from_numpy(y)).item()
        assert backend.step(x, y, KEY) == pytest.approx(expected, rel=1e-6)
    plain = functional.cross_entropy(module.eval()(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert backend.step(x, y, KEY, training=False) == pytest.approx(plain, rel=1e-6)


def test_a_model_that_draws_nothing_is_watched_for_draws_only_once(monkeypatch):
    watched = []
    monkeypatch.setattr(
        torch_steps, "GivenDraws", lambda *them, **more: (watched.append(them), GivenDraws(*them, **more))[1]
    )
    backend, _, _ = loaded("mlp", (1, 8, 8))
    for training in (False, True, True, True):
        backend.step(*batch((1, 8, 8)), KEY, training=training)
    assert len(watched) == 2  # the forward and the backward pass of the first step in training


def test_from_spec_leaves_the_global_generator_alone():
    spec, _ = draw("mlp", (1, 8, 8), 10, KEY)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    TorchBackend.from_spec(spec)
    assert torch.equal(torch.rand(3), expected)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


def test_models_of_whole_numbers_get_them():
    backend = TorchBackend(describe("tokens", Tokens(), (5,), 10), Tokens())
    tokens = KEY.generator().integers(20, size=(6, 5)).astype(np.float32)
    assert np.isfinite(backend.step(tokens, np.arange(6), KEY))
    assert backend.gradient.any()


def test_frozen_parameters_of_the_module_are_not_the_fleets():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))
    module[1].requires_grad_(False)
    spec = describe("head", module, (1, 8, 8), 10)
    backend = TorchBackend(spec, module)
    assert spec.size == 170
    backend.step(*batch((1, 8, 8)), KEY)
    assert backend.gradient.any()


def test_another_architecture_is_refused_by_the_tensor_that_differs():
    spec, _ = draw("lenet5", (1, 28, 28), 10, KEY)
    with pytest.raises(
        ModelError, match=r"differs from the fleet's at conv1\.weight: the fleet has .*\(6, 1,"
    ):
        TorchBackend(spec, architectures.build("lenet5", (3, 28, 28), 10))
    longer = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10))
    shorter = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ModelError, match=r"at 2\.weight: .*this device \(nothing\)"):
        TorchBackend(describe("x", longer, (1, 8, 8), 10), shorter)
    with pytest.raises(ModelError, match=r"\(nothing\).*this device 2\.weight"):
        TorchBackend(describe("x", shorter, (1, 8, 8), 10), longer)


def test_another_norm_is_refused():
    with_statistics = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    without = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(ModelError, match=r"1\.running_mean"):
        TorchBackend(describe("x", with_statistics, (1, 8, 8), 10), without)
    with pytest.raises(ModelError, match=r"1\.running_mean"):
        TorchBackend(describe("x", without, (1, 8, 8), 10), with_statistics)


def test_weights_of_another_length_are_refused():
    backend, _, weights = loaded("mlp", (1, 8, 8))
    with pytest.raises(ModelError, match=r"model mlp has \d+ weights, but got an array of shape"):
        backend.load(weights[:-1])


def test_a_batch_the_model_cannot_take_is_a_model_error():
    norm = nn.BatchNorm1d(64, track_running_stats=False)  # has no statistics to use instead of the batch's
    module = nn.Sequential(nn.Flatten(), norm, nn.Linear(64, 10))
    backend = TorchBackend(describe("norm", module, (1, 8, 8), 10), module)
    with pytest.raises(
        ModelError, match=r"cannot train on a batch of 1: a batch norm without running statistics"
    ):
        backend.step(*batch((1, 8, 8), 1), KEY)


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_in_bfloat16_training_steps_alone_round(name, shape):
    exact, spec, weights = loaded(name, shape)
    rounded = TorchBackend.from_spec(spec, precision="bfloat16")
    x, y = batch(shape)

    def gradient(backend, *, training):
        backend.load(weights)
        backend.step(x, y, KEY, training=training)
        return backend.gradient.copy()

    ours, theirs = (gradient(one, training=True) for one in (rounded, exact))
    assert 1e-4 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.3  # of six random samples
    assert np.array_equal(*(gradient(one, training=False) for one in (rounded, exact)))
    for backend in (rounded, exact):
        backend.load(weights)
    assert rounded.evaluate(x, y)[0] == exact.evaluate(x, y)[0]
    assert np.array_equal(rounded.losses(x, y), exact.losses(x, y))
    assert np.array_equal(rounded.answer(x, "features"), exact.answer(x, "features"))
