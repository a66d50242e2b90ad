"""Checks that a model's spec from the wire is consistent, before it is used."""

import math
from collections.abc import Iterator
from itertools import groupby

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Axis, ModelSpec, Span, TensorSpec

MAX_PARAMETERS = 2**33


def check_spec(spec: ModelSpec) -> None:
    """Raise PacketCorrupt unless the spec is consistent.

    Names are unique, statistics come last, layers are contiguous, and every axis is owned by existing
    neurons.
    """
    for problem in _problems(spec):
        raise PacketCorrupt(f"model {spec.name!r}: {problem}")


def _problems(spec: ModelSpec) -> Iterator[str]:
    names = [*(tensor.name for tensor in spec.tensors), *(tensor.name for tensor in spec.frozen)]
    if sum(tensor.size for tensor in spec.frozen) > MAX_PARAMETERS:
        yield "the backbone has more entries than allowed"
    if len(set(names)) < len(names):
        yield "a tensor's name occurs twice"
    if not 0 < spec.size <= MAX_PARAMETERS:
        yield f"{spec.size} entries"
    if sum(spec.groups) > spec.size:
        yield f"{sum(spec.groups)} neurons with {spec.size} entries"
    if math.prod(spec.input_shape) > MAX_PARAMETERS or spec.num_classes > MAX_PARAMETERS:
        yield f"samples of shape {spec.input_shape} of {spec.num_classes} classes"
    yield from _interface_problems(spec)
    kinds = [tensor.kind == "stat" for tensor in spec.tensors]
    if kinds != sorted(kinds):
        yield "running statistics precede parameters"
    layers = [tensor.layer for tensor in spec.tensors if tensor.kind != "stat"]
    if len(list(groupby(layers))) > len(set(layers)):
        yield "a layer's tensors are not contiguous"
    for tensor in spec.tensors:
        yield from _tensor_problems(tensor, spec.groups)


def _interface_problems(spec: ModelSpec) -> Iterator[str]:
    names = [one.name for one in spec.reads.inputs]
    if names != sorted(set(names)):
        yield "its inputs are not in the order of their names"
    if names and spec.input_shape != (spec.reads.size,):
        yield f"samples of shape {spec.input_shape} for inputs {spec.reads}"


def _tensor_problems(tensor: TensorSpec, groups: tuple[int, ...]) -> Iterator[str]:
    if len(tensor.axes) != len(tensor.shape):
        yield f"{tensor.name} has {len(tensor.shape)} axes, but {len(tensor.axes)} are described"
    for size, axis in zip(tensor.shape, tensor.axes, strict=False):
        if axis and not (all(_is_there(span, groups) for span in axis) and _length(axis) == size):
            yield f"an axis of {tensor.name} is not fully described by existing neurons"


def _is_there(span: Span, groups: tuple[int, ...]) -> bool:
    if span.group == ALWAYS_ACTIVE:
        return True
    return span.group < len(groups) and span.start + span.count <= groups[span.group]


def _length(axis: Axis) -> int:
    return sum(span.count * span.repeat for span in axis)
