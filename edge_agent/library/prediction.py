"""What the served model makes of one sample, in its task's own words."""

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
    """What the served model says of a sample: what `edge-agent predict` says of it. What is not of the run's
    task is None.

    Attributes:
        told: as the command has it.
        record: of the model that was asked.
        index: of the sample among those that were asked about together.
    """

    told: Predictions
    record: ModelRecord
    index: int = 0

    @property
    def answers(self) -> Answers:
        """All outputs of the model by name, see `edge_agent.personal.task_answers`, of this sample."""
        return {name: values[self.index] for name, values in self.told.answers.items()}

    @property
    def task(self) -> str:
        """Its kind, as in run.toml."""
        return self.told.predictor.task.kind

    @property
    def label(self) -> int | None:
        """The class."""
        found = self._answer(LABEL)
        return None if found is None else int(found)

    @property
    def name(self) -> str | None:
        """The class's name; its number where it has none."""
        return None if self.label is None else self.told.predictor.name(self.label)

    @property
    def probabilities(self) -> NDArray[Any] | None:
        """Of each class, or of each of several labels, shape (classes,)."""
        return self._answer(PROBABILITIES)

    @property
    def present(self) -> NDArray[Any] | None:
        """Of several labels, which are there, 0 or 1, shape (classes,)."""
        return self._answer(PRESENT)

    @property
    def numbers(self) -> NDArray[Any] | None:
        """What is forecast, or the regression's numbers, shape (k,)."""
        return self._answer(NUMBERS)

    @property
    def quantiles(self) -> NDArray[Any] | None:
        """Of each number those of run.toml, where the loss is quantile, shape (k, quantiles)."""
        return self._answer(QUANTILES)

    @property
    def error(self) -> float | None:
        """How badly the sample could be reconstructed: the anomaly score."""
        found = self._answer(ERROR)
        return None if found is None else float(found)

    @property
    def threshold(self) -> float | None:
        """Errors above it are anomalies, on this device."""
        return self.told.predictor.threshold

    @property
    def anomaly(self) -> bool | None:
        """Whether the error is above the threshold; None also where none is known."""
        found = self._answer(ANOMALY)
        return None if found is None else bool(found)

    def __str__(self) -> str:
        rows = list(self.told.rows(self.index + 1))
        words = dict(zip(self.told.columns, rows[self.index], strict=True))
        return ", ".join(f"{title} {word}" for title, word in words.items() if word)

    def _answer(self, name: str) -> NDArray[Any] | None:
        values = self.told.answers.get(name)
        return None if values is None else values[self.index]
