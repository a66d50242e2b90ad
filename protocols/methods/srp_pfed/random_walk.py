"""SRP-pFed's choice of rates (section III-B): a random walk with reinforced memory over c candidates.

`memory` is h, the credit of each candidate so far: float64, shape (c,), 1 at the start.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Reduction = Literal["mean", "sum"]


def probabilities(memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of each rate, its share of h (eq. 7), shape (c,). Uniform if the sum of h is 0 or
    overflows.
    """
    total = float(memory.sum())
    if not 0 < total < math.inf:
        return np.full(memory.size, 1 / memory.size)
    chances: NDArray[np.float64] = memory / total
    return chances


def draw(chances: NDArray[np.float64], u: NDArray[np.float64]) -> list[int]:
    """Draw a rate for each number in `u`: the smallest index j with F_j >= u (Alg. 2, SAMPLEUPDATERATE).

    Args:
        chances: probability of each rate, shape (c,). F is their cumulative sum.
        u: uniform random numbers in (0, 1].
    """
    last = chances.size - 1  # rounding may leave the last F just below 1
    return [min(int(j), last) for j in np.searchsorted(np.cumsum(chances), u, side="left")]


def distinct(drawn: Iterable[int]) -> tuple[int, ...]:
    """The drawn indices without repetition, in the order of their first draw."""
    return tuple(dict.fromkeys(drawn))


def increment(losses: Sequence[float], reduction: Reduction) -> float:
    """Credit b of a round (eq. 6): 1 - sigmoid(loss).

    Differs from the paper: the loss is the mean over devices unless `reduction` is "sum". The credit of a sum
    is almost 0: ten devices with a loss of 2.3 give 1e-10, and h decays to zero.
    """
    total = sum(losses)
    loss = total / max(1, len(losses)) if reduction == "mean" else total
    grown = math.exp(-abs(loss))
    return (grown if loss > 0 else 1.0) / (1.0 + grown)


def reinforce(
    memory: NDArray[np.float64], drawn: Sequence[int], gain: float, decay: float
) -> NDArray[np.float64]:
    """The next h: decay * h, plus `gain` once for each rate in `drawn` (eq. 6; `decay` is lambda)."""
    renewed = decay * memory
    renewed[list(distinct(drawn))] += gain
    return renewed
