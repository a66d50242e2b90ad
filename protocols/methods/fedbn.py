"""FedBN (Li et al., ICLR 2021): everything is averaged but the normalisation layers, which stay local.

Algorithm 1: local training, then the mean over the participants of every layer that is not a norm layer;
all count alike. The paper means batch normalisation; here every layer that normalises stays local. A model
without such layers is trained as by FedAvg.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.update.layers import norm_layers
from fleetune.protocols.update.selection import Layers


@dataclass(frozen=True)
class FedBN(ModelAveraging):
    """The device's personal model is its own norm layers within the rest after its last local training."""

    by_samples: ClassVar[bool] = False

    @cached_property
    def shared(self) -> Layers:
        norms = norm_layers(self.spec)
        return Layers(tuple(name for name in self.spec.layers if name not in norms))
