"""Magnitudes of float32 in eighths of an octave above 2^-149, equal on every machine."""

import math

import numpy as np

MAGNITUDES = 8 * 277  # covers the whole range of float32
SUBNORMAL = 149  # 2^-149 is the smallest positive float32
_MANTISSAS = (32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097)  # 2^15 * 2^(k / 8)


def magnitude(eighths: int) -> np.float32:
    """Magnitude for a number of eighths of an octave, from 0 and below `MAGNITUDES`."""
    return np.float32(math.ldexp(_MANTISSAS[eighths % 8], eighths // 8 - SUBNORMAL - 15))


def nearest(size: float) -> int:
    """Nearest number of eighths of an octave for a magnitude above 0."""
    return max(0, min(round(8 * (math.log2(size) + SUBNORMAL)), MAGNITUDES - 1))
