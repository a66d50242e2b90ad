"""Arrays of known shape in a graph, and the checked inputs and attributes of a node."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bounds import MAX_NUMBER
from fleetune.protocols.bundle.graph import Node, Type
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MAX_AXES

Shape = tuple[int, ...]

MOST_SIZES = 2 * MAX_AXES  # sizes in one input at most; padding has two for each axis
_FLAGS = frozenset("exclusive keepdims largest reverse transA transB".split())  # noqa: SIM905 - as OPERATORS
KNOWN_ENTRIES = 64  # entries of an array whose content is computed: sizes and bounds
_ITEM_BYTES: dict[Type, int] = {"f4": 4, "i8": 8, "?": 1}


@dataclass(frozen=True)
class Array:
    """An array in a graph.

    Attributes:
        type: type of its entries.
        shape: its shape.
        content: whole numbers that are known without running the graph. Others are never known: a runtime
            rounds real numbers in its own way, and a size that follows from them would be another.
    """

    type: Type
    shape: Shape
    content: NDArray[Any] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * _ITEM_BYTES[self.type]


@dataclass(frozen=True)
class Result:
    """The result of a node: an array, the floating-point operations, and the bytes needed during
    computation. `others` are further arrays.
    """

    array: Array
    operations: int = 0
    workspace: int = 0
    others: tuple[Array, ...] = ()


class Unfit(PacketCorrupt):
    """A node's inputs or attributes do not fit its operator."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Unfit(what)


class Given:
    """The inputs and attributes of a node, checked when they are read."""

    def __init__(self, node: Node, arrays: Sequence[Array | None]) -> None:
        self._node, self._arrays = node, arrays

    @property
    def count(self) -> int:
        """Number of results of the node."""
        return len(self._node.outputs)

    @property
    def all(self) -> list[Array]:
        return [self[index] for index in range(len(self._arrays))]

    def __getitem__(self, index: int) -> Array:
        array = self.get(index)
        if array is None:
            raise Unfit(f"lacks input {index}")
        return array

    def get(self, index: int) -> Array | None:
        return self._arrays[index] if index < len(self._arrays) else None

    def known(self, index: int) -> list[int]:
        """Return the whole numbers of an input that gives a size or a bound."""
        array = self[index]
        need(
            array.type == "i8" and array.content is not None,
            f"has a size that depends on data (input {index})",
        )
        assert array.content is not None
        need(array.content.size <= MOST_SIZES, f"has {array.content.size} sizes (input {index})")
        return [int(one) for one in array.content.ravel()]

    def number(self, name: str, default: int) -> int:
        value = self._node.attributes.get(name, default)
        need(
            isinstance(value, int) and abs(value) <= MAX_NUMBER,
            f"has the invalid {name} = {value!r:.40}",
        )
        return int(value)  # type: ignore[arg-type]

    def numbers(self, name: str, default: Sequence[int]) -> list[int]:
        value = self._node.attributes.get(name, tuple(default))
        if not isinstance(value, tuple) or not all(isinstance(one, int) for one in value):
            raise Unfit(f"has the invalid {name} = {value!r:.40}")
        need(max(map(abs, value), default=0) <= MAX_NUMBER, f"has the invalid {name} = {value!r:.40}")
        return [int(one) for one in value]

    def only(self, attributes: str) -> None:
        """Raise Unfit if the node has another attribute, because the caller would ignore it.

        A flag must be 0 or 1: runtimes do not agree on the meaning of 2.
        """
        unknown = set(self._node.attributes) - set(attributes.split())
        need(not unknown, f"has an attribute {min(unknown, default='')!r:.40}, which is not known here")
        for name in _FLAGS & self._node.attributes.keys():
            need(self.number(name, 0) in (0, 1), f"has {name} = {self.number(name, 0)}, which is not 0 or 1")

    def axis(self, rank: int, default: int | None = None) -> int:
        return within(self.number("axis", MAX_NUMBER if default is None else default), rank)


def within(axis: int, rank: int) -> int:
    need(-rank <= axis < rank, f"has axis {axis} of {rank}")
    return axis % rank


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape to which ONNX broadcasts arrays of these shapes. Raises Unfit if there is none."""
    rank = max((len(shape) for shape in shapes), default=0)
    found = []
    for sizes in zip(*[(1,) * (rank - len(shape)) + shape for shape in shapes], strict=True):
        different = set(sizes) - {1}
        need(len(different) <= 1, f"cannot bring together {tuple(sizes)}")
        found.append(different.pop() if different else 1)
    return tuple(found)


def followed(given: Given, array: Array, compute: Callable[..., Any]) -> Array:
    """Return `array` with its content, if it is of few whole numbers and that of all inputs is known."""
    contents = [one.content for one in given.all]
    if array.type != "i8" or array.size > KNOWN_ENTRIES or any(one is None for one in contents):
        return array
    with np.errstate(over="ignore"):  # both wrap around
        content = np.asarray(compute(*contents), np.int64).reshape(array.shape)
    return Array(array.type, array.shape, content)
