"""FedBABU (Oh, Kim, Yun; ICLR 2022): devices learn a shared body under a head that never changes.

One round (Algorithm 1):

1. The device takes over the shared body and trains it, with the head frozen at its initial value.
2. It sends the body back. The coordinator averages bodies by training samples.

The personal model is the shared one after fine-tuning on the device. The paper fine-tunes once, after the
last round. Here each round also fine-tunes, from the received body and the initial head, so that a personal
model always exists. This does not influence the shared model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fleetune.protocols.method.averaging import BodyAveraging, Task, Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.compute_cost import compute_cost
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Selection


@dataclass(frozen=True)
class ClientState:
    """The device's fine-tuned model, shape (spec.size,), and the initial head that all devices share."""

    weights: FlatArray
    initial_head: Patch


@dataclass(frozen=True)
class FedBABU(BodyAveraging[ClientState]):
    """The method FedBABU, with its settings in addition to `head_layers` of `BodyAveraging`.

    Attributes:
        fine_tuned: part of the model that fine-tuning changes: the head, or all. The paper compares both, and
            the body alone.
        fine_tuning_epochs: number of epochs of fine-tuning.
    """

    leak: ClassVar[str | None] = None

    fine_tuned: Literal["head", "all"] = "head"
    fine_tuning_epochs: Annotated[int, Meta(ge=1, le=1000)] = 5

    device_state_type = ClientState

    @property
    def relative_work(self) -> float:
        return compute_cost(self.spec, self.shared.mask(self.spec))

    @property
    def extra_epochs(self) -> float:
        return self.fine_tuning_epochs * compute_cost(self.spec, self._tuned.mask(self.spec))

    @property
    def _tuned(self) -> Selection:
        return Everything() if self.fine_tuned == "all" else self.head

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights, Patch.of(weights, self.head, self.spec))

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        start = state.initial_head.apply(task.patch.apply(state.weights, self.spec), self.spec)
        body = FitPlan(trainable=self.shared.mask(self.spec))
        trained = trainer.fit(start, body, key.child("body"))
        tuning = FitPlan(trainable=self._tuned.mask(self.spec), epochs=self.fine_tuning_epochs)
        personal = trainer.fit(start, tuning, key.child("fine-tuning"))
        return ClientState(personal.weights, state.initial_head), self.update(trained.weights, trainer)
