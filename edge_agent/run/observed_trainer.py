"""A trainer as a session has it: it knows the device's test split, and what was seen of it is noted."""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.optimisers.optimiser_memory import OptimiserMemory
from fleetune.protocols.method.trainer import Fit, FitPlan, Part, Rows, Trainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks.task import Task


class EvaluatingTrainer(Trainer, Protocol):
    """A trainer that also knows the device's test split, and which round it is."""

    def in_round(
        self,
        number: int,
        optimiser_states: OptimiserMemory | None,
        *,
        local_work: float = 1.0,
        enough: Callable[[], bool] = lambda: False,
    ) -> "EvaluatingTrainer":
        """The trainer for a round; it leaves in `optimiser_states` what the optimiser is to remember."""
        ...

    @property
    def num_test(self) -> int: ...

    def on_all(self) -> Trainer: ...

    def score(self, weights: FlatArray, part: Part = "test") -> float | None:
        """On the device's test split, if not said otherwise; None without one."""
        ...

    def scores(self, weights: FlatArray, part: Part = "test") -> dict[str, float]:
        """All that the task has, by name."""
        ...

    @property
    def task(self) -> Task: ...


class ObservedTrainer:
    """A trainer that notes the score of the first weights trained from, the last training loss, and how much
    of the run's epochs the `fit` did that did least; None: none did any.

    Args:
        trainer: does the work.
        started: told of these first weights, and their score, before they are trained.
    """

    def __init__(
        self, trainer: EvaluatingTrainer, started: Callable[[FlatArray, float | None], None]
    ) -> None:
        self._trainer, self._started = trainer, started
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
            self._started(weights, self.before)
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
