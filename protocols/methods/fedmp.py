"""FedMP (Jiang et al., ICDE 2022) as FedSPU compares with it: prune the neurons of the least l1 norm.

FedSPU's section 5.1: a device gets the whole model and trains it for one epoch to find the neurons that
matter to it. From then on it has the sub-model of these. See `protocols.method.submodels`.

Differs from the authors' code of FedSPU: "one iteration" of that training is an epoch here. The code takes
one batch on a newly initialised network, which has learned nothing from the fleet. FedMP's own paper prunes
at the coordinator in every round; a bandit chooses the ratio by the devices' speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fleetune.protocols.method.submodels import Scores, SubModels, norms
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class FedMP(SubModels):
    """The method FedMP, which has no settings."""

    leak: ClassVar[str | None] = "a device chooses by its data which neurons it sends"

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """Return the l1 norm of each neuron's parameters after an epoch of training."""
        return norms(trainer.fit(weights, FitPlan(epochs=1), key).weights, self.spec, order=1)
