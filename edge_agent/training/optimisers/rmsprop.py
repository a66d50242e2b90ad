"""RMSprop (Hinton's lecture 6e, 2012), as torch.optim.RMSprop, not centred."""

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, Optimiser, StepCounts


class RMSprop(Optimiser):
    """With h = g + weight_decay * w: s = alpha * s + (1 - alpha) * h^2; v = momentum * v + h / (sqrt(s) +
    eps); w -= learning_rate * v.

    As in torch, s is not corrected for its start at 0. So an entry's first step is 1 / sqrt(1 - alpha)
    learning rates long (10 with alpha = 0.99).
    """

    @property
    def num_vectors(self) -> int:
        """Number of vectors: s, and v if there is momentum."""
        return 2 if self.settings.momentum else 1

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,  # noqa: ARG002 - it is the same in every step
        scratch: Floats,
    ) -> Floats:
        """Return the change of the weights, see `Optimiser.step`."""
        square, settings = vectors[0], self.settings
        if settings.weight_decay:
            gradient += np.multiply(weights, settings.weight_decay, out=scratch)
        square *= settings.alpha
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - settings.alpha
        square += scratch
        np.sqrt(square, out=scratch)
        scratch += settings.eps
        step = np.divide(gradient, scratch, out=gradient)
        if settings.momentum:
            velocity = vectors[1]
            velocity *= settings.momentum
            velocity += step
            return np.multiply(velocity, settings.learning_rate, out=scratch)
        step *= settings.learning_rate
        return step
