"""Bounds and hides one device's step, for [privacy]: clips its norm, and adds normal noise.

A step is the update's values minus those of the task, for the entries that the update has. Norms and clipping
use float64. What is sent is float32, so the noised values are rounded after the noise is added.
"""

import math
from collections.abc import Iterator

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.private_noise import Draw
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, where

_CHUNK = 2**15  # entries at a time, so that temporary arrays stay in the processor's cache
_LARGEST = float(np.finfo(np.float32).max)
_SHRINK = 1 - 1e-12  # more than the rounding errors of float64 in a norm
_MOST_TRIES = 8


def task_values(task: Patch, update: Patch, spec: ModelSpec) -> FlatArray:
    """Return the task's values of the entries that an update has, shape (update.values.size,).

    Raises:
        PacketCorrupt: the update has an entry that the task lacks.
    """
    if isinstance(task.selection, Everything) and isinstance(update.selection, Everything):
        return task.values
    sent, trained = task.selection.mask(spec), update.selection.mask(spec)
    if not sent[trained].all():
        raise PacketCorrupt("the update has entries that its task lacks, so it is no step from the task")
    whole = np.zeros(spec.size, np.float32)
    whole[where(task.selection, spec)] = task.values
    return whole[trained]


def step_norm(values: FlatArray, start: FlatArray) -> float:
    """Return the L2 norm of `values` minus `start`, in float64; infinite if a number is not finite."""
    squares = 0.0
    for part in _chunks(values.size):
        step = values[part].astype(np.float64) - start[part]
        squares += float(np.dot(step, step))
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def clipped(values: FlatArray, start: FlatArray, clip: float) -> FlatArray:
    """Return values whose step from `start` has a norm of at most `clip`, float32, same shape.

    The bound holds for the returned numbers, after their rounding to float32. A step that is not finite
    becomes zero.
    """
    bounded, scale = values, 1.0
    for _ in range(_MOST_TRIES):
        norm = step_norm(bounded, start)
        if norm <= clip:
            return bounded
        scale *= clip / norm * _SHRINK
        if not scale:
            break
        bounded = _scaled(values, start, scale)
    return start.copy()  # the step is not finite, or smaller than the rounding of `start`


def noised(values: FlatArray, start: FlatArray, clip: float, deviation: float, draw: Draw) -> FlatArray:
    """Return the clipped step plus normal noise, added to `start`, float32, same shape.

    Args:
        values: values after training, finite.
        start: values that training started from.
        clip: largest norm of the step.
        deviation: standard deviation of the noise of each entry.
        draw: draws the noise.
    """
    norm = step_norm(values, start)
    scale = 1.0 if norm <= clip else clip / norm * _SHRINK
    return _scaled(values, start, scale, deviation, draw)


def _scaled(
    values: FlatArray, start: FlatArray, scale: float, deviation: float = 0.0, draw: Draw | None = None
) -> FlatArray:
    moved = np.empty(values.size, np.float32)
    for part in _chunks(values.size):
        before = start[part].astype(np.float64)
        sum_ = before + scale * (values[part] - before)
        if draw is not None:
            sum_ += deviation * draw(sum_.size, part.start)
        moved[part] = np.clip(sum_, -_LARGEST, _LARGEST)
    return moved


def _chunks(size: int) -> Iterator[slice]:
    return (slice(first, min(first + _CHUNK, size)) for first in range(0, size, _CHUNK))
