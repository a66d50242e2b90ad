"""FjORD (Horvath et al., NeurIPS 2021) as FedSPU compares with it: cut the rightmost neurons of each layer.

Ordered dropout (section 3.1): a device of ratio p has the first neurons of every layer. Smaller sub-models
are thus nested in larger ones, and all devices share the leftmost neurons. See `protocols.method.submodels`.

FjORD's own paper also draws a width up to p for each batch, may distil the full width into it (algorithm 1),
and keeps ceil(p * n) neurons. FedSPU's section 5.1 and its authors' code train at width p only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fleetune.protocols.method.submodels import Scores, SubModels, strongest
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import ChosenNeurons


@dataclass(frozen=True)
class FjORD(SubModels):
    """The method FjORD, which has no settings."""

    leak: ClassVar[str | None] = None

    def first_selection(self, ratio: float) -> ChosenNeurons:
        """Return the leftmost neurons, which both sides can compute from the start."""
        return strongest(self._leftmost, ratio)

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """Return an importance that falls from the leftmost neuron to the rightmost."""
        return self._leftmost

    @property
    def _leftmost(self) -> list[Scores]:
        return [-np.arange(neurons, dtype=np.float64) for neurons in self.spec.groups]
