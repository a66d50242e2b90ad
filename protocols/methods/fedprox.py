"""FedProx (Li et al., MLSys 2020): FedAvg with a loss term that keeps local training near the shared
model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.model.spec import FlatArray


@dataclass(frozen=True)
class FedProx(ModelAveraging):
    """The method FedProx, with its settings; the local loss is f(w) + proximal / 2 * ||w - w_shared||^2.

    Attributes:
        proximal: mu, strength of the pull towards the shared model; 0 is FedAvg.
    """

    leak: ClassVar[str | None] = None

    serves_shared_model: ClassVar[bool] = True

    proximal: Annotated[float, Meta(ge=0)] = 0.01

    def fit_plan(self, state: PersonalModel, start: FlatArray) -> FitPlan:
        return FitPlan(pull=Pull(start, self.proximal / 2))
