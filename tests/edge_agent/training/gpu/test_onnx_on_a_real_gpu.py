"""ONNX Runtime on a real card, where `onnxruntime-gpu` is installed: it learns what the processor learns."""

import numpy as np
import pytest

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.descent import Descent
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.onnx_sessions import runtime
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection

pytestmark = pytest.mark.skipif(
    "CUDAExecutionProvider" not in runtime().get_available_providers(),
    reason="onnxruntime here has no provider for cards (onnxruntime-gpu has)",
)
SHAPES = {
    "mlp": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "cnn-kapc": (1, 28, 28),
    "resnet8": (3, 16, 16),
    "har-cnn": (9, 128),
}
CLASSES = 6


def trained(backend, weights, x, y, tensors=None):
    """Losses and weights after some steps."""
    backend.load(weights)
    settings = TrainingSection(learning_rate=0.02, momentum=0.5)
    size = backend.spec.num_parameters
    descent = Descent(backend.weights, backend.gradient, size, settings, FitPlan(), None)
    losses = []
    for step in range(6):
        losses.append(backend.step(x, y, Key(step), tensors=tensors))
        descent.step()
    return losses, backend.weights.copy()


def gradient_at(backend, weights, x, y, tensors):
    backend.load(weights)
    backend.step(x, y, Key(9), tensors=tensors)
    return backend.gradient.copy()


def apart(ours, theirs):
    """Of their length."""
    return np.linalg.norm(np.subtract(ours, theirs)) / max(np.linalg.norm(theirs), 1e-12)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("only_the_last", [False, True])
def test_it_trains_as_the_processor_does(name, only_the_last):
    bundle = make_bundle(name, SHAPES[name], CLASSES, Key(3))
    here, there = OnnxBackend(bundle), OnnxBackend(bundle, device="cuda")
    random = np.random.default_rng(1)
    weights = draw(name, SHAPES[name], CLASSES, Key(3))[1]
    x = random.standard_normal((7, *SHAPES[name])).astype(np.float32)
    y = random.integers(0, CLASSES, 7)
    tensors = [one.name for one in bundle.spec.tensors if one.kind != "stat"][-2:] if only_the_last else None
    wanted, found, again = (trained(one, weights, x, y, tensors) for one in (here, there, there))
    # as torch does there: tests/tools/simulator/test_real_gpu.py
    assert found[0] == pytest.approx(wanted[0], rel=2e-2 if name == "resnet8" else 1e-3)
    assert apart(found[1], wanted[1]) < 1e-2
    gradients = [gradient_at(one, wanted[1], x, y, tensors) for one in (there, here)]
    assert apart(*gradients) < 1e-3
    assert found[0] == again[0]
    assert np.array_equal(found[1], again[1])
    here.load(weights)
    there.load(weights)
    assert apart(there.evaluate(x, y)[1], here.evaluate(x, y)[1]) < 1e-4
    assert apart(there.losses(x, y), here.losses(x, y)) < 1e-4
