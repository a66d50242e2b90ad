"""Builds a graph of ONNX nodes. Equal nodes are made once, and repeated entries are not stored.

A value that repeats along an axis is stored with size 1 there, and ONNX broadcasts it. A value that is one
number everywhere becomes an array only when a node needs it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from fleetune.coordinator.export.torch_trace import Open, Shape, Size
from fleetune.protocols.bundle.graph import BATCH, Attribute, Body, Constant, Graph, Node, Port, Type

DTYPES: dict[Type, type[Any]] = {"f4": np.float32, "i8": np.int64, "?": np.bool_}


class NoForm(Exception):  # noqa: N818 - what was asked for has no form in ONNX
    """Raised if an operation, or this use of it, cannot be written in ONNX operators."""


@dataclass(frozen=True)
class Value:
    """An array in an ONNX graph that is under construction.

    Attributes:
        name: the name of the array in the graph; "" if all entries equal `number`.
        type: the type of its entries.
        shape: the shape of the array in torch.
        held: the shape that the graph stores: aligned to the right, with size 1 along axes where entries
            repeat.
        number: the number that all entries equal; None if the graph has an array for this value.
    """

    name: str
    type: Type
    shape: Shape
    held: Shape
    number: float | None = None


class Builder:
    """Collects the nodes of a graph. Equal nodes become one.

    Args:
        plain: True for forward passes that onnxruntime-training differentiates. It lacks the gradients of
            some operators that are fast in ONNX Runtime, and its gradients of look-ups are slow.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self.plain = plain
        self.nodes: list[Node] = []
        self.maker: dict[str, Node] = {}  # the node that makes each array
        self._values: dict[str, Value] = {}
        self._ports: list[Port] = []
        self._constants: dict[Any, Constant] = {}
        self._made: dict[Any, tuple[str, ...]] = {}
        self._turned: set[str] = set()  # names of arrays that `samples_first` returned

    def input(self, name: str, type_: Type, shape: Shape) -> Value:
        self._ports.append(Port(name, type_, port_shape(shape)))
        return self.known(Value(name, type_, shape, shape))

    def number(self, number: float, type_: Type, shape: Shape = ()) -> Value:
        """Return a value whose entries all equal one number; no array is stored for it."""
        return Value("", type_, shape, (), bool(number) if type_ == "?" else number)

    def constant(self, value: NDArray[Any]) -> Value:
        """Store an array in the graph and return it as a value; equal arrays are stored once.

        Devices reject infinite numbers, so these become the largest ones: softmax gives them 0 as well.
        """
        value = np.ascontiguousarray(value)
        if value.dtype.kind == "f":
            largest = np.finfo(np.float32).max
            value = np.clip(value, -largest, largest)
        key = (value.dtype.str, value.shape, value.tobytes())
        made = self._constants.setdefault(key, Constant(f"%c{len(self._constants)}", value))
        type_: Type = {"f": "f4", "i": "i8", "b": "?"}[value.dtype.kind]  # type: ignore[assignment]
        return self.known(Value(made.name, type_, value.shape, value.shape))

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        shape: Shape,
        *,
        type_: Type = "f4",
        held: Shape | None = None,
        **attributes: Attribute,
    ) -> Value:
        """Add a node with one output, unless an equal node exists, and return its output."""
        (name,) = self.emit_several(op, inputs, 1, UNSET, **attributes)
        return self.known(Value(name, type_, shape, shape if held is None else held))

    def emit_several(
        self,
        op: str,
        inputs: Sequence[Value | None],
        count: int,
        body: Body | UnsetType = UNSET,
        **attributes: Attribute,
    ) -> tuple[str, ...]:
        """Add a node with several outputs, unless an equal node exists, and return their names."""
        names = tuple("" if value is None else self.named(value).name for value in inputs)
        key = (op, names, tuple(sorted(attributes.items())), repr(body))
        if key not in self._made:
            outputs = tuple(f"%{len(self._made)}_{index}" for index in range(count))
            node = Node(op, names, outputs, dict(sorted(attributes.items())), body)
            self.nodes.append(node)
            self.maker |= dict.fromkeys(outputs, node)
            self._made[key] = outputs
        return self._made[key]

    def named(self, value: Value) -> Value:
        """Return the value as an array of the graph; a single number becomes a constant."""
        if value.number is None:
            return value
        return replace(
            self.constant(np.array(value.number, dtype=DTYPES[value.type])), shape=value.shape, held=()
        )

    def whole(self, value: Value) -> Value:
        """Return the value as an array with all entries stored, so that no axis repeats by broadcasting."""
        value = self.named(value)
        if value.held == value.shape:
            return value
        return self.emit("Expand", (value, self.sizes(value.shape)), value.shape, type_=value.type)

    def aligned(self, value: Value) -> Value:
        """Return the value with its stored array reshaped to as many axes as the value's shape."""
        value = self.named(value)
        held = (1,) * (len(value.shape) - len(value.held)) + value.held
        if held == value.held:
            return value
        return replace(self.reshape(replace(value, shape=value.held), held), shape=value.shape)

    def reshape(self, value: Value, shape: Shape) -> Value:
        """Return the value's entries in another shape."""
        if value.number is not None:
            return replace(value, shape=shape)
        if squeezed(value.held) != squeezed(value.shape):
            value = self.whole(value)
        elif value.held != value.shape:  # only axes of size 1 differ
            value = replace(value, shape=value.held)
        while (node := self.maker.get(value.name)) and node.op == "Reshape":
            value = self._values[node.inputs[0]]
        if value.held == shape:
            return value
        if sum(isinstance(size, Open) for size in shape) > 1:
            return self.emit("Reshape", (value, self.sizes(shape)), shape, type_=value.type)
        target = np.array([-1 if isinstance(size, Open) else size for size in shape], dtype=np.int64)
        return self.emit("Reshape", (value, self.constant(target)), shape, type_=value.type)

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Return the value with its axes in another order."""
        shape = tuple(value.shape[axis] for axis in order)
        if value.number is not None:
            return replace(value, shape=shape)
        value = self.aligned(value)
        node = self.maker.get(value.name)
        if node and node.op == "Transpose":
            before = node.attributes["perm"]
            assert isinstance(before, tuple)
            order = [int(before[axis]) for axis in order]
            value = self._values[node.inputs[0]]
        held = tuple(value.held[axis] for axis in order)
        if list(order) == list(range(len(order))):
            return replace(value, shape=shape)
        moving = [axis for axis in order if value.held[axis] != 1]
        if moving == sorted(moving):  # only axes of size 1 move
            return replace(self.reshape(replace(value, shape=value.held), held), shape=shape)
        return self.emit("Transpose", (value,), shape, type_=value.type, held=held, perm=tuple(order))

    def samples_first(self, value: Value) -> Value:
        """Return images of shape (channels, samples, ...) as (samples, channels, ...).

        Rules for single entries and for sums compute on the array that was given here, so that a chain of
        them needs no copy in another order.
        """
        turned = self.transpose(value, _swapped(range(len(value.shape))))
        if turned.number is None and turned.held == turned.shape:
            self._turned.add(turned.name)
        return turned

    def channels_first(self, value: Value) -> Value:
        """Return images of shape (samples, channels, ...) as (channels, samples, ...)."""
        return self.transpose(value, _swapped(range(len(value.shape))))

    def is_turned(self, value: Value) -> bool:
        """True if `samples_first` returned this array, so that `channels_first` costs nothing."""
        return value.name in self._turned and value.held == value.shape

    def cast(self, value: Value, type_: Type) -> Value:
        """Return the value with its entries converted to another type."""
        if value.type == type_:
            return value
        if self.is_turned(value):
            return self.samples_first(self.cast(self.channels_first(value), type_))
        if value.number is not None:
            kind = {"f4": float, "i8": int, "?": bool}[type_]
            return replace(value, type=type_, number=kind(value.number))
        code = {"f4": 1, "i8": 7, "?": 9}[type_]
        return self.emit("Cast", (value,), value.shape, type_=type_, held=value.held, to=code)

    def sizes(self, shape: Shape) -> Value:
        """Return a shape as an int64 array of shape (axes,), as ONNX's Reshape and Expand take it."""
        if not any(isinstance(size, Open) for size in shape):
            return self.constant(np.array(shape, dtype=np.int64))
        parts: list[Value] = []
        run: list[int] = []
        for size in shape:
            if isinstance(size, Open):
                parts += [self.constant(np.array(run, dtype=np.int64))] if run else []
                parts.append(self._count(size))
                run = []
            else:
                run.append(size)
        parts += [self.constant(np.array(run, dtype=np.int64))] if run else []
        if len(parts) == 1:
            return parts[0]
        return self.emit("Concat", parts, (len(shape),), type_="i8", axis=0)

    def scalar(self, size: float | Open) -> Value:
        """Return a size as a float array of shape (), for arithmetic."""
        if not isinstance(size, Open):
            return self.number(size, "f4")
        count = self.reshape(self.cast(self._count(Open(1)), "f4"), ())
        if size.times != 1:
            count = self.emit("Mul", (count, self.number(size.times, "f4")), ())
        if size.plus:
            count = self.emit("Add", (count, self.number(size.plus, "f4")), ())
        return count

    def value(self, name: str) -> Value:
        """Return the value whose array has this name."""
        return self._values[name]

    def graph(self, outputs: dict[str, Value]) -> Graph:
        """Return the finished graph: outputs get the given names, inner arrays numbers; unused nodes are
        gone.
        """
        results = {name: self.whole(value) for name, value in outputs.items()}
        names: dict[str, str] = {}
        for name, value in results.items():
            if value.name in self.maker and value.name not in names:
                names[value.name] = name
            else:
                self.nodes.append(Node("Identity", (value.name,), (name,), {}))
        graph = Graph(
            tuple(self._ports),
            tuple(Port(name, value.type, port_shape(value.shape)) for name, value in results.items()),
            tuple(self.nodes),
            tuple(self._constants.values()),
        )
        return _numbered(_renamed(graph, names).keeping(results))

    def known(self, value: Value) -> Value:
        """Register a value under the name of its array, and return it."""
        return self._values.setdefault(value.name, value)

    def _count(self, size: Open) -> Value:
        """Return a size that depends on the number of samples, as an int64 array of shape (1,)."""
        port = next(port for port in self._ports if port.shape[:1] == (BATCH,))
        count = self.emit("Shape", (self._values[port.name],), (1,), type_="i8", start=0, end=1)
        if size.times != 1:
            count = self.emit(
                "Mul", (count, self.constant(np.array([size.times], dtype=np.int64))), (1,), type_="i8"
            )
        if size.plus:
            count = self.emit(
                "Add", (count, self.constant(np.array([size.plus], dtype=np.int64))), (1,), type_="i8"
            )
        return count


