"""What a new version of a model keeps of the one before it: layers of the same name and the same shapes.

A layer is kept in whole or not at all: all its tensors, running statistics among them, have the same names
and shapes in both. What else the new model has begins as it would without the old one. The rule is the same
for a shared model and for a device's own (docs/open-runs.md); it looks at names and shapes alone, so that a
layer which means something else now wants another name. Of models that are frozen in part nothing is kept
unless it is the same part, with the same values.
"""

from dataclasses import dataclass

from fleetune.protocols.model.spec import FlatArray, ModelSpec


@dataclass(frozen=True)
class Carried:
    """A model's weights after it took over what it could.

    Attributes:
        weights: shape (size of the new model,).
        kept, new: layers of the new model.
        gone: layers that only the old model had.
        num_kept, num_values: values that were kept, of how many.
    """

    weights: FlatArray
    kept: tuple[str, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    num_kept: int
    num_values: int

    @property
    def words(self) -> str:
        """For people, in one line."""
        layers = f"{len(self.kept)} of {len(self.kept) + len(self.new)} layers"
        line = f"{layers} keep their weights ({self.num_kept:,} of {self.num_values:,} values)"
        line += f"; begins anew: {', '.join(self.new)}" if self.new else ""
        return line + (f"; no longer there: {', '.join(self.gone)}" if self.gone else "")


def carry_over(before: ModelSpec, weights: FlatArray, after: ModelSpec, fresh: FlatArray) -> Carried:
    """Give a model what it can keep of the one before it.

    Args:
        before: the old model.
        weights: its weights, shape (before.size,).
        after: the new model.
        fresh: what it begins with otherwise, shape (after.size,).
    """
    old, new = _layers(before), _layers(after)
    same = before.backbone == after.backbone  # on another one the same layer means something else
    kept = tuple(layer for layer, tensors in new.items() if same and old.get(layer) == tensors)
    found, num_kept = fresh.copy(), 0
    for tensor in after.tensors:
        if tensor.layer in kept:
            found[after.slices[tensor.name]] = weights[before.slices[tensor.name]]
            num_kept += tensor.size
    anew = tuple(layer for layer in new if layer not in kept)
    gone = tuple(layer for layer in old if layer not in new)
    return Carried(found, kept, anew, gone, num_kept, after.size)


def _layers(spec: ModelSpec) -> dict[str, dict[str, tuple[int, ...]]]:
    """By layer, in module order, the shapes of its tensors by name."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in spec.tensors:
        found.setdefault(tensor.layer, {})[tensor.name] = tensor.shape
    return found
