"""Terms of the local loss that compare the model in training with fixed models on the same samples.

The terms are part of a `FitPlan`; a backend computes them (`edge_agent.training.backend.Backend`).
"""

from dataclasses import dataclass
from typing import Literal

from fleetune.protocols.model.spec import FlatArray

# "logits": the model's output; "features": the input of its last layer
Answer = Literal["logits", "features"]


@dataclass(frozen=True)
class Distillation:
    """strength * T^2 * KL(teacher || model) of the class probabilities at temperature T, mean over samples.

    Attributes:
        teacher: the teacher's weights, shape (spec.size,); it runs in evaluation mode.
        strength: weight of the term, at least 0.
        temperature: T, above 0: both models' logits are divided by it.
    """

    teacher: FlatArray
    strength: float
    temperature: float

    @property
    def models(self) -> tuple[FlatArray, ...]:
        """Weights of the fixed models."""
        return (self.teacher,)

    @property
    def answer(self) -> Answer:
        """The output of the fixed models that the term uses."""
        return "logits"


@dataclass(frozen=True)
class Contrast:
    """strength * -log(e^near / (e^near + e^far)), mean over samples.

    `near` and `far` are cosines divided by T: of the inputs of the model's last layer with those of the near
    and the far model.

    Attributes:
        near: weights of the model to be similar to, shape (spec.size,); it runs in evaluation mode, as does
            `far`.
        far: weights of the model to be different from.
        strength: weight of the term, at least 0.
        temperature: T, above 0.
    """

    near: FlatArray
    far: FlatArray
    strength: float
    temperature: float

    @property
    def models(self) -> tuple[FlatArray, ...]:
        """Weights of the fixed models."""
        return (self.near, self.far)

    @property
    def answer(self) -> Answer:
        """The output of the fixed models that the term uses."""
        return "features"


LossTerm = Distillation | Contrast
