"""FedProx (Li et al., MLSys 2020): FedAvg with a loss term that keeps local training near the shared
model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel, Task, Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything


@dataclass(frozen=True)
class FedProx(ModelAveraging):
    """Settings. The local loss is f(w) + proximal / 2 * ||w - w_shared||^2 (eq. 2).

    Attributes:
        proximal: mu, strength of the pull towards the shared model; 0 is FedAvg.
    """

    serves_shared_model: ClassVar[bool] = True

    proximal: Annotated[float, Meta(ge=0)] = 0.01

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start = task.patch.apply(state.weights, self.spec)
        fit = trainer.fit(start, FitPlan(pull=Pull(start, self.proximal / 2)), key)
        sent = Patch.of(fit.weights, Everything(), self.spec)
        return PersonalModel(fit.weights), Update(sent, trainer.num_samples)
