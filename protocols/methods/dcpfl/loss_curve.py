"""The round in which a loss curve stops falling fast (DC-PFL, section III-C)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Curve = NDArray[np.float64]


def smooth(losses: ArrayLike, window: int) -> Curve:
    """Smoothed losses l_w(t): the mean of the last min(window, t) losses, shape (T,).

    Differs from the paper: the printed formula divides window + 1 terms by window, so that the curve rises at
    its start.

    Args:
        losses: loss of each round, shape (T,).
        window: s, number of rounds in a mean.
    """
    values = np.asarray(losses, dtype=np.float64)
    return np.array([values[max(0, t - window) : t].mean() for t in range(1, values.size + 1)])


def radius(smoothed: ArrayLike, window: int) -> Curve:
    """Radius of curvature r(t) = (1 + l'^2)^1.5 / l'' of eq. (4), shape (T,).

    l' and l'' are first and second differences. The radius is infinite where the curve does not bend up (l''
    <= 0), and NaN before round max(window + 1, 3).
    """
    values = np.asarray(smoothed, dtype=np.float64)
    radii = np.full(values.size, np.nan)
    first = max(window + 1, 3) - 1
    if values.size > first:
        slope = np.diff(values)
        bend = np.diff(slope)
        bends_up = bend > 0
        curvature = np.where(bends_up, bend, 1.0)
        with np.errstate(over="ignore"):
            found = np.where(bends_up, (1 + slope[1:] ** 2) ** 1.5 / curvature, np.inf)
        radii[first:] = found[first - 2 :]
    return radii


def rapid_decrease_end(radii: Sequence[float] | Curve, observe: int) -> tuple[int, int] | None:
    """Find the first round t whose radius is strictly below those of the next `observe` rounds (t^obv).

    Returns:
        t, and the round t + observe that confirms it, both counted from 1; None if there is none yet.
    """
    values = np.asarray(radii, dtype=np.float64)
    for index in range(values.size - observe):
        if np.all(values[index] < values[index + 1 : index + 1 + observe]):
            return index + 1, index + 1 + observe
    return None
