"""LG-FedAvg (Liang et al., arXiv 2001.01523, 2020): local representations under a global head.

Algorithm 1: the device takes the global last layers over, trains them jointly with its own layers below,
and sends the global ones back; these are averaged by training samples. FedPer the other way round.

The authors' code starts from a model that FedAvg has trained, and averages all alike; the algorithm, and this
file, start from the initial one. The code (github.com/pliang279/LG-FedAvg) shares the last 3 of 4 layers on
MNIST and the last 2 of 5 on CIFAR-10; SRP-pFed's table (section V-A) shares the last 3 of LeNet-5's 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.update.layers import norm_layers, split_at_head
from fleetune.protocols.update.selection import Layers


@dataclass(frozen=True)
class LGFed(ModelAveraging):
    """Settings.

    Attributes:
        global_layers: counted from the end. `auto`: 3, or all but the first where there are no more than 3; a
            run that leaves it open begins so.
    """

    global_layers: Annotated[int, Meta(ge=1)] | Literal["auto"] = 1

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:  # noqa: ARG003
        """SRP-pFed's; runs of releases that shared the last layer go on doing so."""
        return {"global_layers": "auto"}

    @cached_property
    def shared(self) -> Layers:
        if self.global_layers != "auto":
            return split_at_head(self.spec, self.global_layers)[1]
        weighted = len(self.spec.layers.keys() - norm_layers(self.spec))
        return split_at_head(self.spec, max(1, min(3, weighted - 1)))[1]
