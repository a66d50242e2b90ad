"""Normal noise for differential privacy, from the operating system's generator or from a key.

Noise protects only if nobody can repeat it. Every device knows the run's seed, so keys derived from it may
draw the noise of a simulation, but never that of a fleet.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.randomness import normals

Draw = Callable[[int, int], NDArray[np.float64]]
"""Returns `count` normal numbers, mean 0 and deviation 1, from number `first` on. `Key.normal` is one."""


def secret_normal(count: int, first: int = 0) -> NDArray[np.float64]:  # noqa: ARG001 - a `Draw`
    """Return `count` normal numbers that nobody can repeat, shape (count,).

    Every bit comes from `os.urandom`; no generator of ours stands in between, whose state could be found.
    """
    return normals(np.frombuffer(os.urandom(16 * count), np.uint64))
