"""Rules for operators that read entries at given indices, or add to them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.export.builder import Builder, NoForm, Value, broadcast, product
from fleetune.coordinator.export.operators.elementwise import apply, arithmetic
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape, Size


def _embedding(
    build: Builder,
    out: Operation,
    weight: Value,
    numbers: Value,
    padding_idx: int = -1,
    scale: bool = False,
    sparse: bool = False,
) -> Value:
    if scale:
        raise NoForm("scale_grad_by_freq is not supported")
    return build.emit("Gather", (weight, build.whole(numbers)), out.shape, axis=0)


def _embedding_backward(
    build: Builder,
    out: Operation,
    gradient: Value,
    numbers: Value,
    num_weights: int,
    padding_idx: int,
    scale: bool,
) -> Value:
    if scale:
        raise NoForm("scale_grad_by_freq is not supported")
    if padding_idx >= 0:
        real = apply(build, "Equal", [numbers, build.number(padding_idx, "i8")], numbers.shape, "?")
        not_padding = build.cast(apply(build, "Not", [real], numbers.shape, "?"), "f4")
        column = build.reshape(not_padding, (*numbers.shape, 1))
        gradient = arithmetic(build, "Mul", gradient, column, gradient.shape)
    return add_rows(build, out.shape, numbers, gradient)


def add_rows(build: Builder, shape: Shape, numbers: Value, rows: Value) -> Value:
    """Return zeros of the given shape, with each row added at its index."""
    count = product(numbers.shape)
    zeros = build.emit("ConstantOfShape", (build.sizes(shape),), shape)
    places = build.reshape(numbers, (count, 1))
    updates = build.reshape(rows, (count, *shape[1:]))
    return build.emit("ScatterND", (zeros, places, updates), shape, reduction="add")


def _index_select(build: Builder, out: Operation, x: Value, dim: int, numbers: Value) -> Value:
    return build.emit(
        "Gather", (build.whole(x), build.whole(numbers)), out.shape, type_=x.type, axis=dim % len(x.shape)
    )


def _index(build: Builder, out: Operation, x: Value, indices: Sequence[Value | None]) -> Value:
    x, axis, numbers = _as_one_axis(build, x, indices)
    return build.emit("Gather", (build.whole(x), build.whole(numbers)), out.shape, type_=x.type, axis=axis)


def _index_put(
    build: Builder,
    out: Operation,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    *_: object,
) -> Value:
    if x.number != 0 or not accumulate:
        raise NoForm("it writes at indices that are computed")
    x, axis, numbers = _as_one_axis(build, x, indices)
    shape = x.shape
    if axis == 0:
        return build.reshape(add_rows(build, shape, numbers, values), out.shape)
    order = [axis, *(one for one in range(len(shape)) if one != axis)]
    many = len(numbers.shape)
    moved = [
        *range(axis, axis + many),
        *(one for one in range(len(values.shape)) if not axis <= one < axis + many),
    ]
    turned = tuple(shape[one] for one in order)
    found = add_rows(build, turned, numbers, build.transpose(build.whole(values), moved))
    return build.reshape(build.transpose(found, [order.index(one) for one in range(len(order))]), out.shape)


def _as_one_axis(build: Builder, x: Value, indices: Sequence[Value | None]) -> tuple[Value, int, Value]:
    """Return the array with its indexed axes joined to one, that axis, and the indices along it.

    Raises:
        NoForm: the indices are masks, or their axes are not neighbours.
    """
    given = [(axis, value) for axis, value in enumerate(indices) if value is not None]
    axes = [axis for axis, _ in given]
    if any(value.type != "i8" for _, value in given) or axes != list(range(axes[0], axes[0] + len(axes))):
        raise NoForm("it indexes by a mask, or several axes that are not neighbours")
    first, numbers = given[0]
    if len(given) == 1:
        return x, first, numbers
    joined = _positive(build, numbers, x.shape[first])
    for axis, value in given[1:]:
        size, shape = x.shape[axis], broadcast([joined.shape, value.shape])
        if isinstance(size, Open):
            raise NoForm("it indexes by a mask, or several axes that are not neighbours")
        rows = arithmetic(build, "Mul", joined, build.number(size, "i8"), joined.shape)
        joined = arithmetic(build, "Add", rows, _positive(build, value, size), shape)
    shape = (*x.shape[:first], product([x.shape[axis] for axis in axes]), *x.shape[axes[-1] + 1 :])
    return build.reshape(x, shape), first, joined


def _positive(build: Builder, numbers: Value, size: Size) -> Value:
    """Return indices where those below 0 count from the end."""
    if isinstance(size, Open):  # of samples, which are counted from the first
        return numbers
    negative = apply(build, "Less", [numbers, build.number(0, "i8")], numbers.shape, "?")
    ended = arithmetic(build, "Add", numbers, build.number(size, "i8"), numbers.shape)
    return apply(build, "Where", [negative, ended, numbers], numbers.shape, "i8")


def _index_add(
    build: Builder, out: Operation, x: Value, dim: int, numbers: Value, values: Value, **_: object
) -> Value:
    """Return x with rows added at given indices, the gradient of `index_select`."""
    axis = dim % len(out.shape)
    added = _index_put(build, out, build.number(0, "f4", out.shape), (*[None] * axis, numbers), values, True)
    return arithmetic(build, "Add", x, added, out.shape)


def _unfold(build: Builder, out: Operation, x: Value, dim: int, size: int, step: int) -> Value:
    """Return the windows along an axis; the places in a window are the last axis."""
    rank = len(x.shape)
    axis = dim % rank
    numbers = build.constant(_windows(x.shape[axis], size, step))
    shape = (*x.shape[:axis], *numbers.shape, *x.shape[axis + 1 :])
    found = build.emit("Gather", (build.whole(x), numbers), shape, type_=x.type, axis=axis)
    return build.transpose(found, [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


def _unfold_backward(
    build: Builder, out: Operation, gradient: Value, sizes: object, dim: int, size: int, step: int
) -> Value:
    rank = len(out.shape)
    axis = dim % rank
    numbers = build.constant(_windows(out.shape[axis], size, step))
    values = build.transpose(build.whole(gradient), [*range(axis + 1), rank, *range(axis + 1, rank)])
    return _index_put(build, out, build.number(0, "f4", out.shape), (*[None] * axis, numbers), values, True)


def _windows(length: Size, size: int, step: int) -> NDArray[np.int64]:
    if isinstance(length, Open):
        raise NoForm("its windows run over the batch axis")
    return np.arange(0, length - size + 1, step)[:, None] + np.arange(size)


def _gather(
    build: Builder, out: Operation, x: Value, dim: int, numbers: Value, sparse: bool = False
) -> Value:
    return build.emit(
        "GatherElements",
        (build.whole(x), build.whole(numbers)),
        out.shape,
        type_=x.type,
        axis=dim % len(x.shape),
    )


def _scatter(
    build: Builder, out: Operation, x: Value, dim: int, numbers: Value, values: Any, *, add: bool = False
) -> Value:
    if not isinstance(values, Value):
        values = build.number(values, x.type, numbers.shape)
    about = {"reduction": "add"} if add else {}
    return build.emit(
        "ScatterElements",
        (build.whole(x), build.whole(numbers), build.whole(values)),
        out.shape,
        type_=x.type,
        axis=dim % len(out.shape),
        **about,  # type: ignore[arg-type]
    )


def _scatter_add(build: Builder, out: Operation, x: Value, dim: int, numbers: Value, values: Value) -> Value:
    return _scatter(build, out, x, dim, numbers, values, add=True)


RULES: dict[str, Callable[..., Any]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "index_add": _index_add,
    "index": _index,
    "_unsafe_index": _index,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "unfold": _unfold,
    "unfold_backward": _unfold_backward,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
}
