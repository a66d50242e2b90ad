"""The loss terms of `protocols.model.loss_terms` in torch; strength and temperature may be scalar tensors."""

import torch
from torch import Tensor
from torch.nn import functional

Scalar = float | Tensor


def distillation(logits: Tensor, teacher: Tensor, strength: Scalar, temperature: Scalar) -> Tensor:
    """Return the loss term `Distillation`; both models' logits have shape (n, C)."""
    softened = functional.log_softmax(logits / temperature, dim=1)
    target = functional.softmax(teacher / temperature, dim=1)
    divergence = functional.kl_div(softened, target, reduction="batchmean")
    return strength * temperature**2 * divergence


def contrast(features: Tensor, near: Tensor, far: Tensor, strength: Scalar, temperature: Scalar) -> Tensor:
    """Return the loss term `Contrast`; all three models' features have shape (n, F)."""
    alike = [functional.cosine_similarity(features, answer, dim=1) for answer in (near, far)]
    scores = torch.stack(alike, dim=1) / temperature
    first = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return strength * functional.cross_entropy(scores, first)
