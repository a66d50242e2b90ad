"""Finds the parameters of weight norm, in which zeros are not allowed everywhere.

Weight norm (Salimans and Kingma 2016) computes a weight as w = g v / ||v||, row by row. A row of v that is 0
has no direction, and w becomes 0 / 0. A length g of 0 switches the row off.
"""

from collections.abc import Iterator

from fleetune.protocols.model.spec import ModelSpec, TensorSpec

# ends of the names of v and g, as in torch
_ENDS = (("weight_v", "weight_g"), ("parametrizations.weight.original1", "parametrizations.weight.original0"))


def directions(spec: ModelSpec) -> Iterator[tuple[TensorSpec, int]]:
    """Yield each direction v of a model, and the axis of its rows: at each position it has a length in g."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    for tensor in spec.tensors:
        lengths = shapes.get(_name_of_lengths(tensor.name), ())
        axes = [axis for axis, size in enumerate(lengths) if size > 1]
        if len(lengths) == len(tensor.shape) and len(axes) == 1:
            yield tensor, axes[0]


def _name_of_lengths(name: str) -> str:
    return next((name.removesuffix(v) + g for v, g in _ENDS if name.endswith(v)), "")
