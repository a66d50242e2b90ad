"""FedBN (Li et al., ICLR 2021): all layers are averaged except normalisation layers, which stay local.

One round (Algorithm 1): devices train locally, and the coordinator averages every layer that is not a
normalisation layer. All participants count equally. The paper means batch normalisation; here every kind of
normalisation layer stays local. A model without such layers is trained as by FedAvg.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.update.selection import Layers, norm_layers


@dataclass(frozen=True)
class FedBN(ModelAveraging):
    """The method FedBN, which has no settings.

    A personal model joins the device's own normalisation layers to the other trained layers.
    """

    leak: ClassVar[str | None] = None

    by_samples: ClassVar[bool] = False

    @cached_property
    def shared(self) -> Layers:
        norms = norm_layers(self.spec)
        return Layers(tuple(name for name in self.spec.layers if name not in norms))
