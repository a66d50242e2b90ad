"""Drift tests: check whether samples have changed since the last training, with a known rate of false alarms.

Input drift: on arrival, each input is reduced to DIRECTIONS numbers. These are its mean, its standard
deviation, and sums of its features under random signs, which are equal on all devices. Every WINDOW new
inputs are compared once with up to REFERENCE inputs of the last training. Each direction has a two-sample
Kolmogorov-Smirnov test. The result is the largest distance between the two distributions, divided by the
alarm limit, so that 1 is an alarm. If nothing has changed, at most FALSE_ALARMS of the tests exceed the limit
(Smirnov's asymptotic bound, Bonferroni-corrected over directions). Repeated values make the test less
sensitive.
Correlated samples, such as overlapping windows of a signal, raise more false alarms.

Loss drift: the same test, one-sided and in one direction, compares the deployed model's loss on new samples
with its loss on held-out samples of the last training. Only a higher loss counts. If the loss is still higher
after a training, the old losses stay the reference, for at most PATIENCE trainings.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.randomness import Key

WINDOW = 128
REFERENCE = 512
FEWEST = 64  # samples of the reference: fewer give no result
DIRECTIONS = 8
FALSE_ALARMS = 0.001
PATIENCE = 10  # trainings after which higher losses become the new reference
_MOST_FEATURES = 4096

Projections = NDArray[np.float32]
Numbers = NDArray[np.floating]


def project(x: NDArray[np.generic]) -> Projections:
    """Reduce an input to the numbers of the drift test, shape (DIRECTIONS,).

    Args:
        x: the input, uint8 or float32, any shape.
    """
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
    """Return the distance of a window of new inputs from the reference; 1 is an alarm.

    Args:
        reference: projections of inputs of the last training, shape (n, DIRECTIONS).
        window: projections of newer inputs, shape (m, DIRECTIONS).

    Returns:
        The distance relative to the alarm limit; None if the reference is too small.
    """
    if len(reference) < FEWEST or not len(window):
        return None
    limit = _limit(len(reference), len(window), FALSE_ALARMS / DIRECTIONS, sides=2)
    pairs = zip(reference.T, window.T, strict=True)
    return max(float(np.abs(_differences(one, other)).max()) for one, other in pairs) / limit


def loss_drift(reference: Numbers, losses: Numbers) -> float | None:
    """Return how much higher the losses of new samples are than the reference; 1 is an alarm.

    Args:
        reference: losses on held-out samples of the last training, shape (n,).
        losses: losses on new samples, shape (m,).

    Returns:
        The distance relative to the alarm limit; None if the reference is too small.
    """
    if len(reference) < FEWEST or not len(losses):
        return None
    higher = float(_differences(losses, reference).min())
    return max(0.0, -higher) / _limit(len(reference), len(losses), FALSE_ALARMS, sides=1)


def _differences(one: Numbers, other: Numbers) -> NDArray[np.float64]:
    """Return the difference of two samples' empirical distribution functions, at each value of both."""
    one, other = np.sort(one), np.sort(other)
    values = np.concatenate([one, other])
    of_one = np.searchsorted(one, values, side="right") / len(one)
    return np.asarray(of_one - np.searchsorted(other, values, side="right") / len(other), np.float64)


def _limit(n: int, m: int, false_alarms: float, *, sides: int) -> float:
    """Return the distance that is exceeded with probability p at most: sqrt(-ln(p / sides) / 2 * (n + m) / (n
    m)).
    """
    return math.sqrt(-0.5 * math.log(false_alarms / sides) * (n + m) / (n * m))
