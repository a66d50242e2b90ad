"""Rules for operators that move entries: reshape, slice, concatenate and pad."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fleetune.coordinator.export.builder import Builder, NoForm, Value
from fleetune.coordinator.export.operators.elementwise import apply, build_type
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape, Size

_END = 2**63 - 1


def cut(build: Builder, x: Value, axis: int, start: Size, stop: Size, step: int = 1) -> Value:
    """Return the entries start, start + step, ... below `stop` along one axis."""
    size = x.shape[axis]
    if isinstance(start, Open) or (isinstance(stop, Open) and stop != size):
        raise NoForm("it slices at a position that depends on the batch size")
    whole = isinstance(stop, Open) or stop == size
    if start == 0 and whole and step == 1:
        return x
    if isinstance(size, Open) and (start < 0 or not whole):
        raise NoForm("it slices the batch axis")
    length: Size
    if isinstance(size, Open):
        if step != 1:
            raise NoForm("it slices the batch axis")
        length = Open(size.times, size.plus - start)
    else:
        assert isinstance(stop, int)
        length = len(range(start, stop, step))
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    if x.number is not None:
        return replace(x, shape=shape)
    x = build.aligned(x)
    if x.held[axis] == 1 and size != 1:
        return replace(x, shape=shape)
    end = _END if whole else stop
    bounds = [build.constant(np.array([one], dtype=np.int64)) for one in (start, end, axis, step)]
    held = (*x.held[:axis], length, *x.held[axis + 1 :])
    return build.emit("Slice", (x, *(bounds if step != 1 else bounds[:3])), shape, type_=x.type, held=held)


def pad(build: Builder, x: Value, before: Sequence[int], after: Sequence[int], number: float = 0) -> Value:
    """Return the array with `number` added around it; negative counts cut entries off."""
    for axis, (left, right) in enumerate(zip(before, after, strict=True)):
        size = x.shape[axis]
        if left < 0 or right < 0:
            if isinstance(size, Open):
                raise NoForm("it slices the batch axis")
            x = cut(build, x, axis, max(0, -left), size - max(0, -right))
    before, after = ([max(0, count) for count in counts] for counts in (before, after))
    if not any(before) and not any(after):
        return x
    shape = tuple(
        replace(size, plus=size.plus + left + right) if isinstance(size, Open) else size + left + right
        for size, left, right in zip(x.shape, before, after, strict=True)
    )
    if x.number == number:
        return replace(x, shape=shape)
    x = build.whole(x)
    around = build.constant(np.array([*before, *after], dtype=np.int64))
    fill = () if number == 0 else (build.number(number, x.type),)
    return build.emit("Pad", (x, around, *fill), shape, type_=x.type)


def concat(build: Builder, parts: Sequence[Value], axis: int, shape: Shape) -> Value:
    """Return the parts concatenated along an axis."""
    parts = [build.whole(part) for part in parts if 0 not in part.shape]
    if len(parts) == 1:
        return parts[0]
    return build.emit("Concat", parts, shape, type_=parts[0].type, axis=axis)


def _view(build: Builder, out: Operation, x: Value, *_: object) -> Value:
    return build.reshape(x, out.shape)


def _permute(build: Builder, out: Operation, x: Value, dims: Sequence[int]) -> Value:
    return build.transpose(x, [axis % len(x.shape) for axis in dims])


def _transpose(build: Builder, out: Operation, x: Value, one: int = 0, other: int = 1) -> Value:
    order = list(range(len(x.shape)))
    if len(order) > 1:
        one, other = one % len(order), other % len(order)
        order[one], order[other] = other, one
    return build.transpose(x, order)


def _unsqueeze(build: Builder, out: Operation, x: Value, dim: int) -> Value:
    axis = dim % len(out.shape)
    if x.number is not None:
        return replace(x, shape=out.shape)
    x = build.aligned(x)
    held = (*x.held[:axis], 1, *x.held[axis:])
    return replace(build.reshape(replace(x, shape=x.held), held), shape=out.shape)


def _squeeze(build: Builder, out: Operation, x: Value, *dims: Any) -> Value:
    if x.number is not None:
        return replace(x, shape=out.shape)
    rank = len(x.shape)
    given = dims[0] if dims and isinstance(dims[0], tuple) else dims or range(rank)
    gone = {dim % rank for dim in given if x.shape[dim % rank] == 1}
    x = build.aligned(x)
    held = tuple(size for axis, size in enumerate(x.held) if axis not in gone)
    return replace(build.reshape(replace(x, shape=x.held), held), shape=out.shape)


def _slice(
    build: Builder,
    out: Operation,
    x: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    axis = dim % len(x.shape)
    return cut(build, x, axis, *_bounds(x.shape[axis], start, end), step)


def _bounds(size: Size, start: Size | None, end: Size | None) -> tuple[Size, Size]:
    """Return a slice's start and end after torch's rules for negative and missing values."""
    start = 0 if start is None else start
    if isinstance(size, Open):
        if isinstance(start, int) and start >= 0 and end in (None, size, _END):
            return start, size
        raise NoForm("it slices the batch axis")
    if isinstance(start, Open) or isinstance(end, Open):
        raise NoForm("it slices at a position that depends on the batch size")
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _select(build: Builder, out: Operation, x: Value, dim: int, index: int) -> Value:
    axis = dim % len(x.shape)
    size = x.shape[axis]
    if isinstance(size, Open) or isinstance(index, Open):
        raise NoForm("it picks a single sample of the batch")
    row = cut(build, x, axis, index % size, index % size + 1)
    return _squeeze(build, out, row, axis)


def _split(build: Builder, out: Operation, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    axis = dim % len(x.shape)
    if x.number is None and x.held == x.shape and len(set(out.shapes)) == 1 < len(out.shapes):
        names = build.emit_several("Split", (x,), len(out.shapes), axis=axis)
        return tuple(build.known(Value(name, x.type, out.shape, out.shape)) for name in names)
    found, start = [], 0
    for shape in out.shapes:
        length = shape[axis]
        if isinstance(length, Open) or isinstance(sizes, Open):
            raise NoForm("it splits the batch axis")
        found.append(cut(build, x, axis, start, start + length))
        start += length
    return tuple(found)


def _unbind(build: Builder, out: Operation, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(
        _select(build, replace(out, shapes=(shape,)), x, dim, index) for index, shape in enumerate(out.shapes)
    )


def _cat(build: Builder, out: Operation, parts: Sequence[Value], dim: int = 0) -> Value:
    return concat(build, parts, dim % len(out.shape), out.shape)


def _stack(build: Builder, out: Operation, parts: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(out.shape)
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    single = replace(out, shapes=(one,))
    return concat(build, [_unsqueeze(build, single, part, axis) for part in parts], axis, out.shape)


def _constant_pad(build: Builder, out: Operation, x: Value, counts: Sequence[int], value: float = 0) -> Value:
    rank = len(x.shape)
    before, after = [0] * rank, [0] * rank
    for index in range(len(counts) // 2):
        before[rank - 1 - index], after[rank - 1 - index] = counts[2 * index], counts[2 * index + 1]
    return pad(build, x, before, after, value)


def _slice_backward(
    build: Builder,
    out: Operation,
    gradient: Value,
    sizes: object,
    dim: int,
    start: Size,
    end: Size,
    step: int,
) -> Value:
    axis = dim % len(out.shape)
    low, high = _bounds(out.shape[axis], start, end)
    if isinstance(low, Open) or isinstance(high, Open):
        if low == 0 and step == 1:
            return gradient
        raise NoForm("it slices the batch axis")
    size = out.shape[axis]
    assert isinstance(size, int)
    if step != 1:
        gradient = _spread(build, gradient, axis, step)
        high = low + int(gradient.shape[axis])  # type: ignore[arg-type]
    before, after = [0] * len(out.shape), [0] * len(out.shape)
    before[axis], after[axis] = low, size - high
    return pad(build, gradient, before, after)


def _spread(build: Builder, x: Value, axis: int, step: int) -> Value:
    """Return the array with step - 1 zeros inserted after every position of an axis."""
    size = x.shape[axis]
    assert isinstance(size, int)
    split = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
    after = [0] * len(split)
    after[axis + 1] = step - 1
    wide = pad(build, build.reshape(x, split), [0] * len(split), after)
    return build.reshape(wide, (*x.shape[:axis], size * step, *x.shape[axis + 1 :]))


def _select_backward(
    build: Builder, out: Operation, gradient: Value, sizes: object, dim: int, index: int
) -> Value:
    axis = dim % len(out.shape)
    size = out.shape[axis]
    if isinstance(size, Open):
        raise NoForm("it picks a single sample of the batch")
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    row = _unsqueeze(build, replace(out, shapes=(one,)), gradient, axis)
    before, after = [0] * len(out.shape), [0] * len(out.shape)
    before[axis], after[axis] = index % size, size - index % size - 1
    return pad(build, row, before, after)


def _slice_scatter(
    build: Builder,
    out: Operation,
    x: Value,
    part: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    """Return x with `part` in place of a slice."""
    axis = dim % len(out.shape)
    size = out.shape[axis]
    low, high = _bounds(size, start, end)
    if low == 0 and high == size and step == 1:
        return part
    if isinstance(size, Open) or isinstance(low, Open) or isinstance(high, Open):
        raise NoForm("it writes into a part of the batch axis")
    if step != 1:
        places = np.arange(size)
        places[low:high:step] = size + np.arange(len(range(low, high, step)))
        both = (*out.shape[:axis], size + len(range(low, high, step)), *out.shape[axis + 1 :])
        return take(build, concat(build, [x, part], axis, both), axis, places)
    if x.number is not None and x.type == "f4":
        before, after = [0] * len(out.shape), [0] * len(out.shape)
        before[axis], after[axis] = low, size - high
        return pad(build, part, before, after, x.number)
    parts = [cut(build, x, axis, 0, low), part, cut(build, x, axis, high, size)]
    return concat(build, parts, axis, out.shape)


def _select_scatter(build: Builder, out: Operation, x: Value, part: Value, dim: int, index: int) -> Value:
    axis = dim % len(out.shape)
    size = out.shape[axis]
    if isinstance(size, Open) or isinstance(index, Open):
        raise NoForm("it writes into a single sample of the batch")
    row = build.reshape(part, (*out.shape[:axis], 1, *out.shape[axis + 1 :]))
    return _slice_scatter(build, out, x, row, axis, index % size, index % size + 1)


def _view_scatter(build: Builder, out: Operation, x: Value, part: Value, *_: object) -> Value:
    return build.reshape(part, out.shape)


def _permute_scatter(build: Builder, out: Operation, x: Value, part: Value, dims: Sequence[int]) -> Value:
    rank = len(out.shape)
    return _permute(build, out, part, [int(one) for one in np.argsort([dim % rank for dim in dims])])


def _transpose_scatter(build: Builder, out: Operation, x: Value, part: Value, *axes: int) -> Value:
    return _transpose(build, out, part, *axes)


def _flip(build: Builder, out: Operation, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        size = x.shape[dim]
        if isinstance(size, Open):
            raise NoForm("it reverses the batch axis")
        x = take(build, x, dim % len(x.shape), np.arange(size)[::-1])
    return x


def _roll(build: Builder, out: Operation, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        raise NoForm("it rolls the flattened array, not given axes")
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if isinstance(size, Open):
            raise NoForm("it rolls the batch axis")
        x = take(build, x, dim % len(out.shape), np.roll(np.arange(size), shift))
    return x


def take(build: Builder, x: Value, axis: int, positions: Any) -> Value:
    """Return the entries at these positions of one axis."""
    shape = (*x.shape[:axis], len(positions), *x.shape[axis + 1 :])
    indices = build.constant(np.array(positions, dtype=np.int64))
    return build.emit("Gather", (build.whole(x), indices), shape, type_=x.type, axis=axis)


def _repeat(build: Builder, out: Operation, x: Value, repeats: Sequence[Size]) -> Value:
    aligned = (1,) * (len(out.shape) - len(x.shape)) + x.shape
    if all(count == 1 or size == 1 for count, size in zip(repeats, aligned, strict=True)):
        return replace(x, shape=out.shape)
    full = build.whole(build.reshape(x, aligned))
    return build.emit("Tile", (full, build.sizes(tuple(repeats))), out.shape, type_=build_type(out))


def _arange(build: Builder, out: Operation, *bounds: Any, **_: object) -> Value:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if isinstance(end, Open):
        if (start, step) != (0, 1):
            raise NoForm("the end of its range is the batch size")
        ones = build.whole(build.number(1, "i8", out.shape))
        counted = build.emit("CumSum", (ones, build.constant(np.array(0))), out.shape, type_="i8")
        numbers = build.emit("Sub", (counted, build.number(1, "i8")), out.shape, type_="i8")
        return build.cast(numbers, build_type(out))
    return build.cast(build.constant(np.arange(start, end, step)), build_type(out))


def _triangle(build: Builder, out: Operation, x: Value, diagonal: int = 0, *, upper: bool) -> Value:
    rows, columns = out.shape[-2:]
    if isinstance(rows, Open) or isinstance(columns, Open):
        raise NoForm("it keeps a triangle of the batch axis")
    full = np.ones((rows, columns), np.bool_)
    triangle = build.constant(np.triu(full, diagonal) if upper else np.tril(full, diagonal))
    if x.type == "?":
        return triangle if x.number else apply(build, "And", [x, triangle], out.shape, "?")
    return apply(build, "Where", [triangle, x, build.number(0, x.type)], out.shape, x.type)


_RESHAPED = ("view", "_reshape_alias", "unsqueeze", "squeeze", "alias", "detach")
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "_reshape_alias"), _view),
    "permute": _permute,
    **dict.fromkeys(("t", "transpose"), _transpose),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "unsafe_split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _constant_pad,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    **dict.fromkeys([f"{name}_scatter" for name in _RESHAPED], _view_scatter),
    "permute_scatter": _permute_scatter,
    **dict.fromkeys(("t_scatter", "transpose_scatter"), _transpose_scatter),
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "arange": _arange,
    "tril": partial(_triangle, upper=False),
    "triu": partial(_triangle, upper=True),
}
