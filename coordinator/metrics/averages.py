"""Sums and means over devices and rounds; unknown values (None) are left out."""

from collections.abc import Iterable
from statistics import median


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = _known(values)
    return sum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Sum of the known values; None without any."""
    known = _known(values)
    return sum(known) if known else None


def summed(values: Iterable[float | None]) -> float:
    """Sum of the known values; 0 without any."""
    return sum(_known(values))


def greatest(values: Iterable[float | None]) -> float | None:
    """Greatest known value; None without any."""
    return max(_known(values), default=None)


def last(values: Iterable[float | None]) -> float | None:
    """Last known value; None without any."""
    return next(reversed(_known(values)), None)


def middle(values: Iterable[float | None]) -> float | None:
    """Median of the known values; None without any."""
    known = _known(values)
    return median(known) if known else None


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """Mean of (value, weight) pairs with a known value; None without any, or if all weights are 0."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    all_weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / all_weights if all_weights else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
