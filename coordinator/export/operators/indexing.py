"""Rules for operators that read entries at given indices, or add to them."""

from collections.abc import Callable, Sequence
from typing import Any

from fleetune.coordinator.export.builder import Builder, NoForm, Value, product
from fleetune.coordinator.export.operators.elementwise import apply, arithmetic
from fleetune.coordinator.export.torch_trace import Operation, Shape


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
    axis, numbers = _only(indices)
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
    axis, numbers = _only(indices)
    if x.number != 0 or not accumulate:
        raise NoForm("it overwrites entries at computed indices")
    if axis == 0:
        return add_rows(build, out.shape, numbers, values)
    order = [axis, *(one for one in range(len(out.shape)) if one != axis)]
    many = len(numbers.shape)
    moved = [
        *range(axis, axis + many),
        *(one for one in range(len(values.shape)) if not axis <= one < axis + many),
    ]
    shape = tuple(out.shape[one] for one in order)
    found = add_rows(build, shape, numbers, build.transpose(build.whole(values), moved))
    return build.transpose(found, [order.index(one) for one in range(len(order))])


def _only(indices: Sequence[Value | None]) -> tuple[int, Value]:
    """Return the one indexed axis and its indices."""
    given = [(axis, value) for axis, value in enumerate(indices) if value is not None]
    if len(given) != 1 or given[0][1].type != "i8":
        raise NoForm("it indexes several axes at once, or by a mask")
    return given[0]


def _index_add(
    build: Builder, out: Operation, x: Value, dim: int, numbers: Value, values: Value, **_: object
) -> Value:
    """Return x with rows added at given indices, the gradient of `index_select`."""
    axis = dim % len(out.shape)
    added = _index_put(build, out, build.number(0, "f4", out.shape), (*[None] * axis, numbers), values, True)
    return arithmetic(build, "Add", x, added, out.shape)


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
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
}
