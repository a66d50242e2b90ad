"""FedSPU's steps: the product's functions in the vectors' shapes."""

from collections.abc import Callable

import numpy as np

from fleetune.edge_agent.training.descent import Descent
from fleetune.protocols.method.averaging import Update, covered_average
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods.fedspu import rose, stopping_loss
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, neuron_mask, num_active


def flat(size):
    return ModelSpec("flat", (TensorSpec("w", (size,), "weight", "w", ((),)),), (), (1,), 2)


def aggregate(w_prev, uploads, masks_, n):
    updates = [
        (f"d{i}", Update(Patch(Entries(mask == 1), upload[mask == 1]), samples))
        for i, (upload, mask, samples) in enumerate(zip(uploads, masks_, n, strict=True))
    ]
    return covered_average(w_prev, updates, flat(w_prev.size))


def early_stop(history, lam=0.7):
    losses, stopped = [], []
    for train, validation in history:
        previous = losses[-1] if losses else None
        losses.append(stopping_loss(train, validation, lam))
        stopped.append(rose(losses[-1], previous))
        if stopped[-1]:
            break
    return [losses, stopped]


def masked_sgd(w, mask, grads, lr, momentum=0.0, weight_decay=0.0):
    weights, gradient = w.copy(), np.empty_like(w)
    settings = TrainingSection(learning_rate=lr, momentum=momentum, weight_decay=weight_decay)
    descent = Descent(weights, gradient, w.size, settings, FitPlan(trainable=mask == 1))
    for step in grads:
        gradient[:] = step
        descent.step()
    return weights


def merge(local, glob, mask):
    received = Patch(Entries(mask == 1), glob[mask == 1])
    return received.apply(local, flat(local.size))


def masks(layers, active):
    spec = network(layers)
    neurons = [
        np.isin(np.arange(size), chosen) for size, chosen in zip(spec.groups, active[:-1], strict=True)
    ]
    return {tensor.name: part for tensor, part in spec.views(neuron_mask(spec, neurons))}


def network(layers):
    """The layers in a row: each one's outputs are a group of neurons, but the last one's."""
    tensors = [tensor for index in range(len(layers)) for tensor in _tensors(layers, index)]
    groups = tuple(layer["out"] for layer in layers[:-1])
    return ModelSpec("row", tuple(tensors), groups, (layers[0]["in"],), max(2, layers[-1]["out"]))


def _tensors(layers, index):
    layer = layers[index]
    name, kernel, spatial = layer["name"], tuple(layer.get("k", ())), layer.get("spatial", 1)
    rows = (Span(index, 0, layer["out"]),) if index < len(layers) - 1 else ()
    columns = (Span(index - 1, 0, layer["in"], repeat=spatial),) if index else ()
    shape, rest = (layer["out"], layer["in"] * spatial, *kernel), tuple(() for _ in kernel)
    yield TensorSpec(f"{name}.weight", shape, "weight", name, (rows, columns, *rest))
    if layer.get("bias"):
        yield TensorSpec(f"{name}.bias", (layer["out"],), "bias", name, (rows,))
    if layer.get("bn"):
        yield TensorSpec(f"{name}.bn", (layer["out"],), "norm", name, (rows,))


def n_active(n, p):
    return num_active(n, p)


STEPS: dict[str, Callable] = {
    "fedspu:aggregate": aggregate,
    "fedspu:early_stop": early_stop,
    "fedspu:masked_sgd": masked_sgd,
    "fedspu:masks": masks,
    "fedspu:merge": merge,
    "fedspu:n_active": n_active,
}
