"""Rules for operators that combine entries along axes: sums, maxima, softmax."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fleetune.coordinator.export.builder import Builder, NoForm, Value, product
from fleetune.coordinator.export.operators.elementwise import apply, arithmetic, build_type
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape, Size


def total(build: Builder, x: Value, axes: Sequence[int], *, keep: bool, mean: bool = False) -> Value:
    """Return the sum or mean over the axes."""
    axes = sorted({axis % len(x.shape) for axis in axes})
    with_axes = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    shape = with_axes if keep else tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    if not axes:
        return x
    if x.number is not None:
        if mean:
            return build.number(x.number, x.type, shape)
        count = build.cast(build.scalar(product([x.shape[axis] for axis in axes])), x.type)
        return arithmetic(build, "Mul", build.number(x.number, x.type), count, shape)
    if build.is_turned(x):
        inner = [{0: 1, 1: 0}.get(axis, axis) for axis in axes]
        found = build.samples_first(total(build, build.channels_first(x), inner, keep=True, mean=mean))
        return found if keep else build.reshape(found, shape)
    x = build.aligned(x)
    real = [axis for axis in axes if x.held[axis] == x.shape[axis] and x.shape[axis] != 1]
    repeated = [x.shape[axis] for axis in axes if axis not in real]
    held = tuple(1 if axis in real else size for axis, size in enumerate(x.held))
    found = x
    if real and mean:
        found = build.emit("ReduceMean", (x,), with_axes, held=held, axes=tuple(real), keepdims=1)
    elif real:
        where = build.constant(np.array(real, dtype=np.int64))
        found = build.emit("ReduceSum", (x, where), with_axes, type_=x.type, held=held, keepdims=1)
    if not mean:
        factor = build.cast(build.scalar(product(repeated)), x.type)
        found = arithmetic(build, "Mul", found, factor, with_axes)
    if keep:
        return Value(found.name, found.type, with_axes, held, found.number)
    left = tuple(size for axis, size in enumerate(held) if axis not in axes)
    flat = build.reshape(Value(found.name, found.type, held, held, found.number), left)
    return Value(flat.name, flat.type, shape, left, flat.number)


def _sum(
    build: Builder,
    out: Operation,
    x: Value,
    dim: Any = None,
    keepdim: bool = False,
    *,
    mean: bool = False,
    dtype: object = None,
) -> Value:
    axes = _axes(x.shape, dim)
    return total(build, build.cast(x, build_type(out)), axes, keep=keepdim, mean=mean)


def _variance(
    build: Builder,
    out: Operation,
    x: Value,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    root: bool,
) -> Value:
    axes = _axes(x.shape, dim)
    away = arithmetic(build, "Sub", x, total(build, x, axes, keep=True, mean=True), x.shape)
    squares = total(build, arithmetic(build, "Mul", away, away, x.shape), axes, keep=keepdim)
    count = product([x.shape[axis] for axis in axes])
    less = 1 if correction is None else int(correction)
    free = replace(count, plus=count.plus - less) if isinstance(count, Open) else count - less
    found = arithmetic(build, "Div", squares, build.scalar(free), out.shape)
    return apply(build, "Sqrt", [found], out.shape) if root else found


def _axes(shape: Shape, dim: Any) -> list[int]:
    if dim is None or dim == ():
        return list(range(len(shape)))
    return [axis % len(shape) for axis in (dim if isinstance(dim, tuple) else (dim,))]


def _extreme(
    build: Builder, out: Operation, x: Value, dim: Any = (), keepdim: bool = False, *, op: str
) -> Any:
    axes = _axes(x.shape, dim)
    found = build.emit(
        op, (build.whole(x),), out.shape, type_=x.type, axes=tuple(axes), keepdims=int(keepdim)
    )
    if len(out.shapes) == 1:
        return found
    return found, _arg_extreme(build, x, axes[0], keepdim, op, out.shape)


def _arg_extreme(build: Builder, x: Value, axis: int, keep: bool, op: str, shape: Shape) -> Value:
    full = build.whole(x)
    if op == "ReduceMin":
        full = apply(build, "Neg", [full], x.shape, x.type)
    return build.emit("ArgMax", (full,), shape, type_="i8", axis=axis, keepdims=int(keep))


def _argmax(build: Builder, out: Operation, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        raise NoForm("it reduces all axes at once")
    return _arg_extreme(build, x, dim % len(x.shape), keepdim, "ReduceMax", out.shape)


def _either_extreme(build: Builder, out: Operation, x: Value, *args: Any, op: str) -> Any:
    """Return `max` or `min` of one array along an axis, or of two arrays entry by entry."""
    if args and isinstance(args[0], Value):
        return apply(build, op.removeprefix("Reduce"), [x, args[0]], out.shape, x.type)
    return _extreme(build, out, x, *args, op=op)


def _softmax(build: Builder, out: Operation, x: Value, dim: int, half: object = None, *, op: str) -> Value:
    return build.emit(op, (build.whole(x),), out.shape, axis=dim % len(x.shape))


def _softmax_backward(
    build: Builder, out: Operation, gradient: Value, result: Value, dim: int, dtype: object
) -> Value:
    weighted = arithmetic(build, "Mul", gradient, result, out.shape)
    mean = total(build, weighted, [dim], keep=True)
    away = arithmetic(build, "Sub", gradient, mean, out.shape)
    return arithmetic(build, "Mul", away, result, out.shape)


def _log_softmax_backward(
    build: Builder, out: Operation, gradient: Value, result: Value, dim: int, dtype: object
) -> Value:
    chances = apply(build, "Exp", [result], out.shape)
    share = arithmetic(build, "Mul", chances, total(build, gradient, [dim], keep=True), out.shape)
    return arithmetic(build, "Sub", gradient, share, out.shape)


def _any(build: Builder, out: Operation, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(build, out, x, dim, keepdim, "ReduceMax")


def _all(build: Builder, out: Operation, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(build, out, x, dim, keepdim, "ReduceMin")


def _truth(build: Builder, out: Operation, x: Value, dim: Any, keep: bool, op: str) -> Value:
    """Return the maximum or minimum of truth values over axes."""
    axes = tuple(_axes(x.shape, dim))
    truth = build.cast(x, "?")
    if not axes:
        return truth
    numbers = build.whole(build.cast(truth, "f4"))
    return build.cast(build.emit(op, (numbers,), out.shape, axes=axes, keepdims=int(keep)), "?")


def _top(
    build: Builder,
    out: Operation,
    x: Value,
    k: Size,
    dim: int = -1,
    largest: bool = True,
    sorted: object = None,  # noqa: A002
) -> tuple[Value, Value]:
    """Return the k largest or smallest entries along an axis, in order, and their positions."""
    axis = dim % len(x.shape)
    if isinstance(x.shape[axis], Open) or isinstance(k, Open):
        raise NoForm("it sorts the batch axis")
    count = build.constant(np.array([k], dtype=np.int64))
    names = build.emit_several("TopK", (build.whole(x), count), 2, axis=axis, largest=int(largest))
    values, places = (
        build.known(Value(name, type_, out.shape, out.shape))
        for name, type_ in zip(names, (x.type, "i8"), strict=True)
    )
    return values, places


def _sort(
    build: Builder,
    out: Operation,
    x: Value,
    dim: int = -1,
    descending: bool = False,
    *,
    stable: object = None,
) -> tuple[Value, Value]:
    return _top(build, out, x, x.shape[dim], dim, descending)


def _cumulative_sum(build: Builder, out: Operation, x: Value, dim: int, **_: object) -> Value:
    axis, x = build.constant(np.array(dim % len(x.shape), dtype=np.int64)), build.cast(x, build_type(out))
    return build.emit("CumSum", (build.whole(x), axis), out.shape, type_=x.type)


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": partial(_sum, mean=True),
    "amax": partial(_extreme, op="ReduceMax"),
    "amin": partial(_extreme, op="ReduceMin"),
    "max": partial(_either_extreme, op="ReduceMax"),
    "min": partial(_either_extreme, op="ReduceMin"),
    "argmax": _argmax,
    "var": partial(_variance, root=False),
    "std": partial(_variance, root=True),
    "_safe_softmax": partial(_softmax, op="Softmax"),
    "_softmax": partial(_softmax, op="Softmax"),
    "_log_softmax": partial(_softmax, op="LogSoftmax"),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "cumsum": _cumulative_sum,
    "any": _any,
    "all": _all,
    "topk": _top,
    "sort": _sort,
}
