"""pFedSD (Jin et al., TPDS 2022): FedAvg in which devices distil their last own model into the shared one.

One round:

1. The device starts from the shared model. From its second participation on, its loss has the further term
   strength * KL(its own model after its last training || the model in training).
2. The result is its personal model, its next teacher, and its update.
3. The coordinator averages the updates, all participants counting equally.

As in the authors' code, the term is multiplied by temperature^2. The teacher answers in evaluation mode, with
its own running statistics. A device that was away learns from its last model; a new one has no teacher in its
first round.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import AveragedModel, Task, Update
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class ClientState:
    """The device's own model, shape (spec.size,), and True if it has been trained here."""

    weights: FlatArray
    trained: bool = False


@dataclass(frozen=True)
class PFedSD(AveragedModel[ClientState]):
    """The method pFedSD, with its settings; the defaults are those of the authors' code.

    Attributes:
        strength: lambda, weight of the distillation loss.
        temperature: temperature of both models' class probabilities.
    """

    leak: ClassVar[str | None] = None

    strength: Annotated[float, Meta(ge=0)] = 1.0
    temperature: Annotated[float, Meta(gt=0)] = 1.0

    tasks = frozenset({"classification"})  # class probabilities are distilled
    by_samples: ClassVar[bool] = False
    extra_models: ClassVar[int] = 1

    device_state_type = ClientState

    @property
    def extra_epochs(self) -> float:
        """Extra epochs: one pass of the teacher over the training samples."""
        return EVALUATION_EPOCHS

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        teaching = Distillation(state.weights, self.strength, self.temperature)
        plan = FitPlan(loss_term=teaching if state.trained else None)
        fit = trainer.fit(task.patch.apply(state.weights, self.spec), plan, key)
        return ClientState(fit.weights, trained=True), self.update(fit.weights, trainer)
