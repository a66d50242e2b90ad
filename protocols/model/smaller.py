"""The same network with fewer neurons, as a description: what a sub-model of zeros outside some neurons is.

Where every entry outside some neurons is 0 and stays so, nothing flows through the others, and the network
that only has these computes the same. That does not hold where channels are normalised together (LayerNorm),
and is not told where an axis has a part of a group's neurons, or the model has a frozen part.
"""

from collections.abc import Sequence
from dataclasses import replace

from fleetune.protocols.model.compute_cost import step_products
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Axis, ModelSpec, Span, TensorSpec

# What a step takes beside its multiplications (calls, and passes over activations), in multiplications for
# each output of a layer: by the times of smaller networks in docs/ratios.md. It does not become less.
_PRODUCTS_PER_OUTPUT = 300


def smaller_spec(spec: ModelSpec, counts: Sequence[int]) -> ModelSpec | None:
    """`spec` with `counts` neurons in its groups, each at least 1; None: that would be another function."""
    if not has_smaller(spec) or len(counts) != len(spec.groups) or min(counts, default=1) < 1:
        return None
    tensors = tuple(_tensor(tensor, counts) for tensor in spec.tensors)
    return replace(spec, tensors=tensors, groups=tuple(counts))


def has_smaller(spec: ModelSpec) -> bool:
    """Whether a network of fewer neurons is described by it."""
    followed = {tensor.layer for tensor in spec.tensors if tensor.kind == "stat"}
    together = any(tensor.kind == "norm" and tensor.layer not in followed for tensor in spec.tensors)
    spans = (span for tensor in spec.tensors for axis in tensor.axes for span in axis)
    whole = all(span.group == ALWAYS_ACTIVE or _is_whole(span, spec) for span in spans)
    return bool(spec.groups) and whole and not together and not spec.frozen


def smaller_work(spec: ModelSpec, smaller: ModelSpec) -> float:
    """The work of a step of the smaller network, relative to one of the whole; 1: it is not known."""
    products = step_products(spec)
    if not products:
        return 1.0
    outputs = sum(tensor.shape[0] * tensor.uses for tensor in spec.tensors if tensor.uses)
    constant = _PRODUCTS_PER_OUTPUT * outputs
    return (step_products(smaller) + constant) / (products + constant)


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
