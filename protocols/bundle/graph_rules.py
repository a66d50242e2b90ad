"""For each ONNX operator: the shape of its results and their cost, from the shapes of its inputs.

A size must follow from the number of samples and from constants, never from the samples' content. Then the
memory and the operations of a graph are known before it runs. Meaning of the operators:
onnx.ai/onnx/operators (opset 17).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fleetune.protocols.bundle.graph import Attribute, Type
from fleetune.protocols.bundle.graph_arrays import (
    Array,
    Given,
    Result,
    Unfit,
    broadcast,
    followed,
    need,
    within,
)
from fleetune.protocols.bundle.graph_windows import conv, conv_transpose, max_pool

_CAST: Mapping[Attribute, Type] = {1: "f4", 7: "i8", 9: "?"}


def _same(given: Given, attributes: str = "") -> Result:
    given.only(attributes)
    x = given[0]
    return Result(Array(x.type, x.shape), x.size)


def _elementwise(
    given: Given, compute: Callable[..., Any] | None = None, type_: Type | None = None
) -> Result:
    """Return the result of an operator on each entry; `compute` follows whole numbers through it."""
    given.only("")
    arrays = given.all
    need(len({one.type for one in arrays}) == 1, "has inputs of several types")
    shape = broadcast([one.shape for one in arrays])
    array = Array(type_ or arrays[0].type, shape)
    known = followed(given, array, compute) if compute else array
    return Result(known, array.size * len(arrays))


def _divide(given: Given) -> Result:
    """Return the result of a division of float32 arrays; integer division is rejected.

    An integer division by 0, or of the smallest integer by -1, ends the process (SIGFPE). No export contains
    one.
    """
    need(given[0].type == "f4", "is of whole numbers")
    return _elementwise(given)


def _power(given: Given) -> Result:
    need(given[0].type == given[1].type == "f4", "is of whole numbers")
    return _elementwise(given)


def _where(given: Given) -> Result:
    given.only("")
    condition, a, b = given[0], given[1], given[2]
    need(condition.type == "?" and a.type == b.type, "has inputs of several types")
    array = Array(a.type, broadcast([condition.shape, a.shape, b.shape]))
    return Result(array, array.size)


def _cast(given: Given) -> Result:
    given.only("to")
    x, type_ = given[0], _CAST.get(given.number("to", 0))
    if type_ is None:
        raise Unfit("is to a type that is not known here")
    return Result(followed(given, Array(type_, x.shape), np.asarray), x.size)


def _matmul(given: Given) -> Result:
    given.only("")
    a, b = given[0], given[1]
    need(len(a.shape) >= 2 <= len(b.shape) and a.shape[-1] == b.shape[-2], f"is of {a.shape} and {b.shape}")
    outer = broadcast([a.shape[:-2], b.shape[:-2]])
    array = Array(a.type, (*outer, a.shape[-2], b.shape[-1]))
    return Result(array, 2 * array.size * a.shape[-1])


def _gemm(given: Given) -> Result:
    given.only("transA transB alpha beta")
    a, b, bias = given[0], given[1], given.get(2)
    need(len(a.shape) == len(b.shape) == 2, f"is of {a.shape} and {b.shape}")
    rows, inner = a.shape[::-1] if given.number("transA", 0) else a.shape
    again, columns = b.shape[::-1] if given.number("transB", 0) else b.shape
    shape = (rows, columns)
    need(inner == again and (bias is None or broadcast([bias.shape, shape]) == shape), "does not fit")
    return Result(Array(a.type, shape), 2 * rows * columns * inner)


def _reshape(given: Given) -> Result:
    given.only("")
    x, wanted = given[0], given.known(1)
    need(wanted.count(-1) <= 1 and min(wanted, default=0) >= -1, f"is to {wanted}")
    sizes = [x.shape[at] if size == 0 and at < len(x.shape) else size for at, size in enumerate(wanted)]
    rest = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        need(rest and x.size % rest == 0, f"of {x.shape} is to {wanted}")
        sizes[sizes.index(-1)] = x.size // rest
    need(math.prod(sizes) == x.size, f"of {x.shape} is to {wanted}")
    content = None if x.content is None else x.content.reshape(sizes)
    return Result(Array(x.type, tuple(sizes), content))


def _transpose(given: Given) -> Result:
    given.only("perm")
    x = given[0]
    order = given.numbers("perm", range(len(x.shape))[::-1])
    need(sorted(order) == list(range(len(x.shape))), f"has the order {order}")
    return Result(Array(x.type, tuple(x.shape[axis] for axis in order)), x.size)


def _concat(given: Given) -> Result:
    given.only("axis")
    parts = given.all
    need(parts and len({(one.type, len(one.shape)) for one in parts}) == 1, "is of unlike arrays")
    axis = given.axis(len(parts[0].shape))
    others = {one.shape[:axis] + one.shape[axis + 1 :] for one in parts}
    need(len(others) == 1, "is of unlike arrays")
    shape = list(parts[0].shape)
    shape[axis] = sum(one.shape[axis] for one in parts)
    array = Array(parts[0].type, tuple(shape))
    return Result(followed(given, array, lambda *them: np.concatenate(them, axis)), array.size)


def _split(given: Given) -> Result:
    given.only("axis")
    x = given[0]
    axis = given.axis(len(x.shape), 0)
    need(given.get(1) is None and given.count and x.shape[axis] % given.count == 0, "is not into equal parts")
    shape = list(x.shape)
    shape[axis] //= given.count
    return Result(Array(x.type, tuple(shape)), x.size)


def _slice(given: Given) -> Result:
    given.only("")
    x, starts, ends = given[0], given.known(1), given.known(2)
    axes = given.known(3) if given.get(3) else list(range(len(starts)))
    steps = given.known(4) if given.get(4) else [1] * len(starts)
    need(len(starts) == len(ends) == len(axes) == len(steps) and 0 not in steps, "has unlike bounds")
    axes = [within(axis, len(x.shape)) for axis in axes]
    need(len({*axes}) == len(axes), f"has an axis of {axes} twice")
    shape = list(x.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        # outside these bounds, Python and runtimes count other entries
        need(step > 0 or -size <= start < size > end, f"of {size} goes back from {start} to {end}")
        shape[axis] = len(range(size)[start : end if end >= -size or step > 0 else None : step])
    array = Array(x.type, tuple(shape))
    return Result(array, array.size)


def _gather(given: Given) -> Result:
    given.only("axis")
    x, places = given[0], given[1]
    axis = given.axis(len(x.shape), 0)
    need(places.type == "i8", "has no whole places")
    array = Array(x.type, x.shape[:axis] + places.shape + x.shape[axis + 1 :])
    return Result(array, array.size)


def _gather_elements(given: Given) -> Result:
    given.only("axis")
    x, places = given[0], given[1]
    given.axis(len(x.shape), 0)
    need(places.type == "i8" and len(places.shape) == len(x.shape), "has no whole places")
    return Result(Array(x.type, places.shape), places.size)


def _scatter_elements(given: Given) -> Result:
    given.only("axis reduction")
    x, places, values = given[0], given[1], given[2]
    given.axis(len(x.shape), 0)
    need(
        places.type == "i8" and places.shape == values.shape and len(places.shape) == len(x.shape),
        "does not fit",
    )
    return Result(Array(x.type, x.shape), x.size + values.size)


def _scatter_nd(given: Given) -> Result:
    given.only("reduction")
    x, places, values = given[0], given[1], given[2]
    need(places.type == "i8" and places.shape and 1 <= places.shape[-1] <= len(x.shape), "does not fit")
    need(values.shape == places.shape[:-1] + x.shape[places.shape[-1] :], "does not fit")
    return Result(Array(x.type, x.shape), x.size + values.size)


def _expand(given: Given) -> Result:
    given.only("")
    x, wanted = given[0], given.known(1)
    need(min(wanted, default=0) >= 0, f"is to {wanted}")
    array = Array(x.type, broadcast([x.shape, tuple(wanted)]))
    return Result(array, array.size)


def _tile(given: Given) -> Result:
    given.only("")
    x, times = given[0], given.known(1)
    need(len(times) == len(x.shape) and min(times, default=0) >= 0, f"is {times} times")
    array = Array(x.type, tuple(size * time for size, time in zip(x.shape, times, strict=True)))
    return Result(array, array.size)


def _constant_of_shape(given: Given) -> Result:
    given.only("")
    wanted = given.known(0)
    need(min(wanted, default=0) >= 0, f"is of {wanted}")
    array = Array("f4", tuple(wanted))
    return Result(array, array.size)


def _pad(given: Given) -> Result:
    given.only("mode")
    x, pads = given[0], given.known(1)
    rank = len(x.shape)
    need(len(pads) == 2 * rank and given.get(3) is None, f"is by {pads}")
    shape = tuple(size + pads[axis] + pads[axis + rank] for axis, size in enumerate(x.shape))
    need(min(shape, default=0) >= 0, f"is by {pads}")
    array = Array(x.type, shape)
    return Result(array, array.size)


def _one_hot(given: Given) -> Result:
    given.only("axis")
    places, depth, values = given[0], given.known(1), given[2]
    need(len(depth) == 1 and depth[0] >= 1 and values.shape == (2,), "has no depth")
    axis = within(given.number("axis", -1), len(places.shape) + 1)
    array = Array(values.type, (*places.shape[:axis], depth[0], *places.shape[axis:]))
    return Result(array, array.size)


def _reduced(given: Given, axes: Sequence[int], type_: Type | None = None) -> Result:
    """Return the result of a reduction; `axes` is empty only for a number, as runtimes then reduce all."""
    x = given[0]
    need(axes or not x.shape, "is over no axis")
    gone = {within(axis, len(x.shape)) for axis in axes}
    need(len(gone) == len(axes), f"has an axis of {axes} twice")
    sizes = [1 if axis in gone else size for axis, size in enumerate(x.shape)]
    if not given.number("keepdims", 1):
        sizes = [size for axis, size in enumerate(x.shape) if axis not in gone]
    return Result(Array(type_ or x.type, tuple(sizes)), x.size)


def _reduce(given: Given) -> Result:
    given.only("axes keepdims")
    return _reduced(given, given.numbers("axes", range(len(given[0].shape))))


def _reduce_sum(given: Given) -> Result:
    """Return the result of ReduceSum, the only reduction whose axes are an input rather than an attribute."""
    given.only("keepdims")
    return _reduced(given, given.known(1) if given.get(1) else range(len(given[0].shape)))


def _arg_max(given: Given) -> Result:
    given.only("axis keepdims")
    return _reduced(given, [given.number("axis", 0)], "i8")


def _top_k(given: Given) -> Result:
    given.only("axis largest")
    x, count = given[0], given.known(1)
    axis = given.axis(len(x.shape), -1)
    need(len(count) == 1 and 1 <= count[0] <= x.shape[axis], f"is of {count} of {x.shape}")
    need(given.count == 2, "has one result")
    shape = (*x.shape[:axis], count[0], *x.shape[axis + 1 :])
    array = Array(x.type, shape)
    # sorting takes a comparison for each entry and bit of the length
    return Result(array, x.size * max(1, x.shape[axis].bit_length()), 8 * array.size)


def _shape(given: Given) -> Result:
    given.only("start end")
    x = given[0]
    content = np.array(x.shape[given.number("start", 0) : given.number("end", len(x.shape))], np.int64)
    return Result(Array("i8", content.shape, content))


def _blocks(given: Given, *, deeper: bool) -> Result:
    given.only("blocksize mode")
    x, block = given[0], given.number("blocksize", 0)
    need(len(x.shape) == 4 and block >= 1, f"of {x.shape} by {block}")
    n, channels, height, width = x.shape
    square = block * block
    if deeper:
        need(height % block == width % block == 0, f"of {x.shape} by {block}")
        shape = (n, channels * square, height // block, width // block)
    else:
        need(channels % square == 0, f"of {x.shape} by {block}")
        shape = (n, channels // square, height * block, width * block)
    return Result(Array(x.type, shape), x.size)


_SAME = {
    **dict.fromkeys(
        "Abs Cos Erf Exp Floor Log Neg Not Reciprocal Relu Sigmoid Sign Sin Softplus Sqrt Tanh".split(),  # noqa: SIM905
        "",
    ),
    "Clip": "",
    "CumSum": "exclusive reverse",
    "LeakyRelu": "alpha",
    "LogSoftmax": "axis",
    "Softmax": "axis",
}
_ENTRY_BY_ENTRY: dict[str, tuple[Callable[..., Any] | None, Type | None]] = {
    "Add": (np.add, None),
    "Sub": (np.subtract, None),
    "Mul": (np.multiply, None),
    "Max": (lambda *them: np.max(np.broadcast_arrays(*them), axis=0), None),
    "Min": (lambda *them: np.min(np.broadcast_arrays(*them), axis=0), None),
    **dict.fromkeys("And Equal Greater GreaterOrEqual Less LessOrEqual Or".split(), (None, "?")),  # noqa: SIM905
}


def _rule(function: Callable[..., Result], *arguments: Any, **options: Any) -> Callable[[Given], Result]:
    return lambda given: function(given, *arguments, **options)


RULES: Mapping[str, Callable[[Given], Result]] = {
    **{name: _rule(_same, attributes) for name, attributes in _SAME.items()},
    **{name: _rule(_elementwise, *how) for name, how in _ENTRY_BY_ENTRY.items()},
    "ArgMax": _arg_max,
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "DepthToSpace": _rule(_blocks, deeper=False),
    "Div": _divide,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gemm": _gemm,
    "Identity": lambda given: Result(given[0], given[0].size),
    "MatMul": _matmul,
    "MaxPool": max_pool,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": _power,
    "ReduceMax": _reduce,
    "ReduceMean": _reduce,
    "ReduceMin": _reduce,
    "ReduceSum": _reduce_sum,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Slice": _slice,
    "SpaceToDepth": _rule(_blocks, deeper=True),
    "Split": _split,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Where": _where,
}
