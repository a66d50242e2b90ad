"""Whether samples have changed since the last training: a cheap test, with a stated rate of false alarms.

Each input becomes DIRECTIONS numbers when it arrives: its mean, its standard deviation, and sums of its
features under random signs (the same on every device and in every process). Every WINDOW new inputs are
tested once against up to REFERENCE of the last training, by the two-sample Kolmogorov-Smirnov test in each
direction; the figure is the largest distance over the distance that independent samples of one distribution
exceed in FALSE_ALARMS of such tests at most (Smirnov's asymptotic bound, by Bonferroni over the directions).
So 1 is an alarm. Where values repeat the test errs on the quiet side; where successive samples resemble each
other (overlapping windows of one signal) it raises more false alarms than stated.

The same test in one direction compares the loss of the served model on new samples with its loss on held-out
samples of before: only a higher loss counts. A training after which it is still higher does not make it the
measure of the next test, until PATIENCE of them have.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.randomness import Key

WINDOW = 128
REFERENCE = 512
FEWEST = 64  # of the reference: fewer can tell nothing
DIRECTIONS = 8
FALSE_ALARMS = 0.001
PATIENCE = 10  # trainings after which higher losses are what the samples are like now
_MOST_FEATURES = 4096

Projections = NDArray[np.float32]
Numbers = NDArray[np.floating]


def project(x: NDArray[np.generic]) -> Projections:
    """An input's numbers, shape (DIRECTIONS,); `x` is uint8 or float32, any shape."""
    flat = x.reshape(-1)
    if flat.size > _MOST_FEATURES:
        flat = flat[np.linspace(0, flat.size - 1, _MOST_FEATURES).astype(np.intp)]
    features = flat.astype(np.float64)
    if x.dtype == np.uint8:
        features /= 255
    signed = _signs(features.size) @ features / math.sqrt(features.size)
    largest = float(np.finfo(np.float32).max)
    numbers = np.asarray([features.mean(), features.std(), *signed])
    numbers = np.clip(numbers, -largest, largest)
    return np.asarray(numbers, np.float32)


@lru_cache(maxsize=4)
def _signs(size: int) -> NDArray[np.float64]:
    bits = Key.of("fleetune-drift", size).bits((DIRECTIONS - 2) * size) >> np.uint64(63)
    return (bits.astype(np.float64) * 2 - 1).reshape(DIRECTIONS - 2, size)


def input_drift(reference: Projections, window: Projections) -> float | None:
    """How far a window's inputs are from the reference: 1 is an alarm; None: the reference is too small.

    Args:
        reference: of the last training, shape (n, DIRECTIONS).
        window: what came since, shape (m, DIRECTIONS).
    """
    if len(reference) < FEWEST or not len(window):
        return None
    limit = _limit(len(reference), len(window), FALSE_ALARMS / DIRECTIONS, sides=2)
    pairs = zip(reference.T, window.T, strict=True)
    return max(float(np.abs(_differences(one, other)).max()) for one, other in pairs) / limit


def loss_drift(reference: Numbers, losses: Numbers) -> float | None:
    """How much higher the losses of new samples are than those of the reference: 1 is an alarm; None: the
    reference is too small. Shapes (n,) and (m,).
    """
    if len(reference) < FEWEST or not len(losses):
        return None
    higher = float(_differences(losses, reference).min())
    return max(0.0, -higher) / _limit(len(reference), len(losses), FALSE_ALARMS, sides=1)


def _differences(one: Numbers, other: Numbers) -> NDArray[np.float64]:
    """Of the empirical distribution functions of `one` and `other`, at every value."""
    one, other = np.sort(one), np.sort(other)
    values = np.concatenate([one, other])
    of_one = np.searchsorted(one, values, side="right") / len(one)
    return np.asarray(of_one - np.searchsorted(other, values, side="right") / len(other), np.float64)


def _limit(n: int, m: int, false_alarms: float, *, sides: int) -> float:
    """The distance exceeded with probability p at most: sqrt(-ln(p / sides) / 2 * (n + m) / (n m))."""
    return math.sqrt(-0.5 * math.log(false_alarms / sides) * (n + m) / (n * m))
