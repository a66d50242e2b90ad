"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar; NeurIPS 2020): a shared start from which one step personalises.

One round (Algorithm 1) minimises F_i(w) = f_i(w - alpha * grad f_i(w)), eq. (3):

1. From the shared model, the device takes tau steps w <- w - beta * (I - alpha * Hessian) grad f_i(w - alpha
    * grad f_i(w)).
2. It sends the result. The coordinator's mean counts all participants equally.

Both of the paper's approximations are available: first-order, without the Hessian, and Hessian-free, which
takes its product from a difference of gradients. The personal model is the received shared one after one step
w - alpha * grad f_i(w), or a few.

Gradients are taken in evaluation mode, over batches of the number and size that the run's [training] section
gives. As in the paper, each step draws one batch for the inner gradient and one for the outer one, and a
third for the Hessian. (PFLlib cuts a batch of twice the size in two.) If batches run out, the first ones are
used again. With `steps`, gradients are exact over all of the device's samples, and no batch is drawn. The
method has its own learning rates; the run's learning rate, optimiser, clipping and augmentation have no
effect.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, repeat
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel, Task, Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.trainer import FitPlan, Rows, Trainer
from fleetune.protocols.model.compute_cost import compute_cost
from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.randomness import Key

Gradient = Callable[[FlatArray], FlatArray]


def meta_gradient(
    weights: FlatArray, gradients: Sequence[Gradient], adaptation: float, difference: float | None
) -> FlatArray:
    """Return the gradient of f(w - alpha * grad f(w)) at `weights`, same shape.

    Args:
        weights: w.
        gradients: grad f on the batch of the inner step, of the outer step, and, if used, of the Hessian.
        adaptation: alpha.
        difference: delta; the Hessian's product with g is (grad f(w + delta g) - grad f(w - delta g)) / (2
            delta). None omits the Hessian.
    """
    inner, outer, *more = gradients
    adapted = outer(weights - adaptation * inner(weights))
    if difference is None:
        return adapted
    (curving,), step = more, difference * adapted
    curved = (curving(weights + step) - curving(weights - step)) / (2 * difference)
    return adapted - adaptation * curved


def groups_of_batches(batches: Iterable[Rows], count: int) -> Iterator[list[Rows]]:
    """Yield the batches in groups of `count`; the first batches are repeated to fill the last group."""
    first: list[Rows] = []
    group: list[Rows] = []
    for batch in batches:
        first += [batch] * (len(first) < count)
        group.append(batch)
        if len(group) == count:
            yield group
            group = []
    if group:
        yield [*group, *islice(cycle(first), count - len(group))]


@dataclass(frozen=True)
class PerFedAvg(ModelAveraging):
    """The method Per-FedAvg, with its settings.

    Attributes:
        steps: tau, number of steps with exact gradients; by default a device steps through the batches of the
            run's epochs.
        adaptation_rate: alpha, length of the step by which a device adapts the shared model.
        meta_rate: beta, length of the step that the shared model takes on a device.
        approximation: how the Hessian's product is approximated. The Hessian-free one does twice the work,
            tolerates larger alphas, and needs a smaller beta for a sharp loss.
        difference: delta, step of the difference quotient in the Hessian-free approximation.
        adaptation_steps: number of adaptation steps of the personal model; the paper takes one.

    The paper has alpha 0.01 and beta 0.001, over 1000 rounds of 10 steps. The default beta suits tens of
    rounds.
    """

    leak: ClassVar[str | None] = None

    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    adaptation_rate: Annotated[float, Meta(ge=0)] = 0.01
    meta_rate: Annotated[float, Meta(gt=0)] = 0.1
    approximation: Literal["first-order", "hessian-free"] = "first-order"
    difference: Annotated[float, Meta(gt=0)] = 1e-3
    adaptation_steps: Annotated[int, Meta(ge=1, le=1000)] = 1

    by_samples: ClassVar[bool] = False

    @property
    def relative_work(self) -> float:
        """Number of gradients in a step; the Hessian-free product takes two gradients."""
        if self.steps is not None:
            return 0.0
        return 4 / 3 if self._needs_hessian else 1.0

    @property
    def extra_epochs(self) -> float:
        """Extra epochs: each exact gradient is a pass over all samples; one forward pass updates the
        statistics.
        """
        gradients = (self.steps or 0) * (4 if self._needs_hessian else 2) + self.adaptation_steps
        return gradients + compute_cost(self.spec, self._nothing)

    @property
    def _needs_hessian(self) -> bool:
        return self.approximation == "hessian-free"

    @property
    def _nothing(self) -> MaskArray:
        return np.zeros(self.spec.size, dtype=bool)

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        received = task.patch.apply(state.weights, self.spec)
        # gradients use running statistics, so update these from the data; nothing else changes
        statistics = FitPlan(trainable=self._nothing, epochs=1)
        personal = shared = trainer.fit(received, statistics, key).weights
        for _ in range(self.adaptation_steps):
            personal = personal - self.adaptation_rate * trainer.gradient(personal)
        difference = self.difference if self._needs_hessian else None
        for gradients in self._gradients(trainer, key.child("batches")):
            step = meta_gradient(shared, gradients, self.adaptation_rate, difference)
            shared = shared - self.meta_rate * step
        if not (np.isfinite(shared).all() and np.isfinite(personal).all()):
            raise TrainingDiverged(f"training diverged: lower method.meta_rate (now {self.meta_rate:g})")
        return PersonalModel(personal), self.update(shared, trainer)

    def _gradients(self, trainer: Trainer, key: Key) -> Iterator[Sequence[Gradient]]:
        """Yield the gradient functions of each step: two, or three with the Hessian."""
        count = 3 if self._needs_hessian else 2
        if self.steps is not None:
            yield from repeat([trainer.gradient] * count, self.steps)
            return
        for group in groups_of_batches(trainer.batches(key), count):
            yield [partial(trainer.gradient, rows=rows) for rows in group]
