"""Follows the axes of a graph's arrays when some neurons of the model are left out.

The length of an axis is a product of factors. An axis of 64 channels with 9 pixels each has the factors (64,
9); with 25 channels left it has (25, 9). Each operator's rule computes the factors of its results from those
of its inputs. An operator without a rule must not touch an axis that becomes shorter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetune.protocols.bundle.graph import Node
from fleetune.protocols.model.spec import Shape


@dataclass(frozen=True)
class Factor:
    """A factor of an axis' length: its value in the whole graph and in the smaller graph."""

    whole: int
    small: int


Axis = tuple[Factor, ...]  # outermost factor first; the length of the axis is their product
Axes = tuple[Axis, ...]


class Unfollowed(Exception):  # noqa: N818 - it reports what was seen
    """The graph uses its neurons in a way that no rule covers."""


def need(condition: object) -> None:
    if not condition:
        raise Unfollowed


def fixed(size: int) -> Factor:
    return Factor(size, size)


def unchanged(shape: Shape) -> Axes:
    return tuple((fixed(size),) for size in shape)


def whole_shape(axes: Axes) -> Shape:
    return tuple(_length(axis) for axis in axes)


def small_shape(axes: Axes) -> Shape:
    return tuple(_small_length(axis) for axis in axes)


def is_shorter(axis: Axis) -> bool:
    return _length(axis) != _small_length(axis)


def regrouped(axes: Axes, shape: Shape) -> Axes:
    """Return the axes after a reshape to `shape`, which keeps the order of entries. Raises Unfollowed."""
    rest = [factor for axis in axes for factor in axis if factor.whole != 1]
    return tuple(tuple(_taken(rest, size)) for size in shape)


def _taken(rest: list[Factor], size: int) -> Iterator[Factor]:
    """Remove from `rest` the outermost factors whose product is `size`, and yield them."""
    while size > 1:
        need(rest and rest[0].whole)
        factor = rest.pop(0)
        if size % factor.whole:
            factor, inner = _split(factor, size)
            rest.insert(0, inner)
        yield factor
        size //= factor.whole


