"""MOON (Li, He, Song; CVPR 2021): FedAvg with a contrast between the shared and the device's last model.

One round is FedAvg's with a further loss term (eq. 3). For each sample, compare the input of the last layer:

1. z comes from the model in training, z_glob from the shared model, and z_prev from the device's own model
    after its last training.
2. near and prev are the cosines of z with z_glob and z_prev, divided by the temperature.
3. The loss is the cross entropy plus strength * -log(e^near / (e^near + e^prev)). The model is thus trained
    to be like the shared model and unlike the device's last one.

The paper's networks end in a projection before the last layer: one layer as wide as its input with ReLU, and
one of 256, so that z is a projection's output. Model `cnn-moon` is the authors' network for CIFAR-10. With
it, or with any model that ends so, this is the published method. In other models z is the representation
itself, as in PFLlib.

As in the authors' code (github.com/QinbinLi/MOON), a device without training so far contrasts with the
initial model. The other models answer in evaluation mode, and participants count by samples. A device that
was away contrasts with the model of its last training.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel
from fleetune.protocols.method.choice import EVALUATION_EPOCHS
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.loss_terms import Contrast
from fleetune.protocols.model.spec import FlatArray


@dataclass(frozen=True)
class MOON(ModelAveraging):
    """The method MOON, with its settings.

    Attributes:
        strength: mu, weight of the contrastive loss. The paper chooses among 0.1, 1, 5 and 10; the authors'
            code has 1.
        temperature: T, which divides the cosines.
    """

    leak: ClassVar[str | None] = None

    serves_shared_model: ClassVar[bool] = True

    strength: Annotated[float, Meta(ge=0)] = 1.0
    temperature: Annotated[float, Meta(gt=0)] = 0.5

    extra_models: ClassVar[int] = 2

    @property
    def extra_epochs(self) -> float:
        """Extra epochs: one forward pass each of the shared and the device's last model over the training
        samples.
        """
        return 2 * EVALUATION_EPOCHS

    def fit_plan(self, state: PersonalModel, start: FlatArray) -> FitPlan:
        return FitPlan(loss_term=Contrast(start, state.weights, self.strength, self.temperature))
