"""Warns when a method that sends some neurons of a model finds few that it could leave out."""

from collections.abc import Mapping
from typing import Any

from fleetune.protocols.methods import selects_neurons
from fleetune.protocols.model.spec import ModelSpec

LEAST_SHARE = 0.2  # of the parameters


def few_groups_line(method: Mapping[str, Any], spec: ModelSpec) -> str | None:
    """Return a warning if little of the model is in groups of neurons, and the method needs them; else None.

    Args:
        method: the section [method].
        spec: the run's model.
    """
    share = spec.share_in_groups
    if share >= LEAST_SHARE or not selects_neurons(method):
        return None
    return (
        f"only {share:.0%} of the parameters of model {spec.name} belong to neurons that {method['name']} can"
        " leave out, so it sends almost as much as fedavg; choose another method, or layers whose neurons"
        " Fleetune finds (docs/your-model.md)"
    )
