"""Scripts for processes with onnxruntime-training instead of onnxruntime.

One is a coordinator that exports bundles; the other is an agent that trains with them without torch.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.bundle.graph import Graph, Node
from fleetune.protocols.bundle.ort_training import TRAINING_MODEL
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.method.trainer import Fit, FitPlan, Pull
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec

KEY = Key.of("test", "ort-training")
MODELS = {
    "mlp": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "cnn-kapc": (1, 28, 28),
    "cnn-fedspu-cifar": (3, 32, 32),
    "resnet8": (3, 32, 32),
    "har-cnn": (9, 128),
    "tests.helpers.ort_training_scripts:images": (3, 16, 16),
    "tests.helpers.ort_training_scripts:tokens": (12,),
}
NUM_TOKENS = 50
FITTED = ("lenet5", "cnn-kapc")
SIZES = (16, 5, 2)
BATCHES = ("first", "second")  # a kink may lie between the rounded values of both sides once, but not twice
NUM_CLASSES = 10
LINEAR_WEIGHTS = np.array([1, -1, 0.5, 2, 0, 1, 0.1, 0.2, 0.3], np.float32)
LINEAR_X = np.array([[1, -1], [0.5, 2], [3, 0]], np.float32)
LINEAR_Y = np.array([0, 2, 1])


def batch(name, n, which="first"):
    """Samples and labels of one batch."""
    rng = KEY.child(name, n, which).generator()
    shape = (n, *MODELS[name])
    x = rng.integers(NUM_TOKENS, size=shape) if name.endswith(":tokens") else rng.normal(size=shape)
    return x.astype(np.float32), rng.integers(NUM_CLASSES, size=n)


def images(input_shape, num_classes):
    """A network with grouped and depthwise convolution, a residual, both norms, all poolings, and dropout."""
    from torch import nn

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(input_shape[0], 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()
            )
            self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GELU())
            self.grouped = nn.Sequential(
                nn.Conv2d(16, 32, 3, stride=2, groups=4), nn.BatchNorm2d(32), nn.SiLU()
            )
            self.pools = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))
            self.out = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, num_classes))

        def forward(self, x):
            hidden = self.stem(x)
            return self.out(self.pools(self.grouped(hidden + self.depthwise(hidden))))

    return Images()


def tokens(input_shape, num_classes):
    """A network with an embedding and the norm of language models."""
    from torch import nn

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(NUM_TOKENS, 16), nn.LayerNorm(16)
            self.out = nn.Linear(16 * input_shape[0], num_classes)

        def forward(self, x):
            return self.out(self.norm(self.embedding(x)).flatten(1))

    return Tokens()


def subsets(spec) -> list[frozenset[str]]:
    """Sets of parameters: the last layer, all but the first, the first, the middle one, none."""
    layers = list(spec.layers)
    groups = [layers[-1:], layers[1:], layers[:1], layers[len(layers) // 2 : len(layers) // 2 + 1], []]
    named = [[one for one in spec.tensors if one.layer in group and one.kind != "stat"] for group in groups]
    return [frozenset(tensor.name for tensor in group) for group in named]


def fitted(backend, weights) -> Fit:
    """20 steps with every option of a plan: 4 epochs of 5 batches of 8, the last one of 5."""
    rng = KEY.child("fit").generator()
    x, y = batch(backend.spec.name, 37)
    data = DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])
    settings = TrainingSection(epochs=4, batch_size=8, learning_rate=0.02, momentum=0.9, weight_decay=1e-3)
    target = weights + rng.normal(scale=0.01, size=weights.shape).astype(np.float32)
    plan = FitPlan(trainable=rng.random(weights.size) < 0.5, pull=Pull(target, 0.1), keep_last_gradient=True)
    return LocalTrainer(backend, data, settings).fit(weights, plan, KEY)


def export(folder: Path) -> None:
    """Write a bundle of each model with only the training model, and one small complete bundle."""
    from tests.helpers import linear_bundle

    from fleetune.coordinator.export.ort_training import gradient_model, training_files, training_part
    from fleetune.coordinator.export.steps import prepare
    from fleetune.coordinator.spec.spec_from_torch import draw
    from fleetune.protocols.model.architectures import build

    for name, shape in MODELS.items():
        spec, weights = draw(name, shape, NUM_CLASSES, KEY)
        module = build(name, shape, NUM_CLASSES)
        files, model = training_part(spec, module, weights), prepare(spec, module)
        kind = "i8" if model.samples.ids else "f4"
        bundle = Bundle(spec, {}, model.noises, kind, ort_training=files, weights=weights)
        (folder / f"{name}.bundle").write_bytes(bundle.encoded())
    forward = linear_bundle.training_graph().keeping(["loss"])
    files = training_files(linear_bundle.SPEC, gradient_model(linear_bundle.SPEC, forward))
    (folder / "linear.bundle").write_bytes(linear_bundle.bundle(ort_training=files).encoded())
    refused = replace(forward, nodes=tuple(_with_sign(forward)))
    (folder / "refusal.txt").write_text(_words(lambda: gradient_model(linear_bundle.SPEC, refused)))
    (folder / "wrong.txt").write_text(_words(_export_wrongly))


def _export_wrongly() -> None:
    """Write a model whose forward graph differs from its module."""
    from fleetune.coordinator.export import ort_training
    from fleetune.coordinator.spec.spec_from_torch import draw
    from fleetune.protocols.model.architectures import build

    def other(*model) -> Graph:
        graph = forward(*model)
        return replace(graph, nodes=tuple(replace(one, op=ops.get(one.op, one.op)) for one in graph.nodes))

    forward, ops = ort_training.forward_graph, {"Relu": "Sigmoid"}
    with patch.object(ort_training, "forward_graph", other):
        spec, weights = draw("mlp", MODELS["mlp"], NUM_CLASSES, KEY)
        ort_training.training_part(spec, build("mlp", MODELS["mlp"], NUM_CLASSES), weights)


def _with_sign(graph: Graph) -> Iterator[Node]:
    """The same nodes, with the logits' signs instead of the logits."""
    for node in graph.nodes:
        if node.outputs == ("logits",):
            yield replace(node, outputs=("before",))
            yield Node("Sign", ("before",), ("logits",), {})
        else:
            yield node


