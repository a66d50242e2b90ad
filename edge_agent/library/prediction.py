"""`Prediction`: the deployed model's output for one sample, by the terms of its task."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord
from fleetune.edge_agent.personal.predictions import Answers, Predictions
from fleetune.edge_agent.personal.task_answers import (
    ANOMALY,
    ERROR,
    LABEL,
    NUMBERS,
    PRESENT,
    PROBABILITIES,
    QUANTILES,
)


@dataclass(frozen=True)
class Prediction:
    """The deployed model's output for one sample, as `edge-agent predict` shows it.

    Attributes that do not belong to the run's task are None.

    Attributes:
        predictions: outputs for all samples that were predicted together.
        record: record of the model.
        index: place of the sample among these.
    """

    predictions: Predictions
    record: ModelRecord
    index: int = 0

    @property
    def answers(self) -> Answers:
        """All outputs of the model for this sample, by name. See `edge_agent.personal.task_answers`."""
        return {name: values[self.index] for name, values in self.predictions.answers.items()}

    @property
    def task(self) -> str:
        """Kind of the task, as in run.toml."""
        return self.predictions.predictor.task.kind

    @property
    def label(self) -> int | None:
        """The predicted class."""
        found = self._answer(LABEL)
        return None if found is None else int(found)

    @property
    def name(self) -> str | None:
        """Name of the predicted class; its number if it has no name."""
        return None if self.label is None else self.predictions.predictor.name(self.label)

    @property
    def probabilities(self) -> NDArray[Any] | None:
        """Probability of each class, or of each of several labels, shape (classes,)."""
        return self._answer(PROBABILITIES)

    @property
    def present(self) -> NDArray[Any] | None:
        """For several labels: 1 for each that is present, else 0, shape (classes,)."""
        return self._answer(PRESENT)

    @property
    def numbers(self) -> NDArray[Any] | None:
        """Forecast values, or the numbers of a regression, shape (k,)."""
        return self._answer(NUMBERS)

    @property
    def quantiles(self) -> NDArray[Any] | None:
        """The quantiles of run.toml for each number, if the loss is quantile, shape (k, quantiles)."""
        return self._answer(QUANTILES)

    @property
    def error(self) -> float | None:
        """Reconstruction error of the sample, which is its anomaly score."""
        found = self._answer(ERROR)
        return None if found is None else float(found)

    @property
    def threshold(self) -> float | None:
        """Threshold on this device; a sample with a larger error is an anomaly."""
        return self.predictions.predictor.threshold

    @property
    def anomaly(self) -> bool | None:
        """True if the error is above the threshold; None also if there is no threshold yet."""
        found = self._answer(ANOMALY)
        return None if found is None else bool(found)

    def __str__(self) -> str:
        rows = list(self.predictions.rows(self.index + 1))
        words = dict(zip(self.predictions.columns, rows[self.index], strict=True))
        return ", ".join(f"{title} {word}" for title, word in words.items() if word)

    def _answer(self, name: str) -> NDArray[Any] | None:
        values = self.predictions.answers.get(name)
        return None if values is None else values[self.index]
