"""The interface of a sender: steps of the participants in, their mean and its bytes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class Arrived:
    """Data that the coordinator receives in a round.

    Attributes:
        step: weighted mean of the devices' steps, shape (spec.size,).
        num_bytes: sum of the bytes of all devices.
    """

    step: FlatArray
    num_bytes: float


class Sender(Protocol):
    """The devices' side of a configuration, with its state between rounds."""

    def send(
        self, base: FlatArray, trained: Mapping[int, FlatArray], weights: Mapping[int, float], key: Key
    ) -> Arrived:
        """Send one round.

        Args:
            base: weights that the coordinator sent, shape (spec.size,).
            trained: weights of each participant after local training.
            weights: weight of each participant in the mean; the sum is 1.
            key: key of the round's random draws.
        """
        ...
