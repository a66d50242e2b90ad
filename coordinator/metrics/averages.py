"""Sums and means over devices and rounds; unknown values (None) are ignored."""

from collections.abc import Iterable
from statistics import median


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if none is known."""
    known = _known(values)
    return sum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = _known(values)
    return sum(known) if known else None


def summed(values: Iterable[float | None]) -> float:
    """Return the sum of the known values; 0 if none is known."""
    return sum(_known(values))


def greatest(values: Iterable[float | None]) -> float | None:
    """Return the greatest known value; None if none is known."""
    return max(_known(values), default=None)


def last(values: Iterable[float | None]) -> float | None:
    """Return the last known value; None if none is known."""
    return next(reversed(_known(values)), None)


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None if none is known."""
    known = _known(values)
    return median(known) if known else None


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of (value, weight) pairs with a known value; None if there are none or all weights are
    0.
    """
    known = [(value, weight) for value, weight in pairs if value is not None]
    all_weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / all_weights if all_weights else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
