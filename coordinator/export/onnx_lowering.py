"""Lowers a trace of torch operations to a graph of standard ONNX operators."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetune.coordinator.export.builder import Builder, NoForm, Value, type_of
from fleetune.coordinator.export.operators import (
    convolution,
    data_movement,
    elementwise,
    image_maps,
    indexing,
    matrix_products,
    max_pooling,
    reductions,
)
from fleetune.coordinator.export.recorder import Ref, refs
from fleetune.coordinator.export.recurrence import STEPS
from fleetune.coordinator.export.torch_trace import Open, Operation, Trace, trace
from fleetune.protocols.bundle.graph import Body, Graph
from fleetune.protocols.errors import ModelError
from fleetune.protocols.user_code import as_line


def _scan(
    build: Builder,
    out: Operation,
    step: str,
    states: Sequence[Value],
    scanned: Sequence[Value],
    fixed: Sequence[Value],
    reverse: bool,
) -> tuple[Value, ...]:
    """Return the results of a loop, see `recurrence`."""
    arrays = [build.whole(one) for one in (*states, *scanned, *fixed)]
    entries = (
        [one.shape for one in states] + [one.shape[1:] for one in scanned] + [one.shape for one in fixed]
    )
    if len({size for shape in entries for size in shape if isinstance(size, Open)}) > 1:
        raise NoForm("its states have several sizes that depend on the batch size")
    counts = len(states), len(scanned)
    shapes = tuple(tuple(None if isinstance(size, Open) else size for size in shape) for shape in entries)
    graph = _step(step, counts, shapes)
    given = [port.name for port in graph.inputs] + [constant.name for constant in graph.constants]
    body = Body(tuple(given), graph.output_names, graph.nodes)
    arrays += [build.constant(constant.value) for constant in graph.constants]
    names = build.emit_several(
        "Scan", arrays, len(out.shapes), body, states=counts[0], scanned=counts[1], reverse=int(reverse)
    )
    return tuple(
        build.known(Value(name, "f4", shape, shape)) for name, shape in zip(names, out.shapes, strict=True)
    )


@cache
def _step(name: str, counts: tuple[int, int], shapes: tuple[tuple[int | None, ...], ...]) -> Graph:
    """Return the graph of a loop's step; None in a shape stands for a size that depends on the batch size."""
    states, own = counts[0], sum(counts)

    def inputs(num_samples: int) -> Mapping[str, Mapping[str, Tensor]]:
        sizes = ([num_samples if size is None else size for size in shape] for shape in shapes)
        return {name: {f"input:{index}": torch.zeros(size) for index, size in enumerate(sizes)}}

    def step(given: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        arrays = list(given.values())
        new, found = STEPS[name](arrays[:states], arrays[states:own], arrays[own:])
        return {name: {f"output:{index}": one for index, one in enumerate((*new, *found))}}

    return lower(name, trace(name, nn.Module(), lambda _: step, inputs, RULES)[name])


RULES: dict[str, Callable[..., Any]] = (
    elementwise.RULES
    | data_movement.RULES
    | reductions.RULES
    | matrix_products.RULES
    | convolution.RULES
    | max_pooling.RULES
    | image_maps.RULES
    | indexing.RULES
    | {"scan": _scan}
)


def lower(model: str, trace: Trace, *, plain: bool = False) -> Graph:
    """Lower a trace to a graph.

    Args:
        model: the name of the model, for errors.
        trace: the trace of a step.
        plain: see `Builder`.

    Raises:
        ModelError: an operation has no form in ONNX.
    """
    build = Builder(plain=plain)
    values: dict[str, Any] = {}
    for name, (shape, dtype) in trace.inputs.items():
        values[name] = build.input(name, type_of(dtype), shape)
    for name, tensor in trace.constants.items():
        if not tensor.is_complex():
            values[name] = build.constant(_array(tensor))
    for operation in trace.operations:
        try:
            _refuse_complex(operation, trace.constants)
            values[operation.name] = _result(build, operation, values)
        except NoForm as problem:
            raise ModelError(_refusal(model, operation, str(problem))) from problem
        except Exception as problem:  # a rule met arguments that it does not expect
            raise ModelError(_refusal(model, operation, as_line(problem))) from problem
    return build.graph({name: values[ref.name] for name, ref in trace.outputs.items()})


def _refuse_complex(operation: Operation, constants: Mapping[str, Tensor]) -> None:
    given = [constants[ref.name] for ref in refs((operation.args, operation.kwargs)) if ref.name in constants]
    if any(dtype.is_complex for dtype in (*operation.dtypes, *(one.dtype for one in given))):
        raise NoForm("complex numbers")


def _array(tensor: Tensor) -> Any:
    if tensor.is_floating_point():
        return tensor.float().numpy()
    return tensor.numpy().astype(np.bool_ if tensor.dtype == torch.bool else np.int64)


def _result(build: Builder, operation: Operation, values: dict[str, Any]) -> Any:
    """Return the result of an operation: one value, or a tuple of values."""
    if "getitem" in operation.target:
        ref, index = operation.args
        return values[ref.name][index]
    space, name, _ = operation.target.split(".", 2)
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if space not in ("aten", "fleetune") or rule is None:
        raise NoForm("")
    args, kwargs = _given(operation.args, values), _given(operation.kwargs, values)
    for ignored in ("memory_format", "layout", "device", "pin_memory", "non_blocking", "implicit"):
        kwargs.pop(ignored, None)
    try:
        return rule(build, operation, *args, **kwargs)
    except TypeError as problem:  # the rule does not have this argument
        raise NoForm(str(problem)) from problem


def _given(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, dict):
        return {key: _given(part, values) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_given(part, values) for part in value)
    return value


def _refusal(model: str, operation: Operation, why: str) -> str:
    where = operation.path or "the model itself"
    used = why if why == "complex numbers" else operation.target
    remedy = next((text for names, text in _REMEDIES.items() if re.search(names, used)), "")
    return (
        f"model {model!r} cannot be exported: {where} uses {operation.target}, which has no ONNX form here"
        f"{f' ({why})' if why else ''}; {remedy or _REMEDY}, or let agents with torch train it"
    )


_REMEDY = "wrap the model: replace this module by one without that operator"
_REMEDIES = {
    r"complex numbers": "wrap the model: compute with real numbers, such as cosines and sines",
    r"_scatter\.default": "wrap the model: join parts with torch.cat or torch.stack, do not write into views",
    r"rrelu": "use nn.LeakyReLU or nn.PReLU",
    r"rand|exponential|multinomial|poisson": "wrap the model: draw with torch.rand_like or torch.randn_like",
    r"sort|topk|kthvalue|median|unique": "wrap the model: choose with max or argmax",
    r"fft|stft|as_strided|complex": "wrap the model: compute spectra and windows before, in the data",
    r"index|scatter|gather|nonzero|masked_select": "wrap the model: choose with torch.where or nn.Embedding",
    r"grid_sampler|upsample|interpolate": "wrap the model: resize with mode bilinear or nearest",
    r"arange|flip|slice|select|split": "wrap the model: keep samples apart, in their order",
    r"_to_copy|to\.dtype": "compute in float32 and int64",
    r"linalg|svd|inverse|cholesky": "wrap the model: compute it before, and keep the result as a buffer",
}
