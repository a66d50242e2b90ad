"""LG-FedAvg (Liang et al., arXiv 2001.01523, 2020): local representations under a global head.

Algorithm 1: the device takes the global last layers over, trains them jointly with its own layers below,
and sends the global ones back; these are averaged by training samples. FedPer the other way round.

The authors' code starts from a model that FedAvg has trained; the algorithm, and this file, from the
initial one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from fleetune.protocols.skeletons.averaging import ModelAveraging
from fleetune.protocols.update.layers import split_at_head
from fleetune.protocols.update.selection import Layers


@dataclass(frozen=True)
class LGFed(ModelAveraging):
    """Settings.

    Attributes:
        global_layers: counted from the end. Of LeNet-5 the paper shares the 3 fully connected ones.
    """

    global_layers: Annotated[int, Meta(ge=1)] = 1

    @cached_property
    def shared(self) -> Layers:
        return split_at_head(self.spec, self.global_layers)[1]
