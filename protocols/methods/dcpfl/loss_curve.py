"""Where a loss curve stops falling fast, from its values alone (DC-PFL, section III-C)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Curve = NDArray[np.float64]


def smooth(losses: ArrayLike, window: int) -> Curve:
    """l_w(t): the mean of the last min(window, t) losses, shape as `losses`, (T,).

    Differs from the paper: its printed window sums window + 1 terms over window, which makes the curve
    rise at its beginning.
    """
    values = np.asarray(losses, dtype=np.float64)
    return np.array([values[max(0, t - window) : t].mean() for t in range(1, values.size + 1)])


def radius(smoothed: ArrayLike, window: int) -> Curve:
    """r(t) = (1 + l'^2)^1.5 / l'' of eq. (4), l' and l'' being differences; shape (T,).

    Infinite where the curve bends down or not at all (l'' <= 0); NaN before round max(window + 1, 3).
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
    """The first round t whose radius is strictly below those of the next `observe` rounds (t^obv).

    Returns:
        t and the round in which this is known, t + observe, both from 1; None: not yet.
    """
    values = np.asarray(radii, dtype=np.float64)
    for index in range(values.size - observe):
        if np.all(values[index] < values[index + 1 : index + 1 + observe]):
            return index + 1, index + 1 + observe
    return None
