"""DC-PFL's measures: discrepancy of models, groups of similar models, and upload intervals of layers.

Pure functions on arrays. A model is a flat vector of parameters without running statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]


def scale(w: FloatArray) -> FloatArray:
    """Scale a vector to 0..1: S(w) = (w - min) / (max - min). A constant vector becomes zeros (eq. 3)."""
    low, high = w.min(), w.max()
    if not high > low:
        return np.zeros_like(w)
    with np.errstate(over="ignore"):
        width = high - low
    if not np.isfinite(width):
        return scale(w / 2)
    scaled: FloatArray = (w - low) / width
    return scaled


def _distance(one: FloatArray, other: FloatArray) -> float:
    return float(np.abs(one - other).mean(dtype=np.float64))


def discrepancy(models: Sequence[FloatArray]) -> Matrix:
    """Return D_ij = mean |S(w_i) - S(w_j)| over whole models (eq. 3), shape (devices, devices)."""
    scaled = [scale(model) for model in models]
    matrix = np.zeros((len(scaled), len(scaled)))
    for i, one in enumerate(scaled):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = _distance(one, scaled[j])
    return matrix


def layer_discrepancy(
    copies: Sequence[Sequence[FloatArray]], group_layers: Sequence[FloatArray]
) -> tuple[NDArray[np.float64], float]:
    """Return D_gl = mean over members of mean |S(w_l,i) - S(w_l,group)| (eq. 5), and its mean over layers.

    Args:
        copies: for each layer, the copies of its members, at least one.
        group_layers: for each layer, the group's values.

    Returns:
        D_gl, shape (layers,), and its mean D_g.
    """
    found = [
        np.mean([_distance(scale(copy), scale(shared)) for copy in members])
        for members, shared in zip(copies, group_layers, strict=True)
    ]
    return np.array(found), float(np.mean(found))


def intervals(
    layer_discrepancies: NDArray[np.float64], mean: float, alpha: int, tau: int, low: float = 0.1
) -> Labels:
    """Return each layer's upload interval in rounds: alpha * tau if D_gl < low * D_g, else tau (eq. 6)."""
    return waits(np.asarray(layer_discrepancies) < low * mean, alpha, tau)


def waits(calm: NDArray[np.bool_], alpha: int, tau: int) -> Labels:
    """Return each layer's upload interval in rounds: alpha * tau for calm layers, tau for the others."""
    return np.where(calm, alpha * tau, tau).astype(np.int64)


def calm_layers(
    layer_discrepancies: NDArray[np.float64], sizes: NDArray[np.int64], frequent_share: float
) -> NDArray[np.bool_]:
    """Mark the layers that wait: all but the most discrepant ones that fit into a share of the parameters.

    Layers are taken by falling discrepancy, ties in order. A layer that does not fit waits, but smaller
    layers after it may still be taken. If none fits, the most discrepant layer is taken.

    Differs from the paper: eq. (6) has a threshold of 0.1 of the mean, and hardly any layer is below it. But
    the times in the paper's tables imply that fc1 and fc2 wait, although fc1 is more discrepant than most
    layers.

    Args:
        layer_discrepancies: D_gl, shape (layers,).
        sizes: number of parameters of each layer, shape (layers,).
        frequent_share: largest share of all parameters in layers that do not wait, in [0, 1].

    Returns:
        True for each layer that waits, shape (layers,).
    """
    order = np.argsort(-np.asarray(layer_discrepancies), kind="stable")
    calm, room = np.ones(order.size, dtype=bool), frequent_share * float(sizes.sum())
    for layer in order:
        if sizes[layer] <= room:
            calm[layer] = False
            room -= float(sizes[layer])
    if calm.all():
        calm[order[0]] = False
    return calm


def due(round_number: int, every: Labels) -> NDArray[np.bool_]:
    """Mark the layers that are shared in a round (from 1): those whose interval divides its number."""
    divides: NDArray[np.bool_] = round_number % np.asarray(every, dtype=np.int64) == 0
    return divides


def groups_at(distances: Matrix, gamma: float) -> tuple[Labels, float]:
    """Return average-linkage groups: clusters merge while their distance is at most gamma * gamma_global.

    Args:
        distances: shape (devices, devices), symmetric, zero diagonal.
        gamma: normalised threshold in [0, 1].

    Returns:
        Group of each device, numbered by first appearance, shape (devices,); and gamma_global, the height of
        the last merge (section III-B).
    """
    if len(distances) < 2:
        return np.zeros(len(distances), dtype=np.int64), 0.0
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances, checks=False), "average")
    height = float(tree[:, 2].max())
    return by_appearance(fcluster(tree, gamma * height, "distance")), height


