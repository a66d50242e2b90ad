"""Carries layers over to a new version of a model: layers with the same name and shapes keep their weights.

A layer is carried whole or not at all: all its tensors, running statistics included, must have the same names
and shapes in both versions. Other layers start as if there were no old version. The rule holds for the shared
model and for a device's own (docs/open-runs.md). It compares names and shapes only, so rename a layer whose
meaning changes. Models with a backbone keep layers only if both have the same backbone.
"""

from dataclasses import dataclass

from fleetune.protocols.model.spec import FlatArray, ModelSpec


@dataclass(frozen=True)
class Carried:
    """A model's new weights, and which layers came from the old version.

    Attributes:
        weights: flat weights, shape (size of the new model,).
        layers, new: layers of the new model that were taken over, and that were not.
        gone: layers that only the old model had.
        num_carried, num_values: number of values taken over, and of all values.
    """

    weights: FlatArray
    layers: tuple[str, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    num_carried: int
    num_values: int

    @property
    def words(self) -> str:
        """Return a one-line summary for people."""
        layers = f"{len(self.layers)} of {len(self.layers) + len(self.new)} layers"
        line = f"{layers} keep their weights ({self.num_carried:,} of {self.num_values:,} values)"
        line += f"; begins anew: {', '.join(self.new)}" if self.new else ""
        return line + (f"; no longer there: {', '.join(self.gone)}" if self.gone else "")


def carry_over(before: ModelSpec, weights: FlatArray, after: ModelSpec, fresh: FlatArray) -> Carried:
    """Return the new model's weights, with the layers that both models have taken from the old model.

    Args:
        before: the old model.
        weights: its weights, shape (before.size,).
        after: the new model.
        fresh: initial weights of the new model, shape (after.size,).
    """
    old, new = _layers(before), _layers(after)
    same = before.backbone == after.backbone  # on another backbone the same layer has another meaning
    carried = tuple(layer for layer, tensors in new.items() if same and old.get(layer) == tensors)
    found, num_carried = fresh.copy(), 0
    for tensor in after.tensors:
        if tensor.layer in carried:
            found[after.slices[tensor.name]] = weights[before.slices[tensor.name]]
            num_carried += tensor.size
    anew = tuple(layer for layer in new if layer not in carried)
    gone = tuple(layer for layer in old if layer not in new)
    return Carried(found, carried, anew, gone, num_carried, after.size)


def _layers(spec: ModelSpec) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each layer's tensors by name, with layers in module order."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in spec.tensors:
        found.setdefault(tensor.layer, {})[tensor.name] = tensor.shape
    return found
