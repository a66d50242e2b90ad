"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar; NeurIPS 2020): a shared start from which one step personalises.

Algorithm 1 on F_i(w) = f_i(w - alpha * grad f_i(w)), eq. (3): from the shared model the device takes tau
steps w <- w - beta * (I - alpha * Hessian) grad f_i(w - alpha * grad f_i(w)) and sends the result; the mean
is over the participants, all counting alike. Both of the paper's approximations are here: first-order,
without the Hessian, and Hessian-free, with its product as a difference of gradients.

The personal model is the shared one as it came after a step w - alpha * grad f_i(w), or a few.

Gradients are exact, over all of the device's training samples, where the paper draws three batches a step:
a trainer tells no single batch's gradient. So nothing is drawn, and the run's optimiser and epochs play no
part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from protocols.effort import effort
from protocols.errors import TrainingDiverged
from protocols.exchange import ModelExchange, PersonalModel, Task, Update
from protocols.method import Budget, FitPlan, Trainer
from protocols.model import FlatArray, MaskArray
from protocols.randomness import Key


def meta_gradient(
    weights: FlatArray,
    gradient: Callable[[FlatArray], FlatArray],
    adaptation: float,
    difference: float | None,
) -> FlatArray:
    """The gradient of f(w - alpha * grad f(w)) at `weights`, same shape.

    Args:
        weights: w.
        gradient: grad f.
        adaptation: alpha.
        difference: delta: the Hessian's product with g is (grad f(w + delta g) - grad f(w - delta g)) /
            (2 delta); None: it is left out.
    """
    adapted = gradient(weights - adaptation * gradient(weights))
    if difference is None:
        return adapted
    step = difference * adapted
    curved = (gradient(weights + step) - gradient(weights - step)) / (2 * difference)
    return adapted - adaptation * curved


@dataclass(frozen=True)
class PerFedAvg(ModelExchange):
    """Settings.

    Attributes:
        steps: tau.
        adaptation_rate: alpha.
        meta_rate: beta.
        approximation: of the Hessian's product. The Hessian-free one works twice as much, follows larger
            alphas better, and wants a smaller beta where the loss is sharp.
        difference: delta of the Hessian-free one.
        adaptation_steps: of the personal model; the paper takes one.

    The paper's alpha is 0.01 and its beta 0.001, over 1000 rounds of 10 steps; the default beta suits tens of
    rounds.
    """

    steps: Annotated[int, Meta(ge=1, le=1000)] = 10
    adaptation_rate: Annotated[float, Meta(ge=0)] = 0.01
    meta_rate: Annotated[float, Meta(gt=0)] = 0.1
    approximation: Literal["first-order", "hessian-free"] = "first-order"
    difference: Annotated[float, Meta(gt=0)] = 1e-3
    adaptation_steps: Annotated[int, Meta(ge=1, le=1000)] = 1

    by_samples: ClassVar[bool] = False

    @property
    def relative_work(self) -> float:
        return 0.0

    @property
    def extra_epochs(self) -> float:
        """Every gradient is a pass over all samples; one more, forward only, is for the statistics."""
        gradients = self.steps * (4 if self.approximation == "hessian-free" else 2) + self.adaptation_steps
        return gradients + effort(self.spec, self._nothing)

    @property
    def _nothing(self) -> MaskArray:
        return np.zeros(self.spec.size, dtype=bool)

    def work(
        self,
        state: PersonalModel,
        task: Task,
        trainer: Trainer,
        budget: Budget,  # noqa: ARG002
        key: Key,
    ) -> tuple[PersonalModel, Update]:
        received = task.patch.apply(state.weights, self.spec)
        # gradients go by running statistics: they follow the data here, nothing else changes
        statistics = FitPlan(trainable=self._nothing, epochs=1)
        personal = shared = trainer.fit(received, statistics, key).weights
        for _ in range(self.adaptation_steps):
            personal = personal - self.adaptation_rate * trainer.gradient(personal)
        difference = self.difference if self.approximation == "hessian-free" else None
        for _ in range(self.steps):
            step = meta_gradient(shared, trainer.gradient, self.adaptation_rate, difference)
            shared = shared - self.meta_rate * step
        if not (np.isfinite(shared).all() and np.isfinite(personal).all()):
            raise TrainingDiverged(f"training diverged: lower method.meta_rate (now {self.meta_rate:g})")
        return PersonalModel(personal), self.update(shared, trainer)
