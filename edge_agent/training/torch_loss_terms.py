"""A batch's loss term term in torch."""

import torch
from torch import Tensor

from fleetune.edge_agent.training.backend import Hint
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.model.torch_loss_terms import contrast, distillation


def loss_term_value(hint: Hint, own: Tensor) -> Tensor:
    """The loss term's part of a batch's loss.

    Args:
        hint: the loss term and what its models answered on the batch.
        own: what the model in training answers, shape (n, ...), as the others' answers.
    """
    loss_term, answers = hint.loss_term, [torch.from_numpy(answer) for answer in hint.answers]
    if isinstance(loss_term, Distillation):
        (teacher,) = answers
        return distillation(own, teacher, loss_term.strength, loss_term.temperature)
    near, far = answers
    return contrast(own, near, far, loss_term.strength, loss_term.temperature)
