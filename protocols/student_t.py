"""Quantiles of Student's t and of the beta distribution, for intervals, without SciPy."""

import math
from collections.abc import Callable
from functools import lru_cache

_STEPS = 200  # steps of a continued fraction, or halvings of an interval: more than float64 needs
_TINY = 1e-300


@lru_cache(1024)
def student_t_quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution for `share` (0.5 <= share < 1).

    Args:
        share: probability of smaller values.
        freedom: degrees of freedom, above 0, not necessarily whole.
    """
    high = 1.0
    while student_t_share(high, freedom) < share:
        high *= 2
    return _crossing(lambda value: student_t_share(value, freedom) < share, high)


def student_t_share(value: float, freedom: float) -> float:
    """Return the probability of Student's t distribution below `value`, which is at least 0."""
    at = freedom / (freedom + value * value)
    return 1.0 - 0.5 * _incomplete_beta(at, freedom / 2, 0.5)


@lru_cache(1024)
def beta_quantile(share: float, a: float, b: float) -> float:
    """Return the quantile of the beta distribution with shapes a, b > 0 for `share` (0 < share < 1)."""
    return _crossing(lambda value: _incomplete_beta(value, a, b) < share, 1.0)


def _crossing(is_below: Callable[[float], bool], high: float) -> float:
    """Return the smallest value from 0 to `high` for which `is_below` is False, by bisection."""
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), Abramowitz and Stegun 26.5.8 by Lentz's
    method.
    """
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    d = 1.0 / ((1.0 - (a + b) * x / (a + 1)) or _TINY)
    c, fraction = 1.0, d
    for step in range(1, _STEPS):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or _TINY)
            c = (1.0 + term / c) or _TINY
            fraction *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return front * fraction / a
