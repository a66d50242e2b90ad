"""RMSprop (Hinton's lecture 6e, 2012), as torch.optim.RMSprop, not centred."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, StepCounts
from fleetune.protocols.settings.device import TrainingSection


@dataclass(frozen=True)
class RMSprop:
    """With h = g + weight_decay * w: s = alpha * s + (1 - alpha) * h^2; v = momentum * v + h / (sqrt(s) +
    eps); w -= learning_rate * v.

    As in torch, s is not corrected for its start at 0. So an entry's first step is 1 / sqrt(1 - alpha)
    learning rates long (10 with alpha = 0.99).
    """

    counts_steps: ClassVar[bool] = False

    learning_rate: float
    alpha: float
    eps: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, settings: TrainingSection) -> Self:
        """The optimiser with the settings of a [training] section."""
        return cls(
            settings.learning_rate, settings.alpha, settings.eps, settings.momentum, settings.weight_decay
        )

    @property
    def num_vectors(self) -> int:
        """The vector s, and v if there is momentum."""
        return 2 if self.momentum else 1

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,  # noqa: ARG002 - it is the same in every step
        scratch: Floats,
    ) -> Floats:
        """The change of the weights, see `Optimiser.step`."""
        square = vectors[0]
        if self.weight_decay:
            gradient += np.multiply(weights, self.weight_decay, out=scratch)
        square *= self.alpha
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - self.alpha
        square += scratch
        np.sqrt(square, out=scratch)
        scratch += self.eps
        step = np.divide(gradient, scratch, out=gradient)
        if self.momentum:
            velocity = vectors[1]
            velocity *= self.momentum
            velocity += step
            return np.multiply(velocity, self.learning_rate, out=scratch)
        step *= self.learning_rate
        return step
