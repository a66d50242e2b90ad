"""FedSPU's reading of FedMP (Jiang et al., ICDE 2022): neurons of the least l1 norm are pruned.

FedSPU's section 5.1: a device gets the whole model, trains it once over its data to find out which neurons
matter to it, and from then on has the sub-model of the others. See `protocols.method.submodels`.

"One iteration" of that training is an epoch here; the authors' code takes one batch on a newly initialised
network, which knows nothing of the fleet's. FedMP's own paper prunes at the coordinator, every round, at a
ratio that a bandit chooses by the devices' speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fleetune.protocols.method.submodels import Scores, SubModels, norms
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class FedMP(SubModels):
    """FedMP has no settings."""

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """The l1 norm of a neuron's parameters after an epoch of training."""
        return norms(trainer.fit(weights, FitPlan(epochs=1), key).weights, self.spec, order=1)
