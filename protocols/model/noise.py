"""Random numbers of a training step: dropout, stochastic depth, noise. Every backend draws the same ones."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bounds import Share
from fleetune.protocols.model.spec import Dimensions
from fleetune.protocols.randomness import Key

Kind = Literal["dropout", "mask", "uniform", "normal"]
_CHUNK = 2**15  # numbers at a time, so that the eight bytes of each draw stay in the processor's cache


@dataclass(frozen=True)
class Noise:
    """An array of random numbers that a training step takes.

    Attributes:
        shape: shape of the array; "n" stands for the number of samples.
        p: probability of 0, for the first two kinds.
        kind: the distribution. "dropout": 0 or 1 / (1 - p). "mask": 0 or 1. "uniform": from [0, 1).
            "normal": mean 0, deviation 1.
    """

    shape: Dimensions
    p: Share = 0.0
    kind: Kind = "dropout"

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape for a number of samples."""
        return tuple(size if isinstance(size, int) else num_samples for size in self.shape)

    def draw(self, key: Key, index: int, num_samples: int) -> NDArray[np.float32]:
        """Return the numbers, float32, shape `sizes(num_samples)`.

        The same key gives the same numbers on every device and with every backend. They fill the array in C
        order, so arrays of the same size in other shapes hold the same numbers.

        Args:
            key: the key of the training step.
            index: how many arrays the step drew before.
            num_samples: samples in the batch.
        """
        sizes, own = self.sizes(num_samples), key.child("dropout", index)
        drawn = np.empty(math.prod(sizes), np.float32)
        for first in range(0, drawn.size, _CHUNK):
            part = drawn[first : first + _CHUNK]
            part[:] = self._numbers(own, part.size, first)
        return drawn.reshape(sizes)

    def _numbers(self, key: Key, count: int, first: int) -> NDArray[np.float32] | NDArray[np.float64]:
        if self.kind == "normal":
            return key.normal(count, first)
        if self.kind == "uniform":
            # 24 bits are exact in float32; more could round to 1
            return (key.bits(count, first) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        value = 1.0 if self.kind == "mask" else 0.0 if self.p >= 1 else 1 / (1 - self.p)
        return (key.uniform(count, first) >= self.p) * np.float32(value)
