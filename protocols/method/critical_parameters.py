"""Critical parameters: the entries that matter most to a device's loss, and devices that agree on them.

FedCAC (Wu et al., ICCV 2023) and FedPURIN (Xie, He, Shi) share these steps; sections and equations are
FedPURIN's. Masks are bool. Weights are float32 or float64 and keep their type. All have one shape (d,); with
a `spec`, d is spec.size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.model.spec import Kind, MaskArray, ModelSpec

Floats = NDArray[Any]

EARLIER_BETA = 100  # default for runs of releases in which beta did not depend on the number of rounds
CUTOFF = 1e-10  # smaller scores count as noise (section 4.5)
_SLACK = 1e-12  # rounding tolerance, so that an overlap equal to the threshold in exact arithmetic counts


def perturbation(weights: Floats, gradient: Floats, *, second_order: bool = False) -> Floats:
    """Return the change of the loss if an entry becomes 0: |g * w|, or |-g * w + (g * w)^2 / 2| (eq. 7).

    Products that overflow float32 are computed in float64.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = gradient * weights
        scores: Floats = np.abs(product**2 / 2 - product if second_order else product)
    if scores.dtype == np.float64 or np.isfinite(scores).all():
        return scores
    return perturbation(weights.astype(np.float64), gradient.astype(np.float64), second_order=second_order)


def critical_mask(scores: Floats, tau: float, *, keep_all_zero: bool = True) -> MaskArray:
    """Mark the k = floor(tau * d) highest scores of one tensor, all ties included (eq. 8).

    If the k-th score is at most `CUTOFF`, all scores above `CUTOFF` are marked instead (section 4.5). If
    there are none, `keep_all_zero` decides. True marks the k highest with ties, as the authors' code does, so
    an all-zero tensor is marked whole. False marks nothing, as the paper's text says.
    """
    k = int(tau * scores.size)
    if k == 0:
        return np.zeros(scores.shape, dtype=bool)
    threshold = np.partition(scores.ravel(), scores.size - k)[scores.size - k]
    above: MaskArray = scores > CUTOFF
    highest: MaskArray = scores >= threshold
    if threshold > CUTOFF or (keep_all_zero and not above.any()):
        return highest
    return above


def critical_entries(
    scores: Floats, tau: float, spec: ModelSpec, kinds: Collection[Kind], *, keep_all_zero: bool = True
) -> MaskArray:
    """Return `critical_mask` of every tensor of the given kinds, shape (spec.size,)."""
    critical = np.zeros(spec.size, dtype=bool)
    for tensor in spec.tensors:
        if tensor.kind in kinds:
            here = spec.slices[tensor.name]
            critical[here] = critical_mask(scores[here], tau, keep_all_zero=keep_all_zero)
    return critical


def overlap_ratios(masks: Sequence[MaskArray]) -> NDArray[np.float64]:
    """Return O_ij = 1 - |m_i - m_j|_1 / (2 n_i), where device i has n_i critical entries (section 3.3).

    The result has shape (N, N) and a diagonal of 1. It is not symmetric if counts differ, and it is negative
    if j's mask is much larger. A device without critical entries has overlap 0 with all others.
    """
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    overlap = np.eye(len(masks))
    for i, first in enumerate(masks):
        for j in range(i):
            distance = int(np.count_nonzero(first != masks[j]))
            overlap[i, j] = 1 - distance / (2 * counts[i]) if counts[i] else 0.0
            overlap[j, i] = 1 - distance / (2 * counts[j]) if counts[j] else 0.0
    return overlap


def mean_and_largest(overlap: NDArray[np.float64]) -> tuple[float, float]:
    """Return O_avg and O_max over i != j; (0, 0) for a single device."""
    others = overlap[~np.eye(len(overlap), dtype=bool)]
    return (float(others.mean()), float(others.max())) if others.size else (0.0, 0.0)


def threshold_of(mean: float, largest: float, number: int, beta: int) -> float:
    """Return the overlap threshold of round `number`: mean + t / beta * (largest - mean) (section 3.3).

    This is the paper's threshold for t <= beta.
    """
    return mean + number / beta * (largest - mean)


def collaborators(
    overlap: NDArray[np.float64], mean: float, largest: float, number: int, beta: int
) -> list[list[int]]:
    """Return C_i = {j != i : O_ij >= T} of each device in round `number` (section 3.3); empty after round
    beta.
    """
    if number > beta:
        return [[] for _ in overlap]
    threshold = threshold_of(mean, largest, number, beta) - _SLACK
    return [[int(j) for j in np.flatnonzero(row >= threshold) if j != i] for i, row in enumerate(overlap)]


