"""The base class of optimisers, which compute each weight's change from its gradient and a state.

An optimiser works elementwise on blocks of entries. `edge_agent.training.descent` chooses the entries, and
handles frozen entries, the pull and clipping.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.device import TrainingSection

Floats = NDArray[np.floating]  # float32 in training; float64 stays float64


@dataclass(frozen=True)
class OptimiserState:
    """An optimiser's state between the rounds of a device.

    Attributes:
        vectors: the optimiser's vectors, each of shape (spec.num_parameters,), 0 at entries that were never
            trained. An optimiser that counts steps has one more vector: the number of steps of each entry,
            exact up to 2^24.
    """

    vectors: tuple[FlatArray, ...]


@dataclass(frozen=True)
class StepCounts:
    """The number of steps that each entry of a block has taken, including this one.

    Attributes:
        levels: the different numbers, shape (k,). Entries that always trained together share one.
        index: index into `levels` for each entry, shape (entries,); None if all entries have the same number.
    """

    levels: NDArray[np.float64]
    index: NDArray[np.uint16] | None = None

    def each(
        self, value: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: np.dtype[np.floating]
    ) -> Floats | float:
        """Return `value` of each entry's number of steps; a plain number if all entries have the same."""
        values = value(self.levels)
        return float(values[0]) if self.index is None else values.astype(dtype).take(self.index)


@dataclass(frozen=True)
class Optimiser(ABC):
    """Base class of the optimisers.

    Class attributes:
        counts_steps: True if `step` uses the number of steps of each entry.

    Attributes:
        settings: the run's [training] section.
    """

    counts_steps: ClassVar[bool] = False

    settings: TrainingSection

    @property
    @abstractmethod
    def num_vectors(self) -> int:
        """Number of values that the optimiser stores for each trained entry, without step counts."""

    @abstractmethod
    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,
        scratch: Floats,
    ) -> Floats:
        """Return the amount to subtract from the weights.

        Args:
            gradient: g of some entries, shape (k,). It may be overwritten.
            weights: w of these entries, which stays unchanged.
            vectors: `num_vectors` vectors, 0 before the first step, updated in place.
            counts: step counts of these entries.
            scratch: memory of shape (k,).

        Returns:
            `gradient` or `scratch`, overwritten, and never one of `vectors`.
        """