def by_appearance(labels: Sequence[int] | NDArray[Any]) -> Labels:
    """Return the same groups, numbered 0, 1, ... in the order in which they first appear."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(int(label), len(numbers)) for label in labels], dtype=np.int64)


def next_gamma(
    distances: Matrix, current: Sequence[int] | Labels, gamma: float, step: float
) -> tuple[float, Labels]:
    """Return the next lower threshold that changes the groups, and these groups; 0 and `current` if none
    does.

    The paper says "adding a step", but gamma must fall for groups to split.
    """
    now = by_appearance(current)
    while gamma > 0:
        gamma = max(0.0, round(gamma - step, 10))
        labels, _ = groups_at(distances, gamma)
        if not np.array_equal(labels, now):
            return gamma, labels
    return 0.0, now


def better(new_losses: Sequence[float], old_losses: Sequence[float]) -> bool:
    """True if the new groups win a trial: their mean loss is strictly lower (NaN never wins)."""
    return bool(np.mean(new_losses) < np.mean(old_losses))


@dataclass(frozen=True)
class PairMeans:
    """Mean discrepancy of each pair of devices, over the rounds in which both could be compared.

    Attributes:
        devices: devices of the rows and columns, in the order of their arrival.
        sums: sums of D_ij, shape (devices, devices).
        counts: number of rounds in each sum, same shape.
    """

    devices: tuple[str, ...] = ()
    sums: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    counts: Labels = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    def lacks(self, devices: Sequence[str], rounds: int) -> bool:
        """True if some pair of these devices has been compared in fewer than `rounds` rounds."""
        known = {device: row for row, device in enumerate(self.devices)}
        if not known.keys() >= set(devices):
            return True
        rows = [known[device] for device in devices]
        return bool((self.counts[np.ix_(rows, rows)] < rounds).any())

    def add(self, devices: Sequence[str], distances: Matrix, rounds: int) -> Self:
        """Add one round's D_ij between these devices. Each pair counts in its first `rounds` rounds only."""
        new = [device for device in devices if device not in self.devices]
        names = (*self.devices, *new)
        sums, counts = np.pad(self.sums, (0, len(new))), np.pad(self.counts, (0, len(new)))
        rows = [names.index(device) for device in devices]
        here = np.ix_(rows, rows)
        wanted = counts[here] < rounds
        sums[here] += np.where(wanted, distances, 0)
        counts[here] += wanted
        return type(self)(names, sums, counts)

    def without_device(self, device: str) -> Self:
        """Return the means without the pairs of one device."""
        if device not in self.devices:
            return self
        row = self.devices.index(device)
        kept = [at for at in range(len(self.devices)) if at != row]
        names, here = tuple(self.devices[at] for at in kept), np.ix_(kept, kept)
        return type(self)(names, self.sums[here], self.counts[here])

    def compared(self) -> tuple[str, ...]:
        """Return the devices that have been compared with another device."""
        others = (self.counts > 0).sum(axis=1) > 1
        return tuple(device for device, met in zip(self.devices, others, strict=True) if met)

    def average(self) -> Matrix:
        """Return the mean discrepancy of each pair, shape (devices, devices).

        Some pairs were never compared (partial participation, late joiners). Such a pair gets min_k max(D_ik,
        D_jk) over its common partners k, the height at which k would join the two. Without a common partner,
        it gets the mean of the compared pairs.
        """
        known = self.counts > 0
        means = self.sums / np.maximum(self.counts, 1)
        pairs = known & ~np.eye(len(means), dtype=bool)
        usual = float(means[pairs].mean()) if pairs.any() else 0.0
        reach = np.where(known, means, np.inf)
        for i in np.flatnonzero(~known.all(axis=1)):
            through = np.maximum(reach[i], reach).min(axis=1)
            means[i] = np.where(known[i], means[i], np.where(np.isfinite(through), through, usual))
        return means

    def between(self, devices: Sequence[str]) -> Matrix:
        """Return the part of `average` for these devices, shape (len(devices), len(devices))."""
        rows = [self.devices.index(device) for device in devices]
        return self.average()[np.ix_(rows, rows)]
