"""LG-FedAvg (Liang et al., arXiv 2001.01523, 2020): local lower layers under a global head.

One round (Algorithm 1):

1. The device takes over the global last layers and trains them jointly with its own lower layers.
2. It sends the global layers back. The coordinator averages them by training samples.

This is FedPer the other way round. The authors' code (github.com/pliang279/LG-FedAvg) starts from a model
that FedAvg has trained and averages all devices equally; the algorithm and this file start from the initial
model. The code shares the last 3 of 4 layers on MNIST and the last 2 of 5 on CIFAR-10. SRP-pFed's table
(section V-A) shares the last 3 of LeNet-5's 5.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.update.selection import Layers, norm_layers, split_at_head


@dataclass(frozen=True)
class LGFed(ModelAveraging):
    """The method LG-FedAvg, with its settings.

    Attributes:
        global_layers: number of global layers, counted from the end. `auto` is 3, or all but the first in a
            model of at most 3 layers, as in SRP-pFed's table.
    """

    leak: ClassVar[str | None] = None

    global_layers: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"

    @cached_property
    def shared(self) -> Layers:
        if self.global_layers != "auto":
            return split_at_head(self.spec, self.global_layers)[1]
        weighted = len(self.spec.layers.keys() - norm_layers(self.spec))
        return split_at_head(self.spec, max(1, min(3, weighted - 1)))[1]
