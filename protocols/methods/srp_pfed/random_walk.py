"""SRP-pFed's update rates (section III-B): a random walk with reinforced memory over c candidates.

`memory` is h: how well each candidate did so far, float64, shape (c,), 1 at the start.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Reduction = Literal["mean", "sum"]


def probabilities(memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each rate's share of h (eq. 7), shape (c,); uniform where h sums to nothing or overflows."""
    total = float(memory.sum())
    if not 0 < total < math.inf:
        return np.full(memory.size, 1 / memory.size)
    chances: NDArray[np.float64] = memory / total
    return chances


def draw(chances: NDArray[np.float64], u: NDArray[np.float64]) -> list[int]:
    """For each of `u`, in (0, 1], the smallest j with F_j >= u (Alg. 2, SAMPLEUPDATERATE)."""
    last = chances.size - 1  # its F may be a rounding below 1
    return [min(int(j), last) for j in np.searchsorted(np.cumsum(chances), u, side="left")]


def distinct(drawn: Iterable[int]) -> tuple[int, ...]:
    """Each once, in the order first drawn."""
    return tuple(dict.fromkeys(drawn))


def increment(losses: Sequence[float], reduction: Reduction) -> float:
    """The b of eq. 6: 1 - sigmoid(loss).

    Differs from the paper: the loss is the devices' mean unless `reduction` says "sum". A sum leaves
    next to nothing: ten devices at 2.3 give 1e-10, and h decays to zero.
    """
    total = sum(losses)
    loss = total / max(1, len(losses)) if reduction == "mean" else total
    grown = math.exp(-abs(loss))
    return (grown if loss > 0 else 1.0) / (1.0 + grown)


def reinforce(
    memory: NDArray[np.float64], drawn: Sequence[int], gain: float, decay: float
) -> NDArray[np.float64]:
    """The next h: decay * h, plus `gain` on each drawn rate, once (eq. 6; `decay` is lambda)."""
    renewed = decay * memory
    renewed[list(distinct(drawn))] += gain
    return renewed
