"""AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch.optim.AdamW without amsgrad."""

from typing import ClassVar

import numpy as np

from fleetune.edge_agent.training.optimisers.optimiser import Floats, Optimiser, StepCounts


class AdamW(Optimiser):
    """m = b1 * m + (1 - b1) * g; s = b2 * s + (1 - b2) * g^2; in an entry's t-th step
    w -= learning_rate * (m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + weight_decay * w).

    Weight decay is not part of the gradient. Each entry has its own t, while torch counts whole tensors. So
    an entry that a method first trains in a late round starts at t = 1.
    """

    counts_steps: ClassVar[bool] = True

    @property
    def num_vectors(self) -> int:
        """Number of vectors: m and s."""
        return 2

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,
        scratch: Floats,
    ) -> Floats:
        """Return the change of the weights, see `Optimiser.step`."""
        (mean, square), settings = vectors, self.settings
        b1, b2 = settings.betas
        mean += np.multiply(np.subtract(gradient, mean, out=scratch), 1 - b1, out=scratch)
        square *= b2
        np.multiply(gradient, gradient, out=gradient)
        gradient *= 1 - b2
        square += gradient
        deviation = np.sqrt(square, out=gradient)
        deviation /= counts.each(lambda t: np.sqrt(1 - b2**t), deviation.dtype)
        deviation += settings.eps
        step = np.divide(mean, deviation, out=scratch)
        step *= counts.each(lambda t: settings.learning_rate / (1 - b1**t), step.dtype)
        if settings.weight_decay:
            step += np.multiply(weights, settings.learning_rate * settings.weight_decay, out=gradient)
        return step
