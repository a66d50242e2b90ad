"""SRP-pFed's states of coordinator and device, and the types of task and update."""

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
    """Coordinator state.

    Attributes:
        weights: w_g, shape (spec.size,).
        memory: h, one float64 number for each candidate rate.
        ratios: ratio that each device's budget allows.
        drawn: indices of the present round's rates, without repetition.
        used: indices of the rates that the last round credited, ascending.
    """

    weights: FlatArray
    memory: NDArray[np.float64]
    ratios: dict[DeviceId, float]
    drawn: tuple[int, ...] = ()
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClientState:
    """Device state: w_i, shape (spec.size,), and True if it has been trained here."""

    weights: FlatArray
    trained: bool = False


@dataclass(frozen=True)
class Task:
    """w_g, whole or a share of its entries, and the rates to try, in this order."""

    patch: Patch
    rates: Annotated[tuple[Ratio, ...], Meta(min_length=1, max_length=MAX_RATES)]


@dataclass(frozen=True)
class Update:
    """Result of a device's round.

    Attributes:
        patch: shared entries after training.
        num_samples: number of training samples.
        loss: training loss of the mixture before training.
    """

    patch: Patch
    num_samples: NumSamples
    loss: Loss


@dataclass(frozen=True)
class RatedUpdate(Update):
    """An update with the rate at which the device shared; None in updates that do not report it
    (`credit`).
    """

    rate: Ratio | None = None
