"""The optimisers by name: one file and one line here for each."""

from fleetune.edge_agent.training.optimisers.adamw import AdamW
from fleetune.edge_agent.training.optimisers.optimiser import Optimiser
from fleetune.edge_agent.training.optimisers.rmsprop import RMSprop
from fleetune.edge_agent.training.optimisers.sgd import SGD
from fleetune.protocols.settings.device import TrainingSection

REGISTRY: dict[str, type[Optimiser]] = {
    "sgd": SGD,
    "adamw": AdamW,
    "rmsprop": RMSprop,
}


def optimiser_of(settings: TrainingSection) -> Optimiser:
    """Return the optimiser that a [training] section names, with the settings of that section."""
    return REGISTRY[settings.optimiser](settings)
