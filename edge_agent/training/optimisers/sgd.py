"""Stochastic gradient descent with momentum, as torch.optim.SGD (no dampening, no Nesterov)."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, StepCounts
from fleetune.protocols.settings.device import TrainingSection


@dataclass(frozen=True)
class SGD:
    """v = momentum * v + g + weight_decay * w; w -= learning_rate * v."""

    counts_steps: ClassVar[bool] = False

    learning_rate: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, settings: TrainingSection) -> Self:
        """The optimiser with the settings of a [training] section."""
        return cls(settings.learning_rate, settings.momentum, settings.weight_decay)

    @property
    def num_vectors(self) -> int:
        """The vector v if there is momentum."""
        return int(bool(self.momentum))

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,  # noqa: ARG002 - it is the same in every step
        scratch: Floats,
    ) -> Floats:
        """The change of the weights, see `Optimiser.step`."""
        if self.weight_decay:
            gradient += np.multiply(weights, self.weight_decay, out=scratch)
        if not vectors:
            return np.multiply(gradient, self.learning_rate, out=gradient)
        (velocity,) = vectors
        velocity *= self.momentum
        velocity += gradient
        return np.multiply(velocity, self.learning_rate, out=scratch)
