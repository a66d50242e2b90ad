"""The groups of a model's layers: head, body, and normalisation."""

from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.selection import Layers


def norm_layers(spec: ModelSpec) -> frozenset[str]:
    """The names of the layers that only normalise."""
    return frozenset(tensor.layer for tensor in spec.tensors if tensor.kind == "norm")


def split_at_head(spec: ModelSpec, count: int) -> tuple[Layers, Layers]:
    """The layers of the body and of the head. The head is the last `count` layers with weights and their
    norm layers.

    Raises:
        SettingError: the body would have no layer with weights.
    """
    names, norms = tuple(spec.layers), norm_layers(spec)
    weighted = [name for name in names if name not in norms]
    if len(weighted) == 1:
        raise SettingError(
            f"method: it parts a model's head from its body, and of model {spec.name!r} one layer with"
            f" weights trains, {weighted[0]!r}; let more train (model.trainable), or take another method"
        )
    if count >= len(weighted):
        raise SettingError(
            f"method: {count} layers apart leave nothing of the {len(weighted)} with weights in model"
            f" {spec.name!r}; set at most {len(weighted) - 1}"
        )
    start = names.index(weighted[-count])
    return Layers(names[:start]), Layers(names[start:])
