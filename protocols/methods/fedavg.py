"""FedAvg (McMahan et al., AISTATS 2017): train the whole shared model, average by samples."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import UNSET, Meta
from numpy.typing import NDArray

from fleetune.protocols.method.averaging import ModelAveraging, SharedModel
from fleetune.protocols.model.spec import FlatArray


@dataclass(frozen=True)
class FedAvg(ModelAveraging):
    """The method FedAvg, with its settings. A personal model is the shared one after local training.

    With d the step from the shared model w to the devices' average, a round computes v' = momentum v + d and
    w' = w + rate v' (FedAvgM: Hsu, Qi, Brown 2019, arXiv:1909.06335, section 4.2, where the rate is 1).

    Attributes:
        server_rate: share of the averaged step that the coordinator takes.
        server_momentum: share of each step that continues in the next one; 0 with a rate of 1 is plain
            FedAvg.
    """

    leak: ClassVar[str | None] = None

    serves_shared_model: ClassVar[bool] = True

    server_rate: Annotated[float, Meta(gt=0, le=10)] = 1.0
    server_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def apply(self, state: SharedModel, average: FlatArray) -> SharedModel:
        averaged = super().apply(state, average).weights
        if self.server_rate == 1 and not self.server_momentum:
            return SharedModel(averaged)
        # the difference of two extreme float32 numbers can overflow float32
        weights = state.weights.astype(np.float64)
        step = averaged - weights
        if state.velocity is not UNSET:
            step += self.server_momentum * state.velocity
        velocity = _within_float32(step)
        stepped = _within_float32(weights + self.server_rate * velocity)
        return SharedModel(stepped, velocity if self.server_momentum else UNSET)


def _within_float32(values: NDArray[np.float64]) -> FlatArray:
    largest = np.finfo(np.float32).max
    return np.clip(values, -largest, largest).astype(np.float32)
