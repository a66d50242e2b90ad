"""What a configuration of the race is: steps of a round's participants in, their mean and its bytes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class Arrived:
    """What the coordinator has after a round.

    Attributes:
        step: the mean of what devices sent, weighted, shape (spec.size,).
        num_bytes: that all of them sent together.
    """

    step: FlatArray
    num_bytes: float


class Sender(Protocol):
    """The devices' half, with what they keep between rounds."""

    def send(
        self, base: FlatArray, trained: Mapping[int, FlatArray], weights: Mapping[int, float], key: Key
    ) -> Arrived:
        """A round.

        Args:
            base: what the coordinator sent, shape (spec.size,).
            trained: what each participant made of it.
            weights: of each participant in the mean; together 1.
            key: of the round's random draws.
        """
        ...
