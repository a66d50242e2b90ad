"""PruneFL (Jiang et al., TNNLS 2022) as FedSPU compares with it: prune the neurons of the least gradients.

FedSPU's section 5.1: the importance of a neuron is the l2 norm of its gradient, here of the mean training
loss at the first received model. See `protocols.method.submodels`. The authors' code takes one batch's
gradient on a newly initialised network. PruneFL's own paper prunes single weights with one mask for all
devices, by the devices' summed squared gradients divided by the time that a weight takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fleetune.protocols.method.submodels import Scores, SubModels, norms
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class PruneFL(SubModels):
    """The method PruneFL, which has no settings."""

    leak: ClassVar[str | None] = "a device chooses by its data which neurons it sends"

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """Return the l2 norm of the gradient at each neuron's parameters."""
        return norms(trainer.gradient(weights), self.spec, order=2)
