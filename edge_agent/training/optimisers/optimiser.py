"""What an optimiser is: how far each weight moves, from its gradient and what is remembered of it.

An optimiser is elementwise and sees a block of entries at a time; which entries those are, frozen ones, the
pull and clipping are `edge_agent.training.descent`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.device import TrainingSection

Floats = NDArray[np.floating]  # float32 in training; float64 stays float64


@dataclass(frozen=True)
class OptimiserState:
    """What an optimiser remembers between the rounds of a device.

    Attributes:
        vectors: the optimiser's own, each of shape (spec.num_parameters,), 0 at entries that were never
            trained; where it counts steps, one more: how many steps each entry has taken, exact up to 2^24.
    """

    vectors: tuple[FlatArray, ...]


@dataclass(frozen=True)
class StepCounts:
    """How many steps each entry of a block has taken, this one included.

    Attributes:
        levels: the different numbers, shape (k,); entries that were always trained together share one.
        index: which of them is each entry's, shape (entries,); None: all have the only one.
    """

    levels: NDArray[np.float64]
    index: NDArray[np.uint16] | None = None

    def each(
        self, value: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: np.dtype[np.floating]
    ) -> Floats | float:
        """What `value` makes of each entry's number; a plain number where all have the same."""
        values = value(self.levels)
        return float(values[0]) if self.index is None else values.astype(dtype).take(self.index)


class Optimiser(Protocol):
    """One of `edge_agent.training.optimisers`.

    Attributes:
        counts_steps: `step` heeds how many steps an entry has taken.
    """

    counts_steps: ClassVar[bool]

    @classmethod
    def of(cls, settings: TrainingSection) -> Self:
        """By the run's [training] section."""
        ...

    @property
    def num_vectors(self) -> int:
        """Numbers that it remembers of each trained entry, step counts aside."""
        ...

    def step(
        self,
        gradient: Floats,
        weights: Floats,
        vectors: tuple[Floats, ...],
        counts: StepCounts,
        scratch: Floats,
    ) -> Floats:
        """What is to be taken off the weights.

        Args:
            gradient: g of some entries, shape (k,); it may be used up.
            weights: w of these, left alone.
            vectors: `num_vectors` of them, 0 before the first step; updated in place.
            counts: of these entries.
            scratch: of shape (k,).

        Returns:
            `gradient` or `scratch`, overwritten: never one of `vectors`.
        """
        ...
