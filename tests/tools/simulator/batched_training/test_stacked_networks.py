"""Several networks that step as one, held against a `TorchBackend` of each."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.edge_agent.training.gpu.test_cuda_graphs import Repeating
from tests.helpers import card
from torch import nn

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR, torch_device
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of
from fleetune.tools.simulator.batched_training.stacked_networks import (
    Evaluation,
    SingleCall,
    StackedNetworks,
    Step,
)

SHAPES = {
    "mlp": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "resnet8": (3, 16, 16),
    "resnet18": (3, 8, 8),
    "har-cnn": (9, 128),
}
CLASSES, ROWS = 6, 3


def shipped(name, device=PROCESSOR):
    spec, weights = draw(name, SHAPES[name], CLASSES, Key(3))
    return partial(TorchBackend.from_spec, spec, device=device), weights


def own(module, shape, task=None, classes=CLASSES):
    def make():
        torch.manual_seed(0)
        made = module()
        spec = describe("own", made, shape, classes)
        return TorchBackend(spec, made, *([] if task is None else [task]))

    return make, make().weights.copy()


def stacked(make, weights, rows=ROWS):
    """Networks of rows that differ, and each of them alone."""
    networks, alone = StackedNetworks(make(), rows), [make() for _ in range(rows)]
    for row, backend in enumerate(alone):
        backend.load(weights * np.float32(1 + 0.05 * row))
        networks.weights[row] = backend.weights
    return networks, alone


def steps(make, samples=8, *, training=True, extra=None, tensors=None, seed=1):
    random, backend = np.random.default_rng(seed), make()
    shape = (samples, *backend.spec.input_shape)
    found = []
    for row in range(ROWS):
        x = random.standard_normal(shape).astype(np.float32)
        if backend.vocabulary is not None:
            x = random.integers(0, backend.vocabulary, shape)
        y = random.integers(0, CLASSES, samples)
        if backend.task.kind == "regression":
            y = random.standard_normal((samples, CLASSES)).astype(np.float32)
        y = backend.task.targets(x, y)
        extra_loss = None if extra is None else extra(random, samples)
        found.append(Step(x, y, Key(row), training, extra_loss, tensors))
    return found


def train_alone(backend, step):
    return backend.step(
        step.x, step.y, step.key, training=step.training, extra_loss=step.extra_loss, tensors=step.tensors
    )


def assert_alike(networks, alone, asked, rate=0.01):
    """A step of all is that of each, but for the order of sums; then all walk, from the same place."""
    together = networks.carry_out(dict(enumerate(asked)))
    for row, (backend, step) in enumerate(zip(alone, asked, strict=True)):
        assert together[row] == pytest.approx(train_alone(backend, step), rel=1e-5)
        scale = max(np.abs(backend.gradient).max(), 1e-6)
        np.testing.assert_allclose(networks.gradients[row], backend.gradient, atol=1e-4 * scale)
        np.testing.assert_allclose(networks.weights[row], backend.weights, rtol=1e-5, atol=1e-6)
        trained = slice(0, backend.spec.num_parameters)
        backend.weights[trained] -= rate * backend.gradient[trained]
        networks.weights[row] = backend.weights


def assert_at_once(networks, monkeypatch):
    """Nothing is done alone from here on."""
    monkeypatch.setattr(networks, "_alone", lambda *_: pytest.fail("it was done alone"))


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "resnet18"])  # see stacked._TOLERANCE
def test_a_step_of_all_is_that_of_each(name, monkeypatch):
    networks, alone = stacked(*shipped(name))
    assert_at_once(networks, monkeypatch)
    for number in range(2):
        assert_alike(networks, alone, steps(shipped(name)[0], seed=number))


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("name", ["mlp", "resnet8"])
def test_steps_that_a_card_repeats_are_the_same(name, rows, monkeypatch):
    make, weights = shipped(name)
    (networks, _), (others, _) = (stacked(make, weights, rows) for _ in range(2))
    networks._cuda_graphs = Repeating()
    for all_of_them in (networks, others):
        assert_at_once(all_of_them, monkeypatch)
    names = [tensor.name for tensor in make().spec.tensors if tensor.kind != "stat"]
    for number in range(16):
        tensors = frozenset(names[-2:]) if number % 4 == 3 else None
        asked = dict(enumerate(steps(make, 5 if number % 3 else 4, tensors=tensors, seed=number)))
        found, wanted = networks.carry_out(asked), others.carry_out(asked)
        assert found == wanted
        for row in asked:
            assert np.array_equal(networks.gradients[row], others.gradients[row])
            assert np.array_equal(networks.weights[row], others.weights[row])
    assert networks._cuda_graphs.num_shown >= 2
    if rows > ROWS:
        assert not networks.gradients[ROWS].any()


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_in_bfloat16_a_step_of_all_rounds_as_that_of_each(name, monkeypatch):
    spec, weights = draw(name, SHAPES[name], CLASSES, Key(3))
    make = partial(TorchBackend.from_spec, spec, precision="bfloat16")
    (networks, alone), exact = stacked(make, weights), shipped(name)[0]()
    assert_at_once(networks, monkeypatch)
    asked = steps(make)
    together = networks.carry_out(dict(enumerate(asked)))
    for row, (backend, step) in enumerate(zip(alone, asked, strict=True)):
        exact.load(backend.weights)
        assert together[row] == pytest.approx(train_alone(backend, step), rel=1e-2)
        train_alone(exact, step)
        ours, theirs = networks.gradients[row], exact.gradient
        assert 1e-4 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.1
        assert np.array_equal(networks.weights[row], backend.weights)


@pytest.mark.parametrize("name", ["lenet5", "resnet8"])
def test_as_it_evaluates_and_of_some_tensors(name, monkeypatch):
    make, weights = shipped(name)
    networks, alone = stacked(make, weights)
    assert_at_once(networks, monkeypatch)
    names = [tensor.name for tensor in make().spec.tensors if tensor.kind != "stat"]
    assert_alike(networks, alone, steps(make, training=False))
    assert_alike(networks, alone, steps(make, tensors=frozenset(names[-2:])))
    assert not networks.gradients[0][: make().spec.slices[names[1]].start].any()
    assert_alike(networks, alone, steps(make, tensors=frozenset()))
    assert not networks.gradients.any()
    asked = [Evaluation(step.x, step.y) for step in steps(make)]
    for row, (loss, outputs) in networks.carry_out(dict(enumerate(asked))).items():
        wanted = alone[row].evaluate(asked[row].x, asked[row].y)
        assert loss == pytest.approx(wanted[0], rel=1e-5)
        np.testing.assert_allclose(outputs, wanted[1], rtol=1e-4, atol=1e-5)


def distilled(random, samples):
    answers = random.standard_normal((samples, CLASSES)).astype(np.float32)
    return ExtraLoss(Distillation(np.zeros(1, np.float32), 0.5, 2.0), (answers,))


def contrasted(random, samples):
    near, far = random.standard_normal((2, samples, 84)).astype(np.float32)
    return ExtraLoss(Contrast(np.zeros(1, np.float32), np.zeros(1, np.float32), 0.5, 2.0), (near, far))


@pytest.mark.parametrize("extra", [distilled, contrasted])
def test_loss_terms(extra):
    make, weights = shipped("lenet5")
    assert_alike(*stacked(make, weights), steps(make, extra=extra))


def dropping():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(4 * 36, CLASSES),
    )  # fmt: skip


def test_dropout_drops_what_it_drops_alone(monkeypatch):
    networks, alone = stacked(*own(dropping, (1, 8, 8)))
    assert_at_once(networks, monkeypatch)
    for seed in range(2):
        assert_alike(networks, alone, steps(own(dropping, (1, 8, 8))[0], seed=seed))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


def test_token_ids(monkeypatch):
    networks, alone = stacked(*own(Words, (5,)))
    assert_at_once(networks, monkeypatch)
    assert_alike(networks, alone, steps(own(Words, (5,))[0]))


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "regression", "loss": "huber"},
        {"kind": "reconstruction"},
        {"label_smoothing": 0.1},
        {"class_weights": (1, 2, 1, 1, 3, 1)},
    ],
)
def test_other_losses(section, monkeypatch):
    task = task_of(TaskSection(**section))
    outputs = 64 if task.kind == "reconstruction" else CLASSES
    model = own(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, outputs)), (1, 8, 8), task, classes=outputs)
    networks, alone = stacked(*model)
    assert_at_once(networks, monkeypatch)
    assert_alike(networks, alone, steps(model[0]))


def test_what_is_not_alike_is_done_apart():
    make, weights = shipped("mlp")
    networks, alone = stacked(make, weights)
    first, second, third = steps(make)
    shorter = Step(second.x[:2], second.y[:2], second.key, training=True, extra_loss=None, tensors=None)
    assert_alike(networks, alone, [first, shorter, third])


def test_one_that_is_wrong_harms_no_other():
    make, weights = shipped("mlp")
    networks, alone = stacked(make, weights)
    asked = steps(make)
    wrong = Step(asked[1].x, asked[1].y + 99, asked[1].key, training=True, extra_loss=None, tensors=None)
    found = networks.carry_out({0: asked[0], 1: wrong, 2: asked[2]})
    assert isinstance(found[1], ModelError)
    for row in (0, 2):
        assert found[row] == train_alone(alone[row], asked[row])
    assert isinstance(networks.carry_out({0: SingleCall(lambda _: 1 / 0)})[0], ZeroDivisionError)


def test_no_room_on_the_card_names_the_key(monkeypatch):
    networks, _ = stacked(*shipped("mlp"))

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(networks, "_step", full)
    found = networks.carry_out(dict(enumerate(steps(shipped("mlp")[0]))))
    assert all("lower fleet.at_once" in str(problem) for problem in found.values())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.LSTM(9, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(self.cells(x)[0][:, -1])


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(9, CLASSES)

    def forward(self, x):
        return self.out((x + torch.rand_like(x)).mean(1))


@pytest.mark.parametrize("module", [Recurrent, Drawing])
def test_a_model_that_cannot_says_so(module):
    make, _ = own(module, (4, 9))
    step = steps(make)[0]
    with pytest.raises(ModelError):
        StackedNetworks(make(), 2).check(step.x, step.y)


class OddlyStacked(nn.Module):
    """Gives something else where its samples are one of several stacks."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.out(x.flatten(1)) * (0.5 if torch._C._functorch.is_batchedtensor(x) else 1.0)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(36, CLASSES)

    def forward(self, x):
        if self.training:
            raise RuntimeError("not today\nnor here")
        return self.out(x.flatten(1))