def _split(factor: Factor, outer: int) -> tuple[Factor, Factor]:
    """Split a factor of neurons into `outer` equal groups and their size; the smaller graph has fewer
    groups.
    """
    need(factor.whole % outer == 0)
    inner = factor.whole // outer
    if factor.whole == factor.small:
        return fixed(outer), fixed(inner)
    need(factor.small % inner == 0)
    return Factor(outer, factor.small // inner), fixed(inner)


def expanded(axes: Axes, shape: Shape) -> Axes:
    """Return the axes after ONNX's Expand to a shape of the whole graph. Raises Unfollowed."""
    need(len(axes) == len(shape))
    pairs = zip(axes, unchanged(shape), strict=True)
    return tuple(axis if _length(axis) == _length(other) else other for axis, other in pairs)


def _together(several: Sequence[Axes]) -> Axes:
    """Return the axes of arrays that ONNX broadcasts against each other."""
    rank = max(map(len, several))
    aligned = [((fixed(1),),) * (rank - len(axes)) + axes for axes in several]
    made = []
    for them in zip(*aligned, strict=True):
        size = max(map(_length, them))
        full = [axis for axis in them if _length(axis) == size]
        need(len({_small_length(axis) for axis in full}) == 1)
        made.append(max(full, key=len))
    return tuple(made)


# Each rule takes a node, its inputs' axes and its first result's shape in the whole graph.


def _broadcast(_: Node, inputs: list[Axes], __: Shape) -> Axes:
    return _together(inputs)


def _first(_: Node, inputs: list[Axes], __: Shape) -> Axes:
    return inputs[0]


def _along(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    axis = node.attributes.get("axis", -1)
    need(isinstance(axis, int) and -len(inputs[0]) <= axis < len(inputs[0]))
    assert isinstance(axis, int)
    need(not is_shorter(inputs[0][axis]))
    return inputs[0]


def _matmul(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    turns = node.attributes.get("transA"), node.attributes.get("transB")
    a, b = (axes[::-1] if turn else axes for axes, turn in zip(inputs, turns, strict=False))
    need(len(a) >= 2 <= len(b) and _small_length(a[-1]) == _small_length(b[-2]))
    return (*_together([a[:-2], b[:-2]]), a[-2], b[-1])


def _conv(node: Node, inputs: list[Axes], shape: Shape) -> Axes:
    image, weight, *_ = inputs
    given = 0 if node.op == "ConvTranspose" else 1  # where the weight has the channels of its input
    need(node.attributes.get("group", 1) == 1)
    need(_small_length(image[1]) == _small_length(weight[given]))
    need(not any(map(is_shorter, (*image[2:], *weight[2:]))))
    return (image[0], weight[1 - given], *unchanged(shape[2:]))


def _max_pool(_: Node, inputs: list[Axes], shape: Shape) -> Axes:
    need(not any(map(is_shorter, inputs[0][2:])))
    return (*inputs[0][:2], *unchanged(shape[2:]))


def _transposed(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    order = node.attributes.get("perm", tuple(range(len(inputs[0])))[::-1])
    assert isinstance(order, tuple), "the graph was checked"
    return tuple(inputs[0][int(axis)] for axis in order)


def _aligned(_: Node, inputs: list[Axes], shape: Shape) -> Axes:
    """Return the axes: an axis that keeps its length keeps its factors, and any other must not become
    shorter.
    """
    need(len(inputs[0]) == len(shape))
    made = []
    for axis, size in zip(inputs[0], shape, strict=True):
        need(_length(axis) == size or not is_shorter(axis))
        made.append(axis if _length(axis) == size else (fixed(size),))
    need(not any(is_shorter(axis) for axes in inputs[1:] for axis in axes))
    return tuple(made)


def _gathered(node: Node, inputs: list[Axes], shape: Shape) -> Axes:
    data, places, *_ = inputs
    axis = node.attributes.get("axis", 0)
    need(isinstance(axis, int) and axis >= 0 and not is_shorter(data[axis]))
    need(not any(map(is_shorter, places)))
    assert isinstance(axis, int)
    return (*data[:axis], *unchanged(shape[axis : axis + len(places)]), *data[axis + 1 :])


def _joined(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    axis = node.attributes.get("axis")
    assert isinstance(axis, int), "the graph was checked"
    at = axis % len(inputs[0])
    need(not any(is_shorter(axes[at]) for axes in inputs))
    parts = fixed(sum(_length(axes[at]) for axes in inputs))
    others = _together([(*axes[:at], (fixed(1),), *axes[at + 1 :]) for axes in inputs])
    return (*others[:at], (parts,), *others[at + 1 :])


def _reduced(node: Node, inputs: list[Axes], shape: Shape) -> Axes:
    """Return the axes after a reduction; only a sum may reduce an axis that becomes shorter.

    A mean over fewer neurons would have another value.
    """
    need(node.attributes.get("keepdims", 1))
    made = []
    for axis, size in zip(inputs[0], shape, strict=True):
        gone = _length(axis) != size
        need(not gone or not is_shorter(axis) or node.op == "ReduceSum")
        made.append((fixed(1),) if gone else axis)
    return tuple(made)


def _to_depth(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    block = node.attributes.get("blocksize")
    assert isinstance(block, int), "the graph was checked"
    sample, channels, *image = inputs[0]
    smaller = [regrouped((axis,), (_length(axis) // block, block))[0] for axis in image]
    return (sample, _product(fixed(block * block), *channels), *smaller)


def _to_space(node: Node, inputs: list[Axes], _: Shape) -> Axes:
    block = node.attributes.get("blocksize")
    assert isinstance(block, int), "the graph was checked"
    need(node.attributes.get("mode", "DCR") == "DCR")
    sample, depth, *image = inputs[0]
    square, channels = regrouped((depth,), (block * block, _length(depth) // block**2))
    need(not is_shorter(square))
    return (sample, channels, *(_product(*axis, fixed(block)) for axis in image))


def _product(*factors: Factor) -> Axis:
    return tuple(factor for factor in factors if factor.whole != 1)


def _length(axis: Axis) -> int:
    return math.prod(factor.whole for factor in axis)


def _small_length(axis: Axis) -> int:
    return math.prod(factor.small for factor in axis)


def _table(rule: Callable[..., Axes], names: str) -> dict[str, Callable[..., Axes]]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Callable[[Node, list[Axes], Shape], Axes]] = {
    **_table(
        _first,
        "Abs Cast Clip Cos Erf Exp Identity LeakyRelu Log Neg Not Reciprocal Relu Sigmoid Sign Sin Softplus "
        "Sqrt Tanh",
    ),
    **_table(
        _broadcast, "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Or Pow Sub Where"
    ),
    **_table(_along, "CumSum LogSoftmax Softmax"),
    **_table(_matmul, "Gemm MatMul"),
    **_table(_conv, "Conv ConvTranspose"),
    **_table(_aligned, "Pad Slice Split Tile"),
    **_table(_reduced, "ReduceMax ReduceMean ReduceMin ReduceSum"),
    "Concat": _joined,
    "DepthToSpace": _to_space,
    "Gather": _gathered,
    "MaxPool": _max_pool,
    "SpaceToDepth": _to_depth,
    "Transpose": _transposed,
}
