"""A personal model's predictions for samples, by its task, as a table for people and as JSON for scripts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.personal.inference_graph import Predictor
from fleetune.edge_agent.personal.task_answers import (
    ANOMALY,
    ERROR,
    LABEL,
    NUMBERS,
    PRESENT,
    PROBABILITIES,
    QUANTILES,
)
from fleetune.protocols.tasks.reconstruction import ANOMALY as IS_ANOMALY
from fleetune.protocols.tasks.task import as_classes

Answers = dict[str, NDArray[Any]]
Labels = NDArray[Any] | None
_MOST_NUMBERS = 6  # most values shown in a table row


@dataclass(frozen=True)
class Predictions:
    """A personal model's predictions for samples, with scores if labels are known.

    Attributes:
        predictor: the predictor that made them.
        answers: outputs of `Predictor.answers`.
        labels: shape (n, ...); None if not known.
        scores: scores of the task, by name, if the labels are known.
    """

    predictor: Predictor
    answers: Answers
    labels: Labels
    scores: dict[str, float]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.answers.values())))

    @property
    def columns(self) -> tuple[str, ...]:
        """Column titles of `rows`."""
        titles = _TITLES[self.predictor.task.kind]
        return titles if self.labels is None else (*titles, "is")

    def rows(self, most: int) -> Iterator[tuple[str, ...]]:
        """Yield the first samples as table rows."""
        row = _ROW[self.predictor.task.kind]
        for index in islice(range(self.num_samples), most):
            said = row(self.predictor, self.answers, index)
            yield said if self.labels is None else (*said, _truth(self.predictor, self.labels[index]))

    def lines(self) -> Iterator[str]:
        """Yield the scores as readable lines."""
        if LABEL in self.answers and self.labels is not None:
            right = int((self.answers[LABEL] == self.labels).sum())
            yield f"right: {right} of {self.num_samples}, {right / self.num_samples:.1%}"
        if ERROR in self.answers:
            yield _threshold_words(self)
        shown = [
            one for one in self.predictor.task.scores if one.name in self.scores and one.name != "accuracy"
        ]
        if shown:
            values = {one.title: self.scores[one.name] for one in shown if one.share}
            words = [f"{title} {value:.1%}" for title, value in values.items()]
            words += [f"{one.title} {self.scores[one.name]:.4g}" for one in shown if not one.share]
            yield "; ".join(words)

    def as_json(self) -> dict[str, Any]:
        """Return all predictions for scripts; numbers have six decimal places."""
        found: dict[str, Any] = {}
        if LABEL in self.answers:
            labels = self.answers[LABEL]
            found = {"labels": labels.tolist(), "names": [self.predictor.name(label) for label in labels]}
            right = None if self.labels is None else float((labels == self.labels).mean())
            found |= {"probabilities": _plain(self.answers[PROBABILITIES]), "accuracy": right}
        else:
            found = {name: _plain(self.answers[name]) for name in _IN_JSON if name in self.answers}
            if ERROR in self.answers:
                found["threshold"] = self.predictor.threshold
                found["false_alarms"] = msgspec.to_builtins(self.predictor.false_alarms)
        return {**found, "scores": self.scores}


_IN_JSON = (PROBABILITIES, PRESENT, NUMBERS, QUANTILES, ERROR, ANOMALY)


def predictions_of(predictor: Predictor, x: NDArray[Any], y: Labels, where: str) -> Predictions:
    """Return a model's predictions for samples.

    Args:
        predictor: runs the model.
        x: raw samples, shape (n, ...).
        y: labels as a data source gives them; None, or shape (n, 0), if they are not known.
        where: name of the source, for messages.

    Raises:
        DataError: samples of another shape, or labels that do not belong to the task.
    """
    answers = predictor.answers(x)
    if y is None or y.shape[1:] == (0,):
        return Predictions(predictor, answers, None, {})
    y = y if predictor.task.label_form == "numbers" else as_classes(y)
    labels = y if y.ndim == 1 else y.reshape(len(y), -1)
    return Predictions(predictor, answers, labels, predictor.figures(answers, y, where))


def _class_row(predictor: Predictor, answers: Answers, index: int) -> tuple[str, ...]:
    label = int(answers[LABEL][index])
    return predictor.name(label), f"{answers[PROBABILITIES][index, label]:.3f}"


def _labels_row(predictor: Predictor, answers: Answers, index: int) -> tuple[str, ...]:
    there = np.flatnonzero(answers[PRESENT][index])
    chances = ", ".join(f"{answers[PROBABILITIES][index, label]:.3f}" for label in there)
    return _names(predictor, there), chances


def _numbers_row(_: Predictor, answers: Answers, index: int) -> tuple[str, ...]:
    if QUANTILES not in answers:
        return (_numbers(answers[NUMBERS][index]), "")
    low, high = answers[QUANTILES][index].min(axis=1), answers[QUANTILES][index].max(axis=1)
    return _numbers(answers[NUMBERS][index]), f"{_numbers(low)} to {_numbers(high)}"


def _error_row(_: Predictor, answers: Answers, index: int) -> tuple[str, ...]:
    said = "" if ANOMALY not in answers else "anomaly" if answers[ANOMALY][index] else "normal"
    return f"{answers[ERROR][index]:.4g}", said


_TITLES = {
    "classification": ("taken for", "probability"),
    "multi-label": ("labels", "probabilities"),
    "regression": ("prediction", "quantiles"),
    "forecast": ("prediction", "quantiles"),
    "reconstruction": ("error", "taken for"),
}
_ROW: dict[str, Callable[[Predictor, Answers, int], tuple[str, ...]]] = {
    "classification": _class_row,
    "multi-label": _labels_row,
    "regression": _numbers_row,
    "forecast": _numbers_row,
    "reconstruction": _error_row,
}


def _truth(predictor: Predictor, label: Any) -> str:
    kind = predictor.task.kind
    if kind == "classification":
        return predictor.name(int(label))
    if kind == "reconstruction":
        return "anomaly" if label == IS_ANOMALY else "normal"
    return (
        _names(predictor, np.flatnonzero(label)) if kind == "multi-label" else _numbers(np.atleast_1d(label))
    )


def _names(predictor: Predictor, labels: NDArray[np.intp]) -> str:
    return ", ".join(predictor.name(int(label)) for label in labels) or "none"


def _numbers(values: NDArray[Any]) -> str:
    more = " ..." if len(values) > _MOST_NUMBERS else ""
    return " ".join(f"{value:.4g}" for value in values[:_MOST_NUMBERS]) + more


def _threshold_words(predictions: Predictions) -> str:
    if ANOMALY not in predictions.answers:
        return "no threshold is known: it comes with the model that a device deploys"
    found = int(predictions.answers[ANOMALY].sum())
    words = (
        f"anomalies: {found} of {predictions.num_samples}, errors above {predictions.predictor.threshold:.4g}"
    )
    alarms = predictions.predictor.false_alarms
    return f"{words}; {alarms or 'expected false alarms: not known'}"


def _plain(values: NDArray[Any]) -> list[Any]:
    rounded: list[Any] = (values.astype(float).round(6) if values.dtype.kind == "f" else values).tolist()
    return rounded
