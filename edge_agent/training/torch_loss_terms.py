"""Loss terms in torch, and access to the last layer that some of them need."""

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
    """Return the value of a loss term on a batch.

    Args:
        extra_loss: the loss term and the answers of its models on the batch.
        own: answer of the model in training, shape (n, ...).
    """
    loss_term = extra_loss.loss_term
    answers = [torch.from_numpy(answer).to(own.device) for answer in extra_loss.answers]
    if isinstance(loss_term, Distillation):
        (teacher,) = answers
        return distillation(own, teacher, loss_term.strength, loss_term.temperature)
    near, far = answers
    return contrast(own, near, far, loss_term.strength, loss_term.temperature)


class LastLayer:
    """The last layer of a module that has weights."""

    def __init__(self, spec: ModelSpec, module: nn.Module) -> None:
        self._model, self._name, self._module = spec.name, last_layer(spec, module), module

    @contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """Yield a list that collects the arguments of every call of the layer."""
        calls: list[Any] = []
        hook = self._module.get_submodule(self._name).register_forward_pre_hook(
            lambda _, arguments: calls.append(arguments)
        )
        try:
            yield calls
        finally:
            hook.remove()

    def features(self, calls: list[Any]) -> Tensor:
        """Return the input of the layer, shape (n, ...), from its calls in one forward pass.

        Raises:
            ModelError: the layer was not called once with one tensor.
        """
        if len(calls) == 1 and len(calls[0]) == 1 and isinstance(calls[0][0], Tensor):
            return calls[0][0].flatten(1).float()
        raise ModelError(
            f"model {self._model}: this method needs a last layer that is called once with one tensor, and"
            f" {self._name!r} is not; choose another method or model"
        )
