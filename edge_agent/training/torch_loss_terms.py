"""What a loss term adds to a batch's loss, in torch."""

import torch
from torch import Tensor

from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.protocols.model.loss_terms import Distillation
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
