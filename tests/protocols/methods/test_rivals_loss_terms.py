"""Loss terms by what other models answer (`protocols.model.loss_terms`), and two methods that use them."""

import numpy as np
import pytest
import torch
from tests.conftest import PullToTarget, tiny_spec
from torch import nn
from torch.nn import functional

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods.moon import MOON
from fleetune.protocols.methods.pfedsd import PFedSD
from fleetune.protocols.model import architectures
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

SPEC = tiny_spec()
KEY = Key.of("test", "loss terms")
SHAPE = (1, 8, 8)


def loaded(name="mlp", shape=SHAPE):
    spec, weights = draw(name, shape, 10, KEY)
    backend = TorchBackend.from_spec(spec)
    backend.load(weights)
    return backend, spec, weights


def samples(n, shape=SHAPE):
    rng = KEY.generator()
    return rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(10, size=n)


def other(weights, name):
    noise = KEY.child(name).generator().normal(size=weights.size).astype(np.float32)
    return weights + np.float32(0.1) * np.abs(noise)  # variances stay positive


def answers(backend, weights, x, what):
    kept = backend.weights.copy()
    backend.load(weights)
    answer = backend.answer(x, what)
    backend.load(kept)
    return answer


def gradient(backend, x, y, extra_loss=None, **settings):
    loss = backend.step(x, y, KEY, extra_loss=extra_loss, **settings)
    return loss, backend.gradient.copy()


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_adds_its_closed_form_gradient_and_leaves_the_loss_alone(temperature):
    backend, spec, weights = loaded()
    x, y = samples(5)
    loss_term = Distillation(other(weights, "teacher"), 0.7, temperature)
    taught = answers(backend, loss_term.teacher, x, "logits")
    plain_loss, plain = gradient(backend, x, y)
    loss, with_term = gradient(backend, x, y, ExtraLoss(loss_term, (taught,)))
    own = backend.answer(x, "logits")
    wanted = 0.7 * temperature * (softmax(own / temperature) - softmax(taught / temperature)).mean(0)
    bias = spec.slices[spec.tensors[-1].name]
    assert loss == plain_loss
    assert (with_term - plain)[bias] == pytest.approx(wanted, abs=1e-6)
    assert np.abs(wanted).max() > 1e-3


def test_contrast_adds_the_gradient_of_its_formula():
    backend, spec, weights = loaded()
    x, y = samples(5)
    loss_term = Contrast(other(weights, "near"), other(weights, "far"), 2.0, 0.5)
    near, far = (answers(backend, model, x, "features") for model in loss_term.models)
    _, plain = gradient(backend, x, y)
    _, with_term = gradient(backend, x, y, ExtraLoss(loss_term, (near, far)))
    parts = {t.name: torch.tensor(view, requires_grad=True) for t, view in spec.views(weights)}
    hidden = torch.from_numpy(x).flatten(1)
    for layer in list(spec.layers)[:-1]:
        hidden = functional.relu(hidden @ parts[f"{layer}.weight"].T + parts[f"{layer}.bias"])

    def cosine(z, answer):
        answer = torch.from_numpy(answer)
        return (z * answer).sum(1) / (z.norm(dim=1) * answer.norm(dim=1))

    term = 2.0 * functional.softplus((cosine(hidden, far) - cosine(hidden, near)) / 0.5).mean()
    found = torch.autograd.grad(term, list(parts.values()), allow_unused=True)
    wanted = np.concatenate([np.zeros(p.numel()) if g is None else g.numpy().ravel()
                             for p, g in zip(parts.values(), found, strict=True)])  # fmt: skip
    np.testing.assert_allclose(with_term - plain, wanted, atol=1e-6)
    assert np.abs(wanted).max() > 1e-3
    assert not wanted[spec.slices[spec.tensors[-2].name]].any()  # the last layer is behind what is compared


def test_with_moons_network_what_is_compared_is_the_projection():
    backend, spec, weights = loaded("cnn-moon", (3, 32, 32))
    x, _ = samples(3, (3, 32, 32))
    module = architectures.build("cnn-moon", (3, 32, 32), 10)
    parts = {tensor.name: torch.tensor(view) for tensor, view in spec.views(weights)}
    module.load_state_dict(parts)
    with torch.inference_mode():
        hidden = module[: list(dict(module.named_children())).index("project1")](torch.from_numpy(x))
        widened = functional.relu(hidden @ parts["project1.weight"].T + parts["project1.bias"])
        projected = widened @ parts["project2.weight"].T + parts["project2.bias"]
    assert projected.shape == (3, 256)
    assert (projected < 0).any()  # no ReLU behind it
    np.testing.assert_allclose(answers(backend, weights, x, "features"), projected, atol=1e-5)


def test_near_and_far_alike_say_nothing():
    backend, _, weights = loaded()
    x, y = samples(4)
    same = answers(backend, other(weights, "one"), x, "features")
    _, plain = gradient(backend, x, y)
    _, with_term = gradient(backend, x, y, ExtraLoss(Contrast(weights, weights, 5.0, 0.5), (same, same)))
    np.testing.assert_allclose(with_term, plain, atol=1e-6)


