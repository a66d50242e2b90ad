"""BLS (Zhi et al., section 5): chooses the layers that KAPC sends down and up.

Arrays count layers from 0. `uploaded`, the paper's Omega, is a number of layers in 1..L: layers 1..Omega are
sent up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Search = Literal["largest", "literal"]
PerLayer = NDArray[np.float64]  # shape (L,)


@dataclass(frozen=True)
class Visit:
    """A device's record of its last visit, that is, its last round.

    Attributes:
        norms, distances: B^l and tau^l of the full target, float64, shape (L,).
        uploaded: Omega.
    """

    norms: PerLayer
    distances: PerLayer
    uploaded: int


def self_taught(rows: NDArray[np.float64], place: int, threshold: float) -> list[int]:
    """Return the layers not sent down: those whose own share is above `threshold` (Algorithm 3).

    Args:
        rows: the device's rows of the cube among the participants, shape (L, N).
        place: column of the device.
        threshold: mu of the paper.
    """
    return [layer for layer, row in enumerate(rows) if row[place] > threshold]


def bounds(weights: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]]) -> tuple[PerLayer, PerLayer]:
    """Return B^l = ||w^l|| and tau^l = ||w^l - s^l||, Frobenius norms in float64 (eq. 30 and 31)."""
    pairs = [(w.astype(np.float64), s.astype(np.float64)) for w, s in zip(weights, targets, strict=True)]
    norms = np.array([np.linalg.norm(w) for w, _ in pairs])
    return norms, np.array([np.linalg.norm(w - s) for w, s in pairs])


def criterion(
    uploaded: int,
    full: tuple[ArrayLike, ArrayLike],
    partial: tuple[ArrayLike, ArrayLike],
    outputs: Sequence[int],
    inputs: Sequence[int],
    num_classes: int,
) -> tuple[float, float, bool]:
    """Return both sides of inequality (29), and True if layers 1..`uploaded` satisfy it.

    With O for `uploaded`, the inequality is

        L * d * M~(O) / (O * c * 2^(L-O)) * prod_{l<=O} B~^l / prod_{l<=L} B^l < M(L)

    If it holds, sending O layers gives a lower bound of the generalisation error per layer than sending all.
    It is computed in logarithms. A side is infinite if it leaves the range of numbers, or if a layer in a
    denominator is all zero. The inequality then does not hold.

    Args:
        uploaded: Omega of the paper.
        full: B and tau of the full target, each (L,).
        partial: B~ and tau~ of this round's target, each (L,).
        outputs: d of each layer, the rows of its weight as a matrix.
        inputs: n of each layer, the columns of its weight as a matrix.
        num_classes: c, number of classes among the device's training samples, at least 1. It is 1 if the task
            has no classes; the left side is then at its largest, and the fewest layers are left out.
    """
    num_layers = len(outputs)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        norms, norms_now = np.log(full[0]), np.log(partial[0])
        log_left = (
            math.log(num_layers * outputs[uploaded - 1])
            + _log_sum(uploaded, norms_now, np.log(partial[1]), inputs)
            - math.log(uploaded * num_classes)
            - (num_layers - uploaded) * math.log(2)
            + norms_now[:uploaded].sum()
            - norms.sum()
        )
        log_right = _log_sum(num_layers, norms, np.log(full[1]), inputs)
        left, right = (math.inf if np.isnan(side) else float(np.exp(side)) for side in (log_left, log_right))
        return left, right, bool(np.isfinite(norms).all() and log_left < log_right)


def search(
    previous: int,
    num_layers: int,
    satisfied: Callable[[int], bool],
    *,
    first: bool,
    mode: Search = "largest",
) -> int:
    """Return the number of layers to send up, 1..num_layers (Algorithm 4).

    At the first visit, and after all layers were sent, the result is all layers but one. Otherwise the search
    moves from `previous`, the last visit's number.

    `largest` moves up while the inequality is satisfied, else down until it is. This finds the largest
    satisfying number if these numbers form a prefix, as they did in measurements. `literal` moves as printed:
    down to the first number that does not satisfy the inequality, or up to the first that does.
    """
    if first or previous == num_layers:
        return max(1, num_layers - 1)
    starts_satisfied = satisfied(previous)
    if mode == "literal":
        onward = range(previous - 1, 0, -1) if starts_satisfied else range(previous + 1, num_layers)
        end = 1 if starts_satisfied else num_layers
        return next((number for number in onward if satisfied(number) != starts_satisfied), end)
    if starts_satisfied:
        above = range(previous + 1, num_layers + 1)
        return next((number - 1 for number in above if not satisfied(number)), num_layers)
    return next((number for number in range(previous - 1, 0, -1) if satisfied(number)), 1)


def select(
    last: Visit | None,
    weights: Sequence[NDArray[Any]],
    targets: Sequence[NDArray[Any]],
    shapes: Sequence[tuple[int, int]],
    num_classes: int,
    mode: Search,
) -> Visit:
    """Choose Omega by Algorithm 4, with bounds that persist from call to call.

    As printed, the algorithm would reset them at every call.

    Args:
        last: record of the last visit; None at the first.
        weights: weights of each layer after training.
        targets: target of each layer; the weights before the round if the layer got none.
        shapes: d and n of each layer (see `criterion`).
        num_classes: number of classes among the device's training samples.
        mode: see `search`.
    """
    partial = bounds(weights, targets)
    full, previous = partial, len(shapes)
    if last is not None:
        full, previous = (last.norms, last.distances), last.uploaded
        if previous == len(shapes):
            full = np.maximum(full[0], partial[0]), np.maximum(full[1], partial[1])
    outputs, inputs = zip(*shapes, strict=True)

    def satisfied(uploaded: int) -> bool:
        return criterion(uploaded, full, partial, outputs, inputs, max(1, num_classes))[2]

    return Visit(*full, search(previous, len(shapes), satisfied, first=last is None, mode=mode))


def _log_sum(uploaded: int, norms: PerLayer, distances: PerLayer, inputs: Sequence[int]) -> float:
    """Return the logarithm of M(O) = sum_{m<=O} tau^m / (2 B^m) * prod_{m<q<=O} sqrt(n^q).

    `norms` and `distances` are logarithms of B and tau.
    """
    widths = np.cumsum(np.log(np.asarray(inputs[:uploaded], dtype=np.float64))) / 2
    terms = distances[:uploaded] - norms[:uploaded] - math.log(2) + widths[-1] - widths
    return float(np.logaddexp.reduce(terms))
