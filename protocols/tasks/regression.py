"""Regression: predict numbers."""

from typing import ClassVar

import numpy as np

from fleetune.protocols.settings.task import TaskKind
from fleetune.protocols.tasks import scores
from fleetune.protocols.tasks.losses import QUANTILE
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.tasks.task import Array, Task, numbers

MAE = Score(
    "mae", "MAE", "Mean absolute error: the distance between prediction and truth.", "lower", share=False
)
RMSE = Score("rmse", "RMSE", "Root of the mean squared error.", "lower", share=False)
R2 = Score("r2", "R²", "Share of the labels' variance that is explained.", "higher", share=False)


class Regression(Task):
    """Labels are numbers, shape (n, numbers), and so are the model's outputs.

    With the quantile loss the model gives each quantile of each number; the one nearest to the median is the
    prediction.
    """

    kind: ClassVar[TaskKind] = "regression"
    losses = ("squared", "absolute", "huber", QUANTILE)
    scores = (RMSE, MAE, R2)

    def num_outputs(self, _: tuple[int, ...], labels: Array) -> int:
        return int(np.prod(labels.shape[1:])) * self._quantiles

    def checked(self, labels: Array, num_outputs: int, where: str) -> Array:
        return numbers(labels, num_outputs // self._quantiles, where)

    @property
    def _quantiles(self) -> int:
        return len(self.section.quantiles) if self.loss == QUANTILE else 1

    def judged(self, outputs: Array, _: Array) -> Array:
        """Return the prediction of each number, shape (n, numbers)."""
        if self._quantiles == 1:
            return outputs
        middle = int(np.argmin(np.abs(np.subtract(self.section.quantiles, 0.5))))
        return outputs.reshape(len(outputs), -1, self._quantiles)[:, :, middle]

    def _figure(self, name: str, judged: Array, labels: Array, _: Array | None) -> float | None:
        return {"rmse": scores.rmse, "mae": scores.mae, "r2": scores.r2}[name](judged, labels)