def test_one_that_gives_something_else_there_is_found():
    make, _ = own(OddlyStacked, (4, 9))
    step = steps(make)[0]
    with pytest.raises(ModelError, match="differs from the step of each network alone"):
        StackedNetworks(make(), 2).check(step.x, step.y)


def test_one_that_does_not_compute_at_all_is_a_line():
    make, _ = own(Failing, (4, 9))
    with pytest.raises(ModelError, match=r"^not today$"):
        StackedNetworks(make(), 2)


def test_a_norm_that_counts_steps_cannot():
    make, _ = own(
        lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, CLASSES)),
        (1, 8, 8),
    )
    with pytest.raises(ModelError, match="counts the steps"):
        StackedNetworks(make(), 2)


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_tried_and_leaves_the_model_as_it_was(name):
    make, weights = shipped(name)
    backend = make()
    backend.load(weights)
    for seed in range(3):
        step = steps(make, seed=seed)[0]
        StackedNetworks(backend, 2).check(step.x, step.y)
    assert np.array_equal(backend.weights, weights)


@pytest.mark.parametrize("name", ["mlp", "resnet8"])
def test_on_a_card(name, monkeypatch):
    make, weights = shipped(name, torch_device(card.NAME))
    networks, alone = stacked(make, weights)
    assert_at_once(networks, monkeypatch)
    assert_alike(networks, alone, steps(make))
