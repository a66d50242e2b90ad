"""FedBABU (Oh, Kim, Yun; ICLR 2022): the body is learned under a head that never changes.

Algorithm 1: all start from the same weights; the device takes the shared body over, trains it with the head
frozen at its initial value, and sends it back; bodies are averaged by training samples.

The personal model is the shared one, fine-tuned by its device. The paper does that once, after the last
round; here it is done beside every round's training, from the body as it came and the initial head, so that
there is a personal model at any time. It has no influence on what is shared.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

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
    """The fine-tuned model, shape (spec.size,), and the head that all started with."""

    weights: FlatArray
    initial_head: Patch


@dataclass(frozen=True)
class FedBABU(BodyAveraging[ClientState]):
    """Settings beside `head_layers`, which is that of `BodyAveraging`.

    Attributes:
        fine_tuned: what the personal model changes of the shared one: its head, or all (the paper compares
            both, and the body alone).
        fine_tuning_epochs: of the personal model.
    """

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
