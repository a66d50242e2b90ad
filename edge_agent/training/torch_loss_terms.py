"""A batch's guide term in torch."""

import torch
from torch import Tensor

from fleetune.edge_agent.training.backend import Hint
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.model.torch_loss_terms import contrast, distillation


def guide_term(hint: Hint, own: Tensor) -> Tensor:
    """The guide's part of a batch's loss.

    Args:
        hint: the guide and what its models answered on the batch.
        own: what the model in training answers, shape (n, ...), as the others' answers.
    """
    guide, answers = hint.guide, [torch.from_numpy(answer) for answer in hint.answers]
    if isinstance(guide, Distillation):
        (teacher,) = answers
        return distillation(own, teacher, guide.strength, guide.temperature)
    near, far = answers
    return contrast(own, near, far, guide.strength, guide.temperature)
