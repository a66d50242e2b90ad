"""The losses of `protocols.tasks.losses` in torch, with backward passes in closed form; and user
functions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks.losses import CROSS_ENTROPY, RULES, shaped
from fleetune.protocols.user_code import as_line, user_module


class _ByRule(Function):
    """A rule's values, with its slopes as gradient."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor, name: str, section: TaskSection) -> Tensor:
        values, slopes = RULES[name](torch, outputs, targets, section)
        ctx.save_for_backward(slopes)
        found: Tensor = values
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return gradients[0] * slopes, None, None, None


def is_plain(name: str, section: TaskSection) -> bool:
    """True for cross-entropy as torch computes it."""
    return name == CROSS_ENTROPY and not section.class_weights and not section.label_smoothing


def mean_loss(name: str, section: TaskSection, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over a batch, a scalar tensor.

    Args:
        name: name of the loss, or `package.module:function`.
        section: the run's [task].
        outputs: the model's outputs, shape (n, outputs).
        targets: as for `protocols.tasks.losses.sample_losses`.

    Raises:
        ModelError: a user's function fails, or does not give a loss for each sample.
    """
    if is_plain(name, section):
        return functional.cross_entropy(outputs, targets)
    return sample_losses(name, section, outputs, targets).mean()


def sample_losses(name: str, section: TaskSection, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's loss, shape (n,); arguments and errors as for `mean_loss`."""
    if name == CROSS_ENTROPY:
        return _cross_entropy(section, outputs, targets)
    if name not in RULES:
        return _users_own(name, outputs, targets)
    paired, wanted = shaped(name, outputs, targets, section)
    values: Tensor = _ByRule.apply(paired, wanted, name, section)  # type: ignore[no-untyped-call]
    return values.flatten(1).mean(1)


def _cross_entropy(section: TaskSection, outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, multiplied by class weights.

    Unlike torch, it does not divide by the batch's sum of weights, so that a sample counts alike in every
    batch.
    """
    logs = torch.log_softmax(outputs, 1)
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    hot = (labels[:, None] == classes).to(outputs.dtype)
    aim = hot * (1 - section.label_smoothing) + section.label_smoothing / outputs.shape[1]
    losses = -(logs * aim).sum(1)
    if not section.class_weights:
        return losses
    return losses * (hot * torch.tensor(section.class_weights).to(outputs.device)).sum(1)


def _users_own(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    module, _, function = name.partition(":")
    try:
        losses = getattr(user_module(module), function)(outputs, targets)
    except Exception as problem:  # a user's code may raise anything
        raise ModelError(f"task.loss `{name}` failed: {as_line(problem)}") from problem
    if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1]:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ModelError(
            f"task.loss `{name}` gave {shape}; it must give a loss for each of the batch's samples"
        )
    return losses