def type_of(dtype: torch.dtype) -> Type:
    """Return the graph's type for a torch type."""
    types: dict[torch.dtype, Type] = {
        torch.float32: "f4",
        torch.int64: "i8",
        torch.int32: "i8",
        torch.bool: "?",
    }
    if dtype not in types:
        raise NoForm(f"ONNX graphs here have no entries of type {dtype}")
    return types[dtype]


def port_shape(shape: Shape) -> tuple[Any, ...]:
    if any(isinstance(size, Open) and size != Open(1) for size in shape):
        raise NoForm("a size of its result depends on the batch size, but does not equal it")
    return tuple(BATCH if isinstance(size, Open) else size for size in shape)


def product(sizes: Sequence[Size]) -> Size:
    """Return the number of entries of an array with this shape."""
    found: Size = math.prod(size for size in sizes if not isinstance(size, Open))
    for size in sizes:
        if isinstance(size, Open):
            if isinstance(found, Open):
                raise NoForm("a size grows with the square of the batch size")
            found = Open(size.times * found, size.plus * found)
    return found


def squeezed(shape: Shape) -> Shape:
    """Return the shape without its axes of size 1."""
    return tuple(size for size in shape if size != 1)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an elementwise operation's result on arrays of these shapes."""
    longest = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _swapped(axes: Sequence[int]) -> list[int]:
    return [axes[1], axes[0], *axes[2:]]


def _renamed(graph: Graph, names: dict[str, str]) -> Graph:
    def new(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in old)

    nodes = tuple(replace(node, inputs=new(node.inputs), outputs=new(node.outputs)) for node in graph.nodes)
    constants = tuple(replace(one, name=names.get(one.name, one.name)) for one in graph.constants)
    return replace(graph, nodes=nodes, constants=constants)


def _numbered(graph: Graph) -> Graph:
    """Return the graph with numbered inner arrays and without the unused second output of MaxPool."""
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.output_names)
    nodes = tuple(
        replace(node, outputs=node.outputs[:1])
        if node.op == "MaxPool" and read.isdisjoint(node.outputs[1:])
        else node
        for node in graph.nodes
    )
    inside = [one.name for one in graph.constants]
    inside += [name for node in nodes for name in node.outputs if name.startswith("%")]
    names = {name: str(index) for index, name in enumerate(inside)}
    return _renamed(replace(graph, nodes=nodes), names)
