"""Losses by name: one rule each for an output and its target, shared by numpy and torch.

A rule gives values and slopes (derivatives by the output), so that a backward pass is one product, in torch
and in graphs for devices without it. A sample's loss is the mean over its outputs.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.settings.task import TaskSection

CROSS_ENTROPY, BINARY, QUANTILE = "cross-entropy", "binary-cross-entropy", "quantile"
Pair = tuple[Any, Any]
Rule = Callable[[ModuleType, Any, Any, TaskSection], Pair]


def _squared(_: ModuleType, outputs: Any, targets: Any, __: TaskSection) -> Pair:
    residual = outputs - targets
    return residual * residual, 2 * residual


def _absolute(xp: ModuleType, outputs: Any, targets: Any, _: TaskSection) -> Pair:
    residual = outputs - targets
    return xp.abs(residual), xp.sign(residual)


def _huber(xp: ModuleType, outputs: Any, targets: Any, section: TaskSection) -> Pair:
    delta = section.huber_delta
    residual = outputs - targets
    slopes = xp.clip(residual, -delta, delta)
    return slopes * (residual - slopes / 2), slopes


def _binary(xp: ModuleType, outputs: Any, targets: Any, section: TaskSection) -> Pair:
    """Return binary cross-entropy from logits; `class_weights` multiply the part of a present label.

    These are torch's pos_weight.
    """
    weights = _array(xp, section.class_weights or (1.0,), outputs)
    present = targets * weights
    factor = present + (1 - targets)
    remainder = xp.exp(-xp.abs(outputs))
    softplus = (outputs + xp.abs(outputs)) / 2 + xp.log(1 + remainder)
    chance = xp.exp(outputs - softplus)
    return factor * softplus - present * outputs, factor * chance - present


def _quantile(xp: ModuleType, outputs: Any, targets: Any, section: TaskSection) -> Pair:
    """Return the pinball loss: outputs (n, k, quantiles), targets (n, k, 1)."""
    quantiles = _array(xp, section.quantiles, outputs)
    residual = targets - outputs
    sign = xp.sign(residual)
    slopes = -(quantiles - (1 - sign) / 2)
    return -slopes * residual, slopes


RULES: dict[str, Rule] = {
    "squared": _squared,
    "absolute": _absolute,
    "huber": _huber,
    BINARY: _binary,
    QUANTILE: _quantile,
}


def _array(xp: ModuleType, numbers: tuple[float, ...], beside: Any) -> Any:
    """Return `numbers` as an array on the device of `beside`, which may be a GPU."""
    found = xp.asarray(numbers, dtype=xp.float32)
    return found if xp is np else found.to(beside.device)


def shaped(name: str, outputs: Any, targets: Any, section: TaskSection) -> Pair:
    """Return outputs and targets in the shapes that the loss pairs, batch axis first."""
    if name == QUANTILE:
        return outputs.reshape(-1, targets.shape[1], len(section.quantiles)), targets[:, :, None]
    return outputs, targets


def sample_losses(
    name: str, section: TaskSection, outputs: NDArray[np.float32], targets: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the loss of each sample, shape (n,), computed by numpy.

    Args:
        name: one of `RULES`, or `CROSS_ENTROPY`.
        section: the run's [task].
        outputs: the model's outputs, shape (n, outputs).
        targets: int64 classes, shape (n,), for cross-entropy; else float32, shape (n, numbers).
    """
    if name == CROSS_ENTROPY:
        return _cross_entropy(section, outputs, targets)
    with np.errstate(over="ignore"):
        values, _ = RULES[name](np, *shaped(name, outputs, targets, section), section)
    losses: NDArray[np.float64] = values.reshape(len(values), -1).mean(axis=1, dtype=np.float64)
    return losses


def _cross_entropy(
    section: TaskSection, outputs: NDArray[np.float32], labels: NDArray[np.int64]
) -> NDArray[np.float64]:
    highest = outputs.max(axis=1)
    log_sums = np.log(np.exp(outputs - highest[:, None]).sum(axis=1)) + highest
    picked = outputs[np.arange(len(labels)), labels]
    smoothing = np.float32(section.label_smoothing)
    aim = picked if not smoothing else (1 - smoothing) * picked + smoothing * outputs.mean(axis=1)
    losses: NDArray[np.float64] = (log_sums - aim).astype(np.float64)
    if not section.class_weights:
        return losses
    weights: NDArray[np.float64] = np.array(section.class_weights)[labels]
    return losses * weights
