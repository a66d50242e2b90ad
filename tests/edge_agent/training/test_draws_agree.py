"""Both trainers draw the same random numbers: dropout of every kind, stochastic depth, and noise."""

import copy

import numpy as np
import pytest
import torch
from tests.helpers.drawing_models import CLASSES, FUNCTIONS, MODELS, SHAPE, Residual
from tests.helpers.nightly import sooner
from torch import nn

from fleetune.coordinator.export.graphs import export
from fleetune.coordinator.spec.spec_from_torch import describe, weights_of
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.torch_draws import GivenDraws
from fleetune.protocols.randomness import Key

SOON = ("encoder", "lstm, time first", *(name for name in FUNCTIONS if "depth" in name), "alpha dropout")


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def bundle_of(module):
    spec = describe("drawing:net", module, SHAPE, CLASSES)
    weights = weights_of(spec, module)
    made = export(spec, module, weights)
    cost = {"flops_per_sample": 1e6, "activation_bytes_per_sample": 1e5}
    bundle = Bundle(spec, made.graphs, made.noises, made.input_type, weights=weights, **cost)
    return read_bundle(bundle.encoded(), spec)


def batch(num_samples):
    rng = Key.of("batch", num_samples).generator()
    x = rng.normal(size=(num_samples, *SHAPE)).astype(np.float32)
    return x, rng.integers(CLASSES, size=num_samples)


@pytest.mark.parametrize("name", sooner(MODELS, kept=SOON))
def test_losses_and_gradients_are_the_same_with_both_trainers(name):
    module = seeded(MODELS[name])
    bundle = bundle_of(module)
    onnx_backend, torch_backend = OnnxBackend(bundle), TorchBackend(bundle.spec, module)
    onnx_backend.load(torch_backend.weights)
    for num_samples in (1, 2, 7):  # the bundle was made with 3 and 5
        x, y = batch(num_samples)
        for step in range(2):
            found, wanted = (one.step(x, y, Key(step)) for one in (onnx_backend, torch_backend))
            assert found == pytest.approx(wanted, rel=1e-6)
            error = np.linalg.norm(onnx_backend.gradient - torch_backend.gradient)
            assert error < 1e-6 * np.linalg.norm(torch_backend.gradient)


@pytest.mark.parametrize("name", MODELS)
def test_torch_draws_from_the_key_alone(name):
    backend = TorchBackend(describe("drawing:net", module := seeded(MODELS[name]), SHAPE, CLASSES), module)
    x, y = batch(9)
    first, again, other = (backend.step(x, y, key) for key in (Key(1), Key(1), Key(2)))
    assert first == again != other
    drawn, state = [], torch.get_rng_state()
    with GivenDraws(lambda index, noise: (drawn.append(noise), torch.ones(noise.shape) / 2)[1]):
        module.train()(torch.from_numpy(x))
    assert drawn
    assert torch.equal(torch.get_rng_state(), state)


def test_a_size_that_is_no_multiple_of_the_samples_is_refused():
    module = Residual(lambda x: x * torch.rand(len(x) + 1, 1, 1)[1:])
    with pytest.raises(ModelError, match=r"itself draws .* \(4, 1, 1\) for 3 samples and \(6, 1, 1\)"):
        bundle_of(module)


def test_noise_in_another_layout_has_the_samples_first():
    shapes = {
        "dropout of time first": ("n", 40),
        "dropout of batch times time": ("n", 40),
        "one mask for all samples": (5, 8),
    }
    for name, shape in shapes.items():
        (noise,) = bundle_of(Residual(FUNCTIONS[name])).noises
        assert noise.shape == shape


def test_a_generator_of_the_users_own_is_left_alone():
    generator = torch.Generator().manual_seed(1)
    expected = torch.empty(3).uniform_(generator=torch.Generator().manual_seed(1))
    with GivenDraws(lambda *_: torch.zeros(3)):
        assert torch.equal(torch.empty(3).uniform_(generator=generator), expected)


def test_copies_of_a_module_draw_alike():
    module = seeded(MODELS["encoder"])
    spec, (x, y) = describe("drawing:net", module, SHAPE, CLASSES), batch(4)
    one, other = (TorchBackend(spec, copy.deepcopy(module)) for _ in range(2))
    other.step(x, y, Key(5))  # what was drawn before does not matter
    assert one.step(x, y, Key(6)) == other.step(x, y, Key(6))


class Recomputed(torch.autograd.Function):
    """Runs a layer again in the backward pass, as `torch.utils.checkpoint` does.

    That function itself fails beside the fake graphics card of other tests.
    """

    @staticmethod
    def forward(context, layer, x):
        context.layer = layer
        context.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = (one.detach().requires_grad_() for one in context.saved_tensors)
        with torch.enable_grad():
            y = context.layer(x)
        return None, *torch.autograd.grad(y, x, gradient)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
def test_draws_in_the_backward_pass_are_refused(layer):
    module = Residual(lambda x: Recomputed.apply(layer, x))
    backend = TorchBackend(describe("drawing:net", module, SHAPE, CLASSES), module)
    with pytest.raises(ModelError, match="turn gradient checkpointing off"):
        backend.step(*batch(3), Key(1))
