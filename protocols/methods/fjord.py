"""FedSPU's reading of FjORD (Horvath et al., NeurIPS 2021): the rightmost neurons are cut.

Ordered dropout (section 3.1): a device of ratio p has of every layer the first neurons, so that smaller
sub-models are nested in larger ones and the neurons on the left are everybody's. See
`protocols.method.submodels`.

FjORD's own paper besides draws, for each batch, a width up to p, and may distil the full width into it
(algorithm 1); FedSPU's section 5.1 and its authors' code train at p. It keeps ceil(p * n) neurons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.method.submodels import Scores, SubModels, strongest
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import ChosenNeurons


@dataclass(frozen=True)
class FjORD(SubModels):
    """FjORD has no settings."""

    def first_selection(self, ratio: float) -> ChosenNeurons:
        """The leftmost neurons: both sides know them from the start."""
        return strongest(self._leftmost, ratio)

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """The further left a neuron stands, the more it matters."""
        return self._leftmost

    @property
    def _leftmost(self) -> list[Scores]:
        return [-np.arange(neurons, dtype=np.float64) for neurons in self.spec.groups]
