"""The optimiser: stochastic gradient descent with frozen entries and a pull, in place on flat vectors."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.skeletons.trainer import FitPlan, Pull

_BLOCK = 32_768  # entries: 128 kB a vector, so that all passes over a block find it in the cache

Floats = NDArray[np.floating]  # float32 in training; float64 stays float64


class Descent:
    """v = momentum * v + g + pull + weight_decay * w; w -= learning_rate * v where trainable.

    It goes block by block: no memory beyond the velocity, and a block passes through the cache once,
    however many terms there are. Blocks without a trainable entry are skipped.

    Args:
        weights: w, changed by each step; shape (n,), or longer than n (statistics, left alone).
        gradient: g, to be filled before each step, which uses it up; same shape and dtype.
        size: n, the number of parameters.
        settings: learning_rate, momentum and weight_decay.
        plan: trainable and pull.
    """

    def __init__(
        self, weights: Floats, gradient: Floats, size: int, settings: TrainingSection, plan: FitPlan
    ) -> None:
        self._weights, self._gradient, self._pull = weights, gradient, plan.pull
        self._rate, self._momentum = settings.learning_rate, settings.momentum
        self._decay = settings.weight_decay
        self._velocity = np.zeros(size, weights.dtype) if settings.momentum else None
        self._scratch = np.empty(min(_BLOCK, size), weights.dtype)
        self._blocks = list(_blocks(size, plan))

    def step(self) -> None:
        """Take learning_rate * v off the trainable weights. Uses the gradient up."""
        for block, keep in self._blocks:
            v = self._direction(block)
            if keep is not None:
                _clear(v, keep)
            weights = self._weights[block]
            np.subtract(weights, np.multiply(v, self._rate, out=self._scratch[: v.size]), out=weights)

    def _direction(self, block: slice) -> Floats:
        """The v of one block: the velocity if there is momentum, else the gradient with its extra terms."""
        gradient, weights = self._gradient[block], self._weights[block]
        scratch = self._scratch[: gradient.size]
        if self._pull is not None:
            gradient += _pull_gradient(self._pull, weights, block, out=scratch)
        if self._decay:
            gradient += np.multiply(weights, self._decay, out=scratch)
        if self._velocity is None:
            return gradient
        velocity = self._velocity[block]
        velocity *= self._momentum
        velocity += gradient
        return velocity


def _pull_gradient(pull: Pull, weights: Floats, block: slice, out: Floats) -> Floats:
    """2 * strength * (w - target) where pulled."""
    np.subtract(weights, pull.target[block], out=out)
    out *= 2 * pull.strength
    if pull.mask is not None:
        _clear(out, _bits(pull.mask[block]))
    return out


def _blocks(size: int, plan: FitPlan) -> Iterator[tuple[slice, NDArray[np.int8] | None]]:
    """Blocks with something trainable, each with the bits of its trainable entries (None: all)."""
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        trainable = None if plan.trainable is None else plan.trainable[block]
        if trainable is None or trainable.all():
            yield block, None
        elif trainable.any():
            yield block, _bits(trainable)


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """All bits set where True."""
    return np.negative(mask.view(np.int8))


def _clear(values: Floats, keep: NDArray[np.int8]) -> None:
    """Exactly 0 where `keep` has no bits, whatever was there: unlike a product this also clears NaN, and
    on a scattered mask it is 30 times as fast as `np.copyto(values, 0, where=...)`.
    """
    bits = values.view(f"i{values.itemsize}")
    np.bitwise_and(bits, keep, out=bits)
