"""The difference between two models' scores on the same samples, with its standard error."""

import math
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.tasks.task import Array, Task

MOST_PARTS = 200  # parts of the samples that the jackknife leaves out in turn


@dataclass(frozen=True)
class Gain:
    """A difference of two scores; above 0 the first model is better, also for scores where less is better.

    Attributes:
        mean: difference on all samples.
        standard_error: by the jackknife over parts of the samples; for a score that is a mean over samples,
            such as accuracy, the usual error of a paired difference. Infinite with fewer than two usable
            parts.
    """

    mean: float
    standard_error: float


def score_gain(task: Task, ours: Array, theirs: Array, labels: Array) -> Gain | None:
    """Return how much better `ours` is than `theirs` by the task's score; None if these samples have no
    score.

    Args:
        task: the run's task.
        ours: the outputs of one model that the task keeps (`Task.judged`), shape (n, ...).
        theirs: those of the other model.
        labels: labels of the samples, shape (n, ...).
    """
    sign, name = (-1.0 if task.score.better == "lower" else 1.0), task.score.name

    def gain(rows: Array) -> float | None:
        first, second = (task.figure(name, one[rows], labels[rows]) for one in (ours, theirs))
        return None if first is None or second is None else sign * (first - second)

    count = len(labels)
    whole = gain(np.arange(count)) if count else None
    if whole is None:
        return None
    parts = min(count, MOST_PARTS)
    if parts < 2:
        return Gain(whole, math.inf)
    places = np.arange(count) % parts
    without = [gain(np.flatnonzero(places != part)) for part in range(parts)]
    known = np.array([one for one in without if one is not None])
    if known.size < 2:
        return Gain(whole, math.inf)
    spread = float(np.square(known - known.mean()).sum())
    return Gain(whole, math.sqrt(spread * (known.size - 1) / known.size))
