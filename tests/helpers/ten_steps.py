"""Train LeNet-5 for ten steps with ONNX Runtime, on any board that has Fleetune, and print the losses."""

import json

import numpy as np

from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.bundle.first_weights import draw_weights
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.randomness import Key

LEARNING_RATE = 0.15


def ten_losses():
    bundle = shipped_bundle("lenet5", (3, 32, 32), 10)
    backend = OnnxBackend(bundle)
    backend.load(draw_weights(bundle.recipe, bundle.spec, Key.of("weights")))
    y = np.arange(16) % 10
    x = (Key.of("x").uniform(16 * 3 * 32 * 32) - 0.5).astype(np.float32).reshape(16, 3, 32, 32)
    x[np.arange(16), :, 2 * y] += 4  # a bright row marks the class
    losses = []
    for step in range(10):
        losses.append(backend.step(x, y, Key.of("step", step)))
        backend.weights[:] -= LEARNING_RATE * backend.gradient
    return losses


if __name__ == "__main__":
    print(json.dumps(ten_losses()))
