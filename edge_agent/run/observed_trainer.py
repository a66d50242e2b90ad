"""Wraps a session's trainer: it records the score before training, the loss, and the work done."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.method.trainer import Fit, FitPlan, Part, Rows
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key


class ObservedTrainer:
    """A trainer that records the results of its first and last `fit`.

    Args:
        trainer: the trainer that does the work.
        keep_start: True to keep the weights that the first `fit` starts from.

    Attributes:
        start: the weights from which the first `fit` started, shape (spec.size,); None if nothing was trained
            or they are not kept.
        before: score of the weights `start` on the test split.
        train_loss: loss of the last `fit`; None before the first.
        local_work: the smallest share of the run's epochs that a `fit` did; None before the first.
    """

    def __init__(self, trainer: LocalTrainer, *, keep_start: bool = False) -> None:
        self._trainer, self._keep_start = trainer, keep_start
        self.start: FlatArray | None = None
        self.before: float | None = None
        self.train_loss: float | None = None
        self.local_work: float | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._trainer.spec

    @property
    def num_samples(self) -> int:
        return self._trainer.num_samples

    @property
    def num_classes_held(self) -> int:
        return self._trainer.num_classes_held

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        if self.train_loss is None:
            self.before = self._trainer.score(weights)
            if self._keep_start:
                self.start = weights.copy() if weights.flags.writeable else weights
        fit = self._trainer.fit(weights, plan, key)
        self.train_loss = fit.loss
        if fit.local_work is not None:
            self.local_work = min(fit.local_work, self.local_work or math.inf)
        return fit

    def loss(self, weights: FlatArray, part: Part = "train", rows: Rows | None = None) -> float:
        return self._trainer.loss(weights, part, rows)

    def accuracy(self, weights: FlatArray, part: Part) -> float | None:
        return self._trainer.accuracy(weights, part)

    def losses(self, weights: FlatArray, part: Part = "train") -> NDArray[np.float64]:
        return self._trainer.losses(weights, part)

    def score(self, weights: FlatArray, part: Part) -> float | None:
        return self._trainer.score(weights, part)

    @property
    def lower_is_better(self) -> bool:
        return self._trainer.lower_is_better

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:
        return self._trainer.gradient(weights, rows)

    def batches(self, key: Key) -> Iterable[Rows]:
        return self._trainer.batches(key)
