"""Logarithms in whole numbers, the same on every machine and easy to have in any language."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_OCTAVE = 4
_STEPS = np.array([35734, 42495, 50536, 60097])  # 2^15 * 2^((k + 1/2) / 4)

Ints = NDArray[np.integer[Any]]


def quarter_octaves(numbers: Ints) -> Ints:
    """4 log2 of whole numbers from 1 to 2^53, to the nearest; shape as given."""
    exponent = np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 1  # exact: below 2^53
    leading = (numbers.astype(np.int64) << 10 >> np.maximum(exponent - 5, 0)) << np.maximum(5 - exponent, 0)
    return PER_OCTAVE * exponent + np.searchsorted(_STEPS, leading, side="right")
