"""Hermes (Li et al., MobiCom 2021) as FedSPU compares with it: prune the neurons of the least l2 norm.

FedSPU's section 5.1. One epoch of training stands for the "one iteration" that shows which neurons matter
(see `fedmp.py` and `protocols.method.submodels`). Hermes's own paper prunes step by step. It removes a share
of the channels whenever the device's validation accuracy is high enough, until the sub-model has its target
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fleetune.protocols.method.submodels import Scores, SubModels, norms
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


@dataclass(frozen=True)
class Hermes(SubModels):
    """The method Hermes, which has no settings."""

    leak: ClassVar[str | None] = "a device chooses by its data which neurons it sends"

    def importance(self, weights: FlatArray, trainer: Trainer, key: Key) -> Sequence[Scores]:
        """Return the l2 norm of each neuron's parameters after an epoch of training."""
        return norms(trainer.fit(weights, FitPlan(epochs=1), key).weights, self.spec, order=2)
