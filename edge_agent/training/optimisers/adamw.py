"""AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch.optim.AdamW without amsgrad."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, StepCounts
from fleetune.protocols.settings.device import TrainingSection


@dataclass(frozen=True)
class AdamW:
    """m = b1 * m + (1 - b1) * g; s = b2 * s + (1 - b2) * g^2; in an entry's t-th step
    w -= learning_rate * (m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + weight_decay * w).

    Weight decay is not part of the gradient. Each entry has its own t, while torch counts whole tensors. So
    an entry that a method first trains in a late round starts at t = 1.
    """

    counts_steps: ClassVar[bool] = True

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, settings: TrainingSection) -> Self:
        """The optimiser with the settings of a [training] section."""
        return cls(settings.learning_rate, settings.betas, settings.eps, settings.weight_decay)

    @property
    def num_vectors(self) -> int:
        """The two vectors m and s."""
        return 2

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,
        scratch: Floats,
    ) -> Floats:
        """The change of the weights, see `Optimiser.step`."""
        (mean, square), (b1, b2) = vectors, self.betas
        mean += np.multiply(np.subtract(gradient, mean, out=scratch), 1 - b1, out=scratch)
        square *= b2
        np.multiply(gradient, gradient, out=gradient)
        gradient *= 1 - b2
        square += gradient
        deviation = np.sqrt(square, out=gradient)
        deviation /= counts.each(lambda t: np.sqrt(1 - b2**t), deviation.dtype)
        deviation += self.eps
        step = np.divide(mean, deviation, out=scratch)
        step *= counts.each(lambda t: self.learning_rate / (1 - b1**t), step.dtype)
        if self.weight_decay:
            step += np.multiply(weights, self.learning_rate * self.weight_decay, out=gradient)
        return step
