"""What a loss term adds to a batch's loss, in torch, and the last layer that some of them look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.model.torch_backbone import last_layer
from fleetune.protocols.model.torch_loss_terms import contrast, distillation


def loss_term_value(extra_loss: ExtraLoss, own: Tensor) -> Tensor:
    """The loss term's part of a batch's loss.

    Args:
        extra_loss: the loss term and what its models answered on the batch.
        own: what the model in training answers, shape (n, ...), as the others' answers.
    """
    loss_term = extra_loss.loss_term
    answers = [torch.from_numpy(answer).to(own.device) for answer in extra_loss.answers]
    if isinstance(loss_term, Distillation):
        (teacher,) = answers
        return distillation(own, teacher, loss_term.strength, loss_term.temperature)
    near, far = answers
    return contrast(own, near, far, loss_term.strength, loss_term.temperature)


class LastLayer:
    """The last layer with weights of a module."""

    def __init__(self, spec: ModelSpec, module: nn.Module) -> None:
        self._model, self._name, self._module = spec.name, last_layer(spec, module), module

    @contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """Collects the arguments of every call of it."""
        calls: list[Any] = []
        hook = self._module.get_submodule(self._name).register_forward_pre_hook(
            lambda _, arguments: calls.append(arguments)
        )
        try:
            yield calls
        finally:
            hook.remove()

    def features(self, calls: list[Any]) -> Tensor:
        """What it got, shape (n, ...), from its calls in one forward pass.

        Raises:
            ModelError: it was not called once with one tensor.
        """
        if len(calls) == 1 and len(calls[0]) == 1 and isinstance(calls[0][0], Tensor):
            return calls[0][0].flatten(1).float()
        raise ModelError(
            f"model {self._model}: its last layer {self._name!r} is not called once with one tensor, as this"
            " method needs; choose another method or model"
        )
