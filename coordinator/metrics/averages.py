"""Sums and means over devices and rounds of which some did not tell: what is not known is left out."""

from collections.abc import Iterable
from statistics import median


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    there = _there(values)
    return sum(there) / len(there) if there else None


def total(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    there = _there(values)
    return sum(there) if there else None


def summed(values: Iterable[float | None]) -> float:
    """What is counted anyway: the sum of those that are there, 0 of none."""
    return sum(_there(values))


def greatest(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    return max(_there(values), default=None)


def least(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    return min(_there(values), default=None)


def last(values: Iterable[float | None]) -> float | None:
    """Of those that are there, the last; None when none is."""
    return next(reversed(_there(values)), None)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are there; None when none is."""
    there = _there(values)
    return median(there) if there else None


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """Of (value, weight) pairs whose value is there; None when there is none, or the weights are 0."""
    there = [(value, weight) for value, weight in pairs if value is not None]
    all_weights = sum(weight for _, weight in there)
    return sum(value * weight for value, weight in there) / all_weights if all_weights else None


def _there(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