def test_answers_are_in_evaluation_mode_and_change_nothing():
    backend, _, _ = loaded("cnn-fedspu-emnist", (1, 28, 28))
    x, _ = samples(6, (1, 28, 28))
    before = backend.weights.copy()
    together, alone = backend.answer(x, "logits"), backend.answer(x[:1], "logits")
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)  # batch statistics would tell them apart
    assert backend.answer(x, "features").shape == (6, 980)
    assert np.array_equal(backend.weights, before)


class SharedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_a_model_without_one_last_layer_trains_but_cannot_contrast():
    module = SharedTwice()
    backend = TorchBackend(describe("twice", module, (4,), 4), module)
    x, y = samples(3, (4,))
    y = y % 4
    backend.step(x, y, KEY)
    assert backend.answer(x, "logits").shape == (3, 4)
    with pytest.raises(
        ModelError, match="a last layer that is called once with one tensor, and 'layer' is not"
    ):
        backend.answer(x, "features")


class Noting(TorchBackend):
    hints, asked = None, 0

    def step(self, x, y, key, *, extra_loss=None, **settings):
        self.hints.append((x, extra_loss))
        return super().step(x, y, key, extra_loss=extra_loss, **settings)

    def answer(self, x, what):
        self.asked += len(x)
        return super().answer(x, what)


def local_trainer(backend, n=11, **settings):
    x, y = samples(n)
    empty = x[:0], y[:0]
    settings = {"epochs": 3, "batch_size": 4, "learning_rate": 0.1, **settings}
    return LocalTrainer(backend, DeviceData(x, y, *empty, x, y), TrainingSection(**settings))


def test_each_batch_comes_with_its_own_samples_answers_made_once():
    backend, spec, weights = loaded()
    noting = Noting.from_spec(spec)
    noting.hints = []
    trainer, teacher = local_trainer(noting), other(weights, "teacher")
    trainer.fit(weights, FitPlan(loss_term=Distillation(teacher, 1.0, 1.0)), KEY)
    assert noting.asked == 11
    assert len(noting.hints) == 9
    for x, extra_loss in noting.hints:
        np.testing.assert_allclose(extra_loss.answers[0], answers(backend, teacher, x, "logits"), atol=1e-5)


def test_a_taught_model_stays_nearer_to_its_teacher():
    backend, _, weights = loaded()
    trainer, teacher = local_trainer(backend), other(weights, "teacher")
    x, _ = samples(11)
    gaps = []
    for strength in (0.0, 10.0):
        fit = trainer.fit(weights, FitPlan(loss_term=Distillation(teacher, strength, 1.0)), KEY)
        shares = [softmax(answers(backend, model, x, "logits")) for model in (fit.weights, teacher)]
        gaps.append(np.abs(shares[0] - shares[1]).mean())
    assert gaps[1] < gaps[0] / 2
    alone = trainer.fit(weights, FitPlan(), KEY)
    assert np.array_equal(alone.weights, trainer.fit(weights, FitPlan(), KEY).weights)


class Planned(PullToTarget):
    def fit(self, weights, plan, key):
        self.plan, self.start = plan, weights
        return super().fit(weights, plan, key)


def rounds(method, weights, numbers=(1, 2)):
    """The plan and start of a device's rounds, with its model before each."""
    state, device, seen = method.init_coordinator(weights), method.init_device(weights), []
    for number in numbers:
        task = method.plan(state, Round(number, ("d",)), KEY)[1]["d"]
        trainer, before = Planned(SPEC, "d"), method.personal_model(device)
        device, update = method.work(device, task, trainer, Budget(), KEY.child(number))
        moved = Update(Patch.of(weights + np.float32(number), Everything(), SPEC), 10)
        state = method.aggregate(state, [("c", moved), ("d", update)])
        seen.append((trainer, before))
    return seen


def test_pfedsd_is_taught_by_the_devices_last_model_once_there_is_one(weights):
    (first, _), (second, before) = rounds(PFedSD(SPEC, strength=0.3, temperature=2.0), weights)
    assert first.plan.loss_term is None
    loss_term = second.plan.loss_term
    assert (loss_term.strength, loss_term.temperature) == (0.3, 2.0)
    assert np.array_equal(loss_term.teacher, before)
    assert not np.array_equal(loss_term.teacher, second.start)


def test_pfedsd_counts_all_participants_alike(weights):
    method = PFedSD(SPEC)
    updates = [
        (name, Update(Patch.of(np.full_like(weights, value), Everything(), SPEC), samples))
        for name, value, samples in (("d0", 1, 10), ("d1", 4, 1000))
    ]
    merged = method.shared_model(method.aggregate(method.init_coordinator(weights), updates))
    assert merged[: SPEC.num_parameters].tolist() == [2.5] * SPEC.num_parameters


def test_moon_is_near_the_shared_model_and_far_from_the_devices_last(weights):
    (first, _), (second, before) = rounds(MOON(SPEC, strength=5.0), weights)
    for trainer in (first, second):
        assert np.array_equal(trainer.plan.loss_term.near, trainer.start)
    assert np.array_equal(first.plan.loss_term.far, weights)  # the initial model, as in the authors' code
    assert np.array_equal(second.plan.loss_term.far, before)
    assert not np.array_equal(before, second.start)
    assert (second.plan.loss_term.strength, second.plan.loss_term.temperature) == (5.0, 0.5)
