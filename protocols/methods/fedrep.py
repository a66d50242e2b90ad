"""FedRep (Collins et al., ICML 2021): a shared representation, learned under heads that fit it.

Algorithm 1: the device takes the representation (the body) over, trains its own head on it, then the body
under the new head, and sends the body back; bodies are averaged, all participants counting alike (the
authors' code weighs them by samples). Heads never travel.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import (
    BodyAveraging,
    PersonalDevice,
    PersonalModel,
    SharedModel,
    Task,
    Update,
)
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.compute_cost import compute_cost
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class FedRep(BodyAveraging[PersonalModel], PersonalDevice[SharedModel, Task, Update]):
    """Settings beside `head_layers`, which is that of `BodyAveraging`.

    Attributes:
        head_epochs: of the head, before the body.
        body_epochs: of the body; None: the run's. The paper: 1 or 5.
    """

    head_epochs: Annotated[int, Meta(ge=1, le=1000)] = 10
    body_epochs: Annotated[int, Meta(ge=1, le=1000)] | None = None

    by_samples: ClassVar[bool] = False

    @property
    def relative_work(self) -> float:
        return compute_cost(self.spec, self.shared.mask(self.spec)) if self.body_epochs is None else 0.0

    @property
    def extra_epochs(self) -> float:
        head, body = (compute_cost(self.spec, part.mask(self.spec)) for part in (self.head, self.shared))
        return self.head_epochs * head + (self.body_epochs or 0) * body

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start = task.patch.apply(state.weights, self.spec)
        head = FitPlan(trainable=self.head.mask(self.spec), epochs=self.head_epochs)
        body = FitPlan(trainable=self.shared.mask(self.spec), epochs=self.body_epochs)
        headed = trainer.fit(start, head, key.child("head"))
        fit = trainer.fit(headed.weights, body, key.child("body"))
        return PersonalModel(fit.weights), self.update(fit.weights, trainer)
