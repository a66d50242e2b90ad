"""The optimiser: stochastic gradient descent with frozen entries and a pull, in place on flat vectors."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.skeletons.trainer import FitPlan, Pull

BLOCK = 32_768  # entries: 128 kB a vector, so that all passes over a block find it in the cache
FEW = 0.25  # share of a block's entries: up to it, taking them out and putting them back is no slower

Floats = NDArray[np.floating]  # float32 in training; float64 stays float64


@dataclass(frozen=True)
class _Block:
    """Some consecutive entries, at least one of them trainable.

    Attributes:
        place: where they stand.
        positions: of the trainable ones within the block, where these are few; else None.
        keep: all bits set where trainable; None: all are, or `positions` says which.
        velocity: v, of the `positions` alone where there are any; None: there is no momentum.
    """

    place: slice
    positions: NDArray[np.uint16] | None
    keep: NDArray[np.int8] | None
    velocity: Floats | None


def optimiser_copies(trainable_share: float, momentum: float) -> float:
    """What a `Descent` holds, in float32 copies of the model, where this share of each block is trainable."""
    if trainable_share <= FEW:  # positions take half as much as the entries
        return trainable_share * (1.5 if momentum else 0.5)
    return bool(momentum) + (0.25 if trainable_share < 1 else 0.0)


class Descent:
    """v = momentum * v + g + pull + weight_decay * w; w -= learning_rate * v where trainable.

    It goes block by block: no memory beyond the velocity, and a block passes through the cache once,
    however many terms there are. Blocks without a trainable entry are skipped and have no velocity; in
    those with few trainable entries only these have one.

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
        self._scratch = np.empty(min(BLOCK, size), weights.dtype)
        self._blocks = list(_blocks(size, plan, weights.dtype if settings.momentum else None))

    def step(self) -> None:
        """Take learning_rate * v off the trainable weights. Uses the gradient up."""
        for block in self._blocks:
            gradient, weights = self._terms(block.place), self._weights[block.place]
            if block.positions is None:
                v = self._direction(block, gradient)
                if block.keep is not None:
                    _clear(v, block.keep)
                np.subtract(weights, self._step_of(v), out=weights)
            else:
                at = block.positions.astype(np.intp)
                v = self._direction(block, gradient.take(at))
                weights[at] = weights.take(at) - self._step_of(v)

    def _terms(self, place: slice) -> Floats:
        """The gradient of a block with its extra terms."""
        gradient, weights = self._gradient[place], self._weights[place]
        scratch = self._scratch[: gradient.size]
        if self._pull is not None:
            gradient += _pull_gradient(self._pull, weights, place, out=scratch)
        if self._decay:
            gradient += np.multiply(weights, self._decay, out=scratch)
        return gradient

    def _direction(self, block: _Block, gradient: Floats) -> Floats:
        """v: the velocity if there is momentum, else the gradient."""
        if block.velocity is None:
            return gradient
        velocity = block.velocity
        velocity *= self._momentum
        velocity += gradient
        return velocity

    def _step_of(self, v: Floats) -> Floats:
        return np.multiply(v, self._rate, out=self._scratch[: v.size])


def _pull_gradient(pull: Pull, weights: Floats, block: slice, out: Floats) -> Floats:
    """2 * strength * (w - target) where pulled."""
    np.subtract(weights, pull.target[block], out=out)
    out *= 2 * pull.strength
    if pull.mask is not None:
        _clear(out, _bits(pull.mask[block]))
    return out


def _blocks(size: int, plan: FitPlan, velocity: np.dtype[np.floating] | None) -> Iterator[_Block]:
    """Blocks with something trainable, with a `velocity` of this type at 0 (None: without)."""
    for start in range(0, size, BLOCK):
        place = slice(start, min(start + BLOCK, size))
        length = place.stop - place.start
        trainable = None if plan.trainable is None else plan.trainable[place]
        count = length if trainable is None else int(np.count_nonzero(trainable))
        if not count:
            continue
        few = count <= FEW * length
        yield _Block(
            place,
            np.flatnonzero(trainable).astype(np.uint16) if trainable is not None and few else None,
            _bits(trainable) if trainable is not None and not few and count < length else None,
            None if velocity is None else np.zeros(count if few else length, velocity),
        )


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """All bits set where True."""
    return np.negative(mask.view(np.int8))


def _clear(values: Floats, keep: NDArray[np.int8]) -> None:
    """Exactly 0 where `keep` has no bits, whatever was there: unlike a product this also clears NaN, and
    on a scattered mask it is 30 times as fast as `np.copyto(values, 0, where=...)`.
    """
    bits = values.view(f"i{values.itemsize}")
    np.bitwise_and(bits, keep, out=bits)