def beta_of_run(rounds: int) -> int:
    """Return the default of beta: half of all rounds, rounded up.

    FedPURIN's experiments use 100 of 200 and 170 of 300.
    """
    return (rounds + 1) // 2


def masked_mean(
    models: Sequence[Floats], weights: Sequence[float] | None = None, masks: Sequence[MaskArray] | None = None
) -> Floats:
    """Return the mean of masked models, 0 at entries that no device sent (eq. 9 over C_i and i; eq. 10 over
    all).

    Args:
        models: models with 0 at entries that the device did not send.
        weights: weights of the devices; None or all 0 means equal weights.
        masks: if given, each entry is divided by the weights of the devices that sent it. None divides by all
            weights, as the paper and its authors' code do; entries critical to few devices then shrink.
    """
    shares = weights if weights is not None and any(weights) else [1.0] * len(models)
    total, divisor = np.zeros(models[0].shape), np.zeros(models[0].shape)
    for i, (model, share) in enumerate(zip(models, shares, strict=True)):
        total += np.float64(share) * model
        divisor += share * masks[i] if masks is not None else share
    divided: Floats = (total / np.where(divisor > 0, divisor, 1)).astype(models[0].dtype)
    return divided


@dataclass(frozen=True)
class Collaboration:
    """Overlaps and collaboration of the devices in one round.

    Attributes:
        mean_overlap, largest_overlap: O_avg and O_max.
        threshold: T, the smallest overlap of devices that collaborate.
        collaborators: mean number of collaborators of a device.
    """

    mean_overlap: float
    largest_overlap: float
    threshold: float
    collaborators: float


def collaborated_models(
    masks: Sequence[MaskArray], models: Sequence[Floats], number: int, beta: int
) -> tuple[list[Floats | None], Collaboration | None]:
    """Return the collaborative models delta_i of round `number` (eq. 9), and the overlaps behind them.

    delta_i is None if C_i is empty. After round beta no devices collaborate, and the second value is None.

    Args:
        masks: m_i of each device.
        models: masked weights of each device.
        number: the paper's t.
        beta: last round with collaboration.
    """
    if number > beta:
        return [None] * len(masks), None
    overlap = overlap_ratios(masks)
    mean, largest = mean_and_largest(overlap)
    chosen = collaborators(overlap, mean, largest, number, beta)
    deltas = [
        masked_mean([models[i], *(models[j] for j in others)]) if others else None
        for i, others in enumerate(chosen)
    ]
    number_of_others = sum(map(len, chosen)) / max(1, len(chosen))
    threshold = threshold_of(mean, largest, number, beta)
    return deltas, Collaboration(mean, largest, threshold, number_of_others)


COLLABORATION_DIAGNOSTICS = (
    Diagnostic(
        "mean_overlap",
        "overlap, mean",
        "O_avg: how much devices' critical entries overlap, 1 where they are the same.",
        "number",
        "round",
    ),
    Diagnostic("largest_overlap", "overlap, largest", "O_max, of any two devices.", "number", "round"),
    Diagnostic(
        "overlap_threshold",
        "overlap needed",
        "T: from O_avg in the first round it rises to O_max at t = beta, so that ever fewer collaborate.",
        "number",
        "round",
    ),
    Diagnostic(
        "collaborators",
        "collaborators",
        "How many others a device's critical entries were averaged with, mean over devices; 0 beyond beta.",
        "number",
        "round",
    ),
    Diagnostic(
        "collaborating",
        "in the first phase",
        "1 up to t = beta, 0 beyond it, where nobody collaborates on critical entries.",
        "count",
        "round",
    ),
    Diagnostic(
        "critical",
        "critical",
        "The share of all parameters that the device marked as critical.",
        "share",
        "update",
    ),
)


def collaboration_figures(collaboration: Collaboration | None) -> dict[str, Figure]:
    """Return `COLLABORATION_DIAGNOSTICS` of a round."""
    if collaboration is None:
        return {"collaborators": 0, "collaborating": 0}
    return {
        "mean_overlap": collaboration.mean_overlap,
        "largest_overlap": collaboration.largest_overlap,
        "overlap_threshold": collaboration.threshold,
        "collaborators": collaboration.collaborators,
        "collaborating": 1,
    }
