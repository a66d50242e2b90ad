"""Describes the same network with fewer neurons, as a spec.

If all weights of some neurons are 0 and stay 0, the network without these neurons computes the same function.
That does not hold if channels are normalised together (LayerNorm). Not supported either:

- a backbone
- weight norm, whose rows cannot be 0
- gates of recurrent layers and attention heads, of which no trainer can leave out some
- an axis that has only some neurons of a group (neurons that are removed together).
"""

from collections.abc import Sequence
from dataclasses import replace

from fleetune.protocols.model.compute_cost import step_products
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Axis, ModelSpec, Span, TensorSpec
from fleetune.protocols.model.weight_norm import directions

# Cost of a step besides its multiplications (calls, passes over activations), as multiplications per output
# of a layer; fitted to the times of smaller networks in docs/ratios.md. It does not shrink with the network.
_PRODUCTS_PER_OUTPUT = 300


def smaller_spec(spec: ModelSpec, counts: Sequence[int]) -> ModelSpec | None:
    """Return `spec` with `counts` neurons in its groups, each at least 1.

    The result is None if the smaller network would compute another function.
    """
    if not has_smaller(spec) or len(counts) != len(spec.groups) or min(counts, default=1) < 1:
        return None
    tensors = tuple(_tensor(tensor, counts) for tensor in spec.tensors)
    return replace(spec, tensors=tensors, groups=tuple(counts))


def has_smaller(spec: ModelSpec) -> bool:
    """True if `smaller_spec` can describe the network with fewer neurons."""
    followed = {tensor.layer for tensor in spec.tensors if tensor.kind == "stat"}
    together = any(tensor.kind == "norm" and tensor.layer not in followed for tensor in spec.tensors)
    spans = (span for tensor in spec.tensors for axis in tensor.axes for span in axis)
    whole = all(span.group == ALWAYS_ACTIVE or _is_whole(span, spec) for span in spans)
    apart = any(map(_has_gates, spec.tensors)) or any(directions(spec))
    return bool(spec.groups) and whole and not (together or apart or spec.frozen)


def smaller_work(spec: ModelSpec, smaller: ModelSpec) -> float:
    """Return the work of a step of the smaller network, relative to a step of the whole; 1 if unknown."""
    products = step_products(spec)
    if not products:
        return 1.0
    outputs = sum(tensor.shape[0] * tensor.uses for tensor in spec.tensors if tensor.uses)
    constant = _PRODUCTS_PER_OUTPUT * outputs
    return (step_products(smaller) + constant) / (products + constant)


def _has_gates(tensor: TensorSpec) -> bool:
    """True for a recurrent weight, and for a matrix in which a neuron has several rows, as a head has."""
    if len(tensor.shape) != 2:
        return False
    if tensor.name.rpartition(".")[2].startswith("weight_hh"):  # as torch calls it
        return True
    spans = [span for span in tensor.axes[0] if span.group != ALWAYS_ACTIVE]
    return len({span.group for span in spans}) < len(spans) or any(span.repeat > 1 for span in spans)


def _is_whole(span: Span, spec: ModelSpec) -> bool:
    return span.start == 0 and span.count == spec.groups[span.group]


def _tensor(tensor: TensorSpec, counts: Sequence[int]) -> TensorSpec:
    axes = tuple(tuple(_span(span, counts) for span in axis) for axis in tensor.axes)
    shape = tuple(_length(axis, size) for axis, size in zip(axes, tensor.shape, strict=True))
    return replace(tensor, axes=axes, shape=shape)


def _span(span: Span, counts: Sequence[int]) -> Span:
    return span if span.group == ALWAYS_ACTIVE else replace(span, count=counts[span.group])


def _length(axis: Axis, size: int) -> int:
    return sum(span.count * span.repeat for span in axis) if axis else size
