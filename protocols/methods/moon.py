"""MOON (Li, He, Song; CVPR 2021): FedAvg with a contrast between the shared and the device's last model.

Eq. (3): let z be what the model in training makes of a sample just before its last layer, z_glob what the
shared model makes of it, and z_prev what the device's own model does as it was after its last training.
Beside the cross entropy the loss has strength * -log(e^near / (e^near + e^prev)), near and prev being the
cosines of z with z_glob and z_prev over a temperature: like the shared model, unlike the device's last one.

The paper's networks have a projection before the last layer, one layer as wide as its input with ReLU and
one of 256, so that z is a projection's output: model `cnn-moon` is the authors' network for CIFAR-10, and
with it, or with any model of such an end, this is the published method. With others z is the representation
itself, as in PFLlib.

As in the authors' code (github.com/QinbinLi/MOON), a device that has not trained yet contrasts with the
initial model, the others answer in evaluation mode, and participants count by samples. A device that was away
contrasts with the model it left with.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel, Task, Update
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.loss_terms import Contrast
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class MOON(ModelAveraging):
    """Settings.

    Attributes:
        strength: mu, weight of the contrastive loss. The paper chooses among 0.1, 1, 5 and 10; the authors'
            code has 1.
        temperature: T, which divides the cosines.
    """

    serves_shared_model: ClassVar[bool] = True

    strength: Annotated[float, Meta(ge=0)] = 1.0
    temperature: Annotated[float, Meta(gt=0)] = 0.5

    extra_models: ClassVar[int] = 2

    @property
    def extra_epochs(self) -> float:
        """Two passes: what the shared and the device's last model answer on the training samples."""
        return 2 * EVALUATION_EPOCHS

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start = task.patch.apply(state.weights, self.spec)
        contrast = Contrast(start, state.weights, self.strength, self.temperature)
        fit = trainer.fit(start, FitPlan(loss_term=contrast), key)
        return PersonalModel(fit.weights), self.update(fit.weights, trainer)
