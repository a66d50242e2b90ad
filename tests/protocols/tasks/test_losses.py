"""Each loss: its slopes are its derivatives, numpy and torch agree, and both are what torch's own is."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import TASKS, task_of
from fleetune.protocols.tasks.torch_losses import mean_loss, sample_losses

DRAW = np.random.default_rng(3)
N, K = 7, 4
NUMBERS = DRAW.normal(size=(N, K)).astype(np.float32) * 3
TARGETS = DRAW.normal(size=(N, K)).astype(np.float32)
CLASSES = DRAW.integers(0, K, N)
PRESENT = (TARGETS > 0).astype(np.float32)
WEIGHTS = (0.5, 2.0, 1.0, 3.0)
QUANTILES = (0.1, 0.5)

CASES = {
    "plain": (TaskSection(), CLASSES, lambda o, t: functional.cross_entropy(o, t, reduction="none")),
    "smoothed": (
        TaskSection(label_smoothing=0.2),
        CLASSES,
        lambda o, t: functional.cross_entropy(o, t, reduction="none", label_smoothing=0.2),
    ),
    "weighted": (
        TaskSection(class_weights=WEIGHTS),
        CLASSES,
        lambda o, t: functional.cross_entropy(o, t, torch.tensor(WEIGHTS), reduction="none"),
    ),
    "binary": (
        TaskSection(kind="multi-label"),
        PRESENT,
        lambda o, t: functional.binary_cross_entropy_with_logits(o, t, reduction="none").mean(1),
    ),
    "binary weighted": (
        TaskSection(kind="multi-label", class_weights=WEIGHTS),
        PRESENT,
        lambda o, t: functional.binary_cross_entropy_with_logits(
            o, t, reduction="none", pos_weight=torch.tensor(WEIGHTS)
        ).mean(1),
    ),
    "squared": (TaskSection(kind="regression"), TARGETS, lambda o, t: ((o - t) ** 2).mean(1)),
    "absolute": (TaskSection(kind="forecast"), TARGETS, lambda o, t: (o - t).abs().mean(1)),
    "huber": (
        TaskSection(kind="regression", loss="huber", huber_delta=0.7),
        TARGETS,
        lambda o, t: functional.huber_loss(o, t, reduction="none", delta=0.7).mean(1),
    ),
    "quantile": (
        TaskSection(kind="forecast", loss="quantile", quantiles=QUANTILES),
        TARGETS[:, :2],
        lambda o, t: torch.stack(
            [
                torch.maximum(q * (t - o[:, i::2]), (q - 1) * (t - o[:, i::2]))
                for i, q in enumerate(QUANTILES)
            ],
            -1,
        ).mean((1, 2)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_what_torch_has_and_its_gradient_is_its_derivative(case):
    section, targets, reference = CASES[case]
    task, wanted = task_of(section), torch.from_numpy(targets)
    theirs, ours = (torch.from_numpy(NUMBERS).requires_grad_() for _ in range(2))
    expected = reference(theirs, wanted)
    found = sample_losses(task.loss, section, ours, wanted)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.sample_losses(NUMBERS, targets), expected.detach(), rtol=1e-5, atol=1e-6)
    expected.mean().backward()
    mean_loss(task.loss, section, ours, wanted).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [-500.0, -90.0, 0.0, 90.0, 500.0])
def test_the_binary_loss_is_finite_however_sure_the_model_is(value):
    section = TaskSection(kind="multi-label")
    outputs = torch.full((1, 2), value, requires_grad=True)
    targets = torch.tensor([[0.0, 1.0]])
    loss = mean_loss("binary-cross-entropy", section, outputs, targets)
    loss.backward()
    expected = functional.binary_cross_entropy_with_logits(torch.full((1, 2), value), targets)
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(outputs.grad).all()
    by_numpy = task_of(section).sample_losses(outputs.detach().numpy(), targets.numpy())
    np.testing.assert_allclose(by_numpy, expected.item(), rtol=1e-6)


@pytest.mark.parametrize("kind", TASKS)
def test_every_loss_that_a_task_names_is_there(kind):
    for loss in TASKS[kind].losses:
        task = task_of(TaskSection(kind=kind, loss=loss))
        shape = task.target_shape(K, (K,))
        targets = CLASSES if shape == () else np.zeros((N, *shape), np.float32)
        assert task.sample_losses(NUMBERS, targets).shape == (N,)
