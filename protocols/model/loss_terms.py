"""Terms of the local loss that hold a model to what other, fixed models answer on the same samples.

They are part of a `FitPlan`; a backend computes them (`edge_agent.training.backend.Backend`).
"""

from dataclasses import dataclass
from typing import Literal

from fleetune.protocols.model.spec import FlatArray

Answer = Literal["logits", "features"]  # what the model gives; what its last layer gets


@dataclass(frozen=True)
class Distillation:
    """strength * T^2 * KL(teacher || model) of the class probabilities at temperature T, mean over samples.

    Attributes:
        teacher: weights, shape (spec.size,); it answers in evaluation mode.
        strength: at least 0.
        temperature: T, above 0: both models' logits are divided by it.
    """

    teacher: FlatArray
    strength: float
    temperature: float

    @property
    def models(self) -> tuple[FlatArray, ...]:
        """Those that answer."""
        return (self.teacher,)

    @property
    def answer(self) -> Answer:
        """What they are asked for."""
        return "logits"


@dataclass(frozen=True)
class Contrast:
    """strength * -log(e^near / (e^near + e^far)), mean over samples, near and far being cosines over T:
    of the features the model gives its last layer with those that the near and the far model give theirs.

    Attributes:
        near: weights to be alike, shape (spec.size,); it answers in evaluation mode, as does `far`.
        far: weights to be unlike.
        strength: at least 0.
        temperature: T, above 0.
    """

    near: FlatArray
    far: FlatArray
    strength: float
    temperature: float

    @property
    def models(self) -> tuple[FlatArray, ...]:
        """Those that answer."""
        return (self.near, self.far)

    @property
    def answer(self) -> Answer:
        """What they are asked for."""
        return "features"


LossTerm = Distillation | Contrast