def train(folder: Path) -> None:
    """Train with the bundles as an agent does; write the arrays, and the errors for bad input."""
    from fleetune.edge_agent.training.ort_training_backend import OrtTrainingBackend

    found = {}
    for name in MODELS:
        bundle = _read(folder / f"{name}.bundle")
        backend = OrtTrainingBackend(bundle)
        for size, which in product(SIZES, BATCHES):
            _step(found, f"{name} {size} {which}", backend, bundle.weights, batch(name, size, which))
        for count, tensors in enumerate(subsets(bundle.spec)):
            samples = batch(name, SIZES[0])
            _step(found, f"{name} part {count}", backend, bundle.weights, samples, tensors=tensors)
        if name in FITTED:
            fit = fitted(backend, bundle.weights)
            found[f"{name} fit"], found[f"{name} fit gradient"] = fit.weights, fit.last_gradient
    bundle = _read(folder / "linear.bundle")
    backend = OrtTrainingBackend(bundle)
    backend.load(LINEAR_WEIGHTS)
    found["linear evaluate"] = backend.evaluate(LINEAR_X, LINEAR_Y)[0]
    found["linear loss"] = backend.step(LINEAR_X, LINEAR_Y, KEY, training=False)
    found["linear gradient"] = backend.gradient.copy()
    np.savez(folder / "found.npz", **found)
    model = bundle.ort_training[TRAINING_MODEL]
    other = _read(folder / "mlp.bundle").ort_training[TRAINING_MODEL]
    extra_loss = ExtraLoss(Distillation(LINEAR_WEIGHTS, 1.0, 2.0), (np.zeros((3, 3), np.float32),))
    refusals = {
        "label": _words(lambda: backend.step(LINEAR_X, LINEAR_Y + 1, KEY)),
        "shape": _words(lambda: backend.step(LINEAR_X[:, :1], LINEAR_Y, KEY)),
        "guide": _words(lambda: backend.step(LINEAR_X, LINEAR_Y, KEY, extra_loss=extra_loss)),
        "missing": _words(lambda: OrtTrainingBackend(replace(bundle, ort_training={}))),
        "damaged": _words(lambda: _step_with(bundle, model[:-9])),
        "foreign": _words(lambda: _step_with(bundle, other)),
        "mixed up": _words(lambda: _step_with(bundle, model.replace(b"Gemm", b"Germ"))),
    }
    modules = sorted(sys.modules)
    (folder / "told.json").write_text(json.dumps({"refusals": refusals, "modules": modules}))


def _step(found, name, backend, weights, samples, **what) -> None:
    """One step from `weights`; adds its results to `found`."""
    backend.load(weights)
    found[f"{name} loss"] = backend.step(*samples, KEY, **what)
    found[f"{name} gradient"] = backend.gradient.copy()
    found[f"{name} weights"] = backend.weights.copy()


def _read(path: Path) -> Bundle:
    return codec.decode(path.read_bytes(), Bundle, None)


def _words(act: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    try:
        act()
    except FleetuneError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing was wrong"


def _step_with(bundle: Bundle, model: bytes) -> None:
    from fleetune.edge_agent.training.ort_training_backend import OrtTrainingBackend

    spoiled = replace(bundle, ort_training={TRAINING_MODEL: model})
    OrtTrainingBackend(spoiled).step(LINEAR_X, LINEAR_Y, KEY)


if __name__ == "__main__":
    {"export": export, "train": train}[sys.argv[1]](Path(sys.argv[2]))
