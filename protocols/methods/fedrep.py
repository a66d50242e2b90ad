"""FedRep (Collins et al., ICML 2021): a shared body (the representation) under personal heads.

One round (Algorithm 1):

1. The device takes over the body and trains its own head on it, then the body under the new head.
2. It sends the body back. The coordinator averages bodies, all participants counting equally. The authors'
    code weighs them by samples.

Heads never travel.
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
    """The method FedRep, with its settings in addition to `head_layers` of `BodyAveraging`.

    Attributes:
        head_epochs: number of epochs of the head, before the body.
        body_epochs: number of epochs of the body; the default is the run's epochs. The paper has 1 or 5.
    """

    leak: ClassVar[str | None] = None

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
