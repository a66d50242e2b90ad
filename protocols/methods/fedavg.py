"""FedAvg (McMahan et al., AISTATS 2017): train the whole shared model, average by samples."""

from dataclasses import dataclass
from typing import ClassVar

from fleetune.protocols.skeletons.averaging import ModelAveraging


@dataclass(frozen=True)
class FedAvg(ModelAveraging):
    """The device's personal model is the shared one after its own last local training."""

    serves_shared_model: ClassVar[bool] = True
