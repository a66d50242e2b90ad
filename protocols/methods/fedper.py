"""FedPer (Arivazhagan et al., arXiv 1912.00818, 2019): shared base layers, personal last layers.

One round (Algorithms 1 and 2):

1. The device takes over the base layers and trains base and personal layers jointly.
2. It sends the base layers back. The coordinator averages them by training samples.

Personal layers never travel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.update.selection import Layers, split_at_head


@dataclass(frozen=True)
class FedPer(ModelAveraging):
    """The method FedPer, with its settings.

    Attributes:
        personal_layers: K_P, number of personal layers, counted from the end. The paper counts a residual
            block as one; here each of its convolutions counts.
    """

    leak: ClassVar[str | None] = None

    personal_layers: Annotated[int, Meta(ge=1)] = 1

    @cached_property
    def shared(self) -> Layers:
        return split_at_head(self.spec, self.personal_layers)[0]
