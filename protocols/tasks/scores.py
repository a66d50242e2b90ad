"""Scores of a model from its outputs and the labels, by numpy; None if undefined."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    """A score by which models are compared.

    Attributes:
        name: stable name in snake case, for run.toml and summary.json.
        title: name for people.
        about: its definition in one sentence.
        better: which direction is better.
        share: True: a fraction, 0..1, shown in percent; False: a number in the labels' unit.
    """

    name: str
    title: str
    about: str
    better: Literal["higher", "lower"]
    share: bool = True

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and largest possible value of the score."""
        return (0.0, 1.0) if self.share else (-1e30, 1e30)


ACCURACY = Score("accuracy", "accuracy", "Fraction of samples predicted correctly.", "higher")


def accuracy(predicted: Labels, labels: Labels) -> float:
    """Return the fraction of samples that are predicted correctly."""
    return int((predicted == labels).sum()) / len(labels)


def balanced_accuracy(predicted: Labels, labels: Labels) -> float:
    """Return the mean, over the classes that occur, of the fraction of their samples predicted correctly."""
    found = [float((predicted[labels == one] == one).mean()) for one in np.unique(labels)]
    return float(np.mean(found))


def macro_f1(predicted: Labels, labels: Labels) -> float:
    """Return the mean F1 over the classes that occur among labels or predictions."""
    classes = np.union1d(predicted, labels)
    return float(np.mean([_f1(predicted == one, labels == one) for one in classes]))


def macro_f1_of_many(predicted: NDArray[np.bool_], labels: NDArray[np.bool_]) -> float | None:
    """Return the mean F1 over the labels (columns) that occur in either array; None if none does."""
    places = np.flatnonzero(predicted.any(axis=0) | labels.any(axis=0))
    return float(np.mean([_f1(predicted[:, k], labels[:, k]) for k in places])) if places.size else None


def _f1(predicted: NDArray[np.bool_], labels: NDArray[np.bool_]) -> float:
    total = int(predicted.sum()) + int(labels.sum())
    return 2 * int((predicted & labels).sum()) / total if total else 1.0


def auroc(values: Floats, positive: NDArray[np.bool_]) -> float | None:
    """Return the probability that a positive sample has a larger value than a negative one; ties count half.

    The result is None unless both kinds occur.
    """
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return None
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # ranks from 1; ties share their mean
    above = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def average_precision(values: Floats, positive: NDArray[np.bool_]) -> float | None:
    """Return the area under precision over recall (AUPRC), as steps; None if no sample is positive."""
    if not positive.any():
        return None
    order = np.argsort(-values, kind="stable")
    hits, sorted_values = np.cumsum(positive[order]), values[order]
    # the last sample of each group of ties
    last = np.append(np.flatnonzero(np.diff(sorted_values)), len(order) - 1)
    precision, found = hits[last] / (last + 1), np.diff(hits[last], prepend=0)
    return float((precision * found).sum() / positive.sum())


def mean_of(found: list[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    there = [one for one in found if one is not None]
    return float(np.mean(there)) if there else None


def mae(predicted: Floats, labels: Floats) -> float:
    """Return the mean absolute error."""
    return float(np.abs(predicted - labels).mean(dtype=np.float64))


def rmse(predicted: Floats, labels: Floats) -> float:
    """Return the root of the mean squared error."""
    return float(np.sqrt(np.square(predicted - labels, dtype=np.float64).mean()))


def r2(predicted: Floats, labels: Floats) -> float | None:
    """1 - squared error / squared error of the labels' mean, over all numbers; None if labels are
    constant.
    """
    around = np.square(labels - labels.mean(axis=0), dtype=np.float64).sum()
    return float(1 - np.square(predicted - labels, dtype=np.float64).sum() / around) if around else None
