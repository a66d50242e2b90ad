"""What SRP-pFed's two sides know between rounds, and what travels between them."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Loss, NumSamples, Ratio
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.patch import Patch

MAX_RATES = 1000


@dataclass(frozen=True)
class ServerState:
    """What the coordinator knows between rounds.

    Attributes:
        weights: w_g, shape (spec.size,).
        memory: h, float64, a number for each candidate rate.
        ratios: what each device's budget allows.
        drawn: the indices of the rates of the round under way, without repetition.
        used: the indices of the rates that the last round credited, ascending.
    """

    weights: FlatArray
    memory: NDArray[np.float64]
    ratios: dict[DeviceId, float]
    drawn: tuple[int, ...] = ()
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClientState:
    """w_i, shape (spec.size,), and whether it has been trained here."""

    weights: FlatArray
    trained: bool = False


@dataclass(frozen=True)
class Task:
    """w_g, whole or a share of its entries, and the rates to try in this order."""

    patch: Patch
    rates: Annotated[tuple[Ratio, ...], Meta(min_length=1, max_length=MAX_RATES)]


@dataclass(frozen=True)
class Update:
    """What a device made of its task.

    Attributes:
        patch: the shared entries after training.
        num_samples: training samples.
        loss: the training loss of the mixture before training.
    """

    patch: Patch
    num_samples: NumSamples
    loss: Loss


@dataclass(frozen=True)
class RatedUpdate(Update):
    """An update that says at which rate it shared; None: it is one of those that do not (`credit`)."""

    rate: Ratio | None = None
