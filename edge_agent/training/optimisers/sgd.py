"""Stochastic gradient descent with momentum, as torch.optim.SGD (no dampening, no Nesterov)."""

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, Optimiser, StepCounts


class SGD(Optimiser):
    """SGD: v = momentum * v + g + weight_decay * w; w -= learning_rate * v."""

    @property
    def num_vectors(self) -> int:
        """Number of vectors: v if there is momentum."""
        return int(bool(self.settings.momentum))

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,  # noqa: ARG002 - it is the same in every step
        scratch: Floats,
    ) -> Floats:
        """Return the change of the weights, see `Optimiser.step`."""
        if self.settings.weight_decay:
            gradient += np.multiply(weights, self.settings.weight_decay, out=scratch)
        if not vectors:
            return np.multiply(gradient, self.settings.learning_rate, out=gradient)
        (velocity,) = vectors
        velocity *= self.settings.momentum
        velocity += gradient
        return np.multiply(velocity, self.settings.learning_rate, out=scratch)
