"""Ditto (Li, Hu, Beirami, Smith; ICML 2021): a global model as in FedAvg, and personal models close to it.

One round (Algorithm 1):

1. The device trains the global model w^t on its data and sends it back. The mean counts all participants
    equally.
2. It also trains its own model v_k on f(v) + lambda / 2 * ||v - w^t||^2, from its last state. v_k never
    travels, and w^t is the global model as received.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import AveragedModel, Task, Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class ClientState:
    """A device's state between rounds: two models, each of shape (spec.size,).

    Attributes:
        weights: v_k.
        copy: global model after the last training here, stored for its running statistics, which do not
            travel.
    """

    weights: FlatArray
    copy: FlatArray


@dataclass(frozen=True)
class Ditto(AveragedModel[ClientState]):
    """The method Ditto, with its settings.

    Attributes:
        pull: lambda, strength that holds the personal models near the global one; 0 trains them locally. The
            paper chooses among 0.1, 1 and 2 for each device by validation (0.05, 0.1 and 0.2 under attack).
        personal_epochs: s, number of epochs of the personal model; the default is the run's epochs.
    """

    leak: ClassVar[str | None] = None

    pull: Annotated[float, Meta(ge=0)] = 1.0
    personal_epochs: Annotated[int, Meta(ge=1, le=1000)] | None = None

    by_samples: ClassVar[bool] = False
    extra_models: ClassVar[int] = 1

    device_state_type = ClientState

    @property
    def relative_work(self) -> float:
        """Number of trainings a round: two, or one if `personal_epochs` counts the other separately."""
        return 2.0 if self.personal_epochs is None else 1.0

    @property
    def extra_epochs(self) -> float:
        return float(self.personal_epochs or 0)

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights, weights)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        received = task.patch.apply(state.copy, self.spec)
        trained = trainer.fit(received, FitPlan(), key.child("global"))
        plan = FitPlan(pull=Pull(received, self.pull / 2), epochs=self.personal_epochs)
        personal = trainer.fit(state.weights, plan, key.child("personal"))
        return ClientState(personal.weights, trained.weights), self.update(trained.weights, trainer)
