"""A computation as it travels: standard ONNX operators between named arrays, the batch size open.

Smaller than an ONNX file, checked as it is read, and open to cutting: an agent keeps only what the
gradients that it wants depend on. `protocols.bundle.onnx_file` writes it for a runtime.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Finite, Int64, Label
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MAX_AXES, MAX_TENSORS, Size

BATCH = "n"  # the one open dimension
OPSET = 17
MAX_NODES = 50_000
MAX_CONSTANT_BYTES = 2**24

Type = Literal["f4", "i8", "?"]  # float32, int64, bool
MAX_PORTS = 2 * MAX_TENSORS + 1000  # of a graph: tensors, their gradients or statistics, and a few more
MAX_OUTPUTS = 1000  # of a node, and inputs
Name = Label
Dimension = Size | Literal["n"]
Dimensions = Annotated[tuple[Dimension, ...], Meta(max_length=MAX_AXES)]
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_OUTPUTS)]
Attribute = Int64 | Finite | Name | Annotated[tuple[Int64 | Finite, ...], Meta(max_length=64)]

OPERATORS = frozenset(
    """
    Abs Add And ArgMax Cast Clip Concat ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace Div Equal
    Erf Exp Expand Gather GatherElements Gemm Greater GreaterOrEqual Identity LeakyRelu Less LessOrEqual Log
    LogSoftmax MatMul Max MaxPool Min Mul Neg Not OneHot Or Pad Pow Reciprocal ReduceMax ReduceMean ReduceMin
    ReduceSum Relu Reshape ScatterElements ScatterND Shape Sigmoid Sign Sin Slice Softmax Softplus
    SpaceToDepth Split Sqrt Sub Tanh Tile Transpose Where
    """.split()  # noqa: SIM905 - a list of sixty strings reads worse
)  # what exports emit, each with a rule in `protocols.bundle.graph_rules`


@dataclass(frozen=True)
class Port:
    """An array that goes in or comes out; `BATCH` stands for the number of samples."""

    name: Name
    type: Type
    shape: Dimensions


@dataclass(frozen=True)
class Node:
    """One ONNX operator; an empty name is an optional input that is not given."""

    op: Name
    inputs: Names
    outputs: Names
    attributes: Annotated[dict[Name, Attribute], Meta(max_length=32)]


@dataclass(frozen=True)
class Constant:
    """An array that is part of the graph."""

    name: Name
    value: NDArray[Any]


Ports = Annotated[tuple[Port, ...], Meta(max_length=MAX_PORTS)]


@dataclass(frozen=True)
class Graph:
    """Nodes in the order they are computed."""

    inputs: Ports
    outputs: Ports
    nodes: Annotated[tuple[Node, ...], Meta(max_length=MAX_NODES)]
    constants: Annotated[tuple[Constant, ...], Meta(max_length=MAX_NODES)]

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.outputs)

    def keeping(self, outputs: Collection[str]) -> "Graph":
        """Only these outputs, and what they depend on. Inputs that nothing needs any more are gone."""
        wanted = set(outputs)
        nodes = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs):
                nodes.append(node)
                wanted.update(node.inputs)
        return replace(
            self,
            inputs=tuple(port for port in self.inputs if port.name in wanted),
            outputs=tuple(port for port in self.outputs if port.name in outputs),
            nodes=tuple(reversed(nodes)),
            constants=tuple(constant for constant in self.constants if constant.name in wanted),
        )

    def check(self) -> None:
        """Every array is made once and before it is used, by an operator that we know.

        Raises:
            PacketCorrupt: that is not so, or there is too much of it.
        """
        if (
            len(self.nodes) > MAX_NODES
            or sum(one.value.nbytes for one in self.constants) > MAX_CONSTANT_BYTES
        ):
            raise PacketCorrupt("graph is too large")
        known = {""}
        for name in self._given():
            if name in known:
                raise PacketCorrupt(f"graph: {name!r} is there twice")
            known.add(name)
        for node in self.nodes:
            if node.op not in OPERATORS:
                raise PacketCorrupt(f"graph: operator {node.op!r} is not known here; update this agent")
            missing = set(node.inputs) - known
            again = (set(node.outputs) & known) - {""}
            if missing or again:
                raise PacketCorrupt(f"graph: {node.op} has {min(missing | again)!r} out of order")
            known.update(node.outputs)
        if absent := set(self.output_names) - known:
            raise PacketCorrupt(f"graph: output {min(absent)!r} is never made")

    def _given(self) -> Iterator[str]:
        for port in self.inputs:
            yield port.name
        for constant in self.constants:
            yield constant.name
