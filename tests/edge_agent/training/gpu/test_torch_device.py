"""Torch on a card: what is copied there and back, and what is said where there is none."""

import numpy as np
import pytest
import torch
from tests.helpers import card
from torch import Tensor, nn

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR, fork_seeded, torch_device
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of

SHAPES = {"mlp": (1, 8, 8), "lenet5": (1, 28, 28), "resnet8": (3, 16, 16), "har-cnn": (9, 128)}
CLASSES = 6


def both(name):
    """On the processor and on the card, and a batch."""
    spec, weights = draw(name, SHAPES[name], CLASSES, Key(3))
    backends = [TorchBackend.from_spec(spec, device=one) for one in (PROCESSOR, torch_device(card.NAME))]
    random = np.random.default_rng(1)
    x = random.standard_normal((7, *SHAPES[name])).astype(np.float32)
    return backends, weights, x, random.integers(0, CLASSES, 7)


def trained(backend, weights, x, y, **options):
    """Losses, and weights and gradient after three steps by a user of `Backend` who knows of no card."""
    backend.load(weights)
    losses = []
    for step in range(3):
        losses.append(backend.step(x, y, Key(step), **options))
        backend.weights[: backend.spec.num_parameters] -= (
            0.1 * backend.gradient[: backend.spec.num_parameters]
        )
    return losses, backend.weights.copy(), backend.gradient.copy()


def same(one, other):
    assert one[0] == other[0]
    assert all(map(np.array_equal, one[1:], other[1:]))


@pytest.mark.parametrize("name", SHAPES)
def test_a_card_trains_as_the_processor_does(name):
    (here, there), weights, x, y = both(name)
    same(trained(here, weights, x, y), trained(there, weights, x, y))
    loss, outputs = there.evaluate(x, y)
    assert loss == here.evaluate(x, y)[0]
    assert np.array_equal(outputs, here.evaluate(x, y)[1])
    assert np.array_equal(there.losses(x, y), here.losses(x, y))
    assert np.array_equal(there.answer(x, "features"), here.answer(x, "features"))


def test_weights_begin_as_the_modules_own():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    spec = describe("own", module, (1, 8, 8), 10)
    own = np.concatenate([one.detach().numpy().ravel() for one in module.parameters()])
    assert np.array_equal(TorchBackend(spec, module, device=torch_device(card.NAME)).weights, own)


def test_gradients_of_some_tensors_alone_and_none_that_were_before():
    (here, there), weights, x, y = both("resnet8")
    trained(there, weights, x, y)
    wanted = [one.name for one in there.spec.tensors if one.kind != "stat"][-2:]
    same(*(trained(one, weights, x, y, tensors=wanted) for one in (here, there)))
    assert np.count_nonzero(there.gradient) <= (256 + 1) * CLASSES


@pytest.mark.parametrize("kind", [Distillation, Contrast])
def test_loss_terms_take_their_answers_along(kind):
    (here, there), weights, x, y = both("lenet5")
    term = kind(*[weights] * (1 if kind is Distillation else 2), strength=0.5, temperature=2.0)
    here.load(weights)
    answer = here.answer(x, term.answer)
    extra = ExtraLoss(term, (answer,) if kind is Distillation else (answer, answer[::-1].copy()))
    same(*(trained(one, weights, x, y, extra_loss=extra) for one in (here, there)))


@pytest.mark.parametrize(
    "section",
    [
        TaskSection(class_weights=(1.0, 2.0, 3.0, 1.0, 1.0, 5.0)),
        TaskSection(label_smoothing=0.1),
        TaskSection(kind="multi-label", class_weights=(1.0, 2.0, 3.0, 1.0, 1.0, 5.0)),
        TaskSection(kind="regression", loss="huber"),
    ],
)
def test_losses_of_tasks(section):
    spec, weights = draw("mlp", (1, 8, 8), CLASSES, Key(3))
    random = np.random.default_rng(1)
    x, y = random.random((5, 1, 8, 8)).astype(np.float32), random.integers(0, CLASSES, 5)
    if section.kind != "classification":
        y = random.integers(0, 2, (5, CLASSES)).astype(np.float32)
    devices = PROCESSOR, torch_device(card.NAME)
    here, there = (TorchBackend.from_spec(spec, task_of(section), device=one) for one in devices)
    same(*(trained(one, weights, x, y) for one in (here, there)))
    assert np.array_equal(here.losses(x, y), there.losses(x, y))


class Noisy(nn.Module):
    """Drops, and draws for itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x)) + 0 * torch.rand(1).item()


def test_dropout_drops_the_same_and_streams_stay_where_they_were():
    spec = describe("noisy", Noisy(), (8,), 4)
    weights = np.random.default_rng(0).random(spec.size, np.float32)
    here, there = (TorchBackend(spec, Noisy(), device=one) for one in (PROCESSOR, torch_device(card.NAME)))
    x, y = np.ones((6, 8), np.float32), np.zeros(6, np.int64)
    before = torch.get_rng_state()
    same(*(trained(one, weights, x, y) for one in (here, there)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_smaller_network_of_one_there_is_there():
    (here, there), _, x, y = both("har-cnn")
    counts = tuple(max(1, size // 2) for size in here.spec.groups)
    smaller = [one.smaller_network(counts).backend for one in (here, there)]
    weights = np.random.default_rng(2).standard_normal(smaller[0].spec.size).astype(np.float32) / 10
    weights[smaller[0].spec.num_parameters :] = 1
    same(*(trained(one, weights, x, y) for one in smaller))


def test_a_module_that_makes_tensors_of_the_processors_memory_is_named():
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ones(2)

    spec = describe("stubborn", Stubborn(), (4,), 2)
    there = TorchBackend(spec, Stubborn(), device=torch_device(card.NAME))
    with pytest.raises(ModelError, match=r"stubborn cannot train on a batch of 3: .*same device"):
        there.step(np.ones((3, 4), np.float32), np.zeros(3, np.int64), Key(0))


def test_a_wrong_label_never_reaches_a_card():
    (_, there), weights, x, y = both("mlp")
    there.load(weights)
    y[2] = CLASSES
    with pytest.raises(ModelError, match=r"label 6 is unknown: model mlp has classes 0\.\.5"):
        there.step(x, y, Key(0))
    with pytest.raises(ModelError, match="label 6"):
        there.evaluate(x, y)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda:0", r"device cuda:0: torch .* finds no cuda here; choose another"),
        ("gpu", "device gpu is unknown to torch"),
        (f"{card.NAME}:2", f"device {card.NAME}:2 does not exist; the last one here is {card.NAME}:1"),
    ],
)
def test_what_is_not_here_is_said(name, words):
    if name == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ModelError, match=words):
        torch_device(name)


def test_the_processor_is_always_here():
    assert torch_device("cpu") == PROCESSOR


def test_the_devices_own_generator_is_put_back(monkeypatch):
    told = []
    monkeypatch.setattr(card._Cards, "manual_seed", lambda _, seed: told.append(seed))
    monkeypatch.setattr(card._Cards, "set_rng_state", lambda *_: told.append("back"))
    with fork_seeded(Key(7), torch_device(card.NAME)):
        assert told == [7]
    assert told == [7, "back"]
