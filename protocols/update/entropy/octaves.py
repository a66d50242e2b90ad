"""Logarithms and magnitudes in whole numbers, equal on every machine and in any language."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_OCTAVE = 4
_STEPS = (35734, 42495, 50536, 60097)  # 2^15 * 2^((k + 1/2) / 4)
# number of leading bits compared; fraction bits of float64; its exponent field for 2^0
_FRACTION, _EXPONENT, _ZERO = 15, 52, 1023

Ints = NDArray[np.integer[Any]]

_QUARTERS = np.searchsorted(_STEPS, np.arange(1 << _FRACTION, 2 << _FRACTION), side="right").astype(np.int8)


def quarter_octaves(numbers: Ints | NDArray[np.float64]) -> Ints:
    """Return 4 log2 of whole numbers from 1 to 2^53, rounded to the nearest whole number; same shape."""
    bits = numbers.astype(np.float64).view(np.int64)  # exact: whole numbers below 2^53
    quarters = _QUARTERS[(bits >> _EXPONENT - _FRACTION) & ((1 << _FRACTION) - 1)]
    levels: Ints = PER_OCTAVE * ((bits >> _EXPONENT) - _ZERO) + quarters
    return levels


MAGNITUDES = 8 * 277  # covers the whole range of float32
SUBNORMAL = 149  # 2^-149 is the smallest positive float32
_MANTISSAS = (32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097)  # 2^15 * 2^(k / 8)


def magnitude(eighths: int) -> np.float32:
    """Return the magnitude for a number of eighths of an octave, from 0 and below `MAGNITUDES`."""
    return np.float32(math.ldexp(_MANTISSAS[eighths % 8], eighths // 8 - SUBNORMAL - 15))


def nearest(size: float) -> int:
    """Return the number of eighths of an octave nearest to a magnitude above 0."""
    return max(0, min(round(8 * (math.log2(size) + SUBNORMAL)), MAGNITUDES - 1))
