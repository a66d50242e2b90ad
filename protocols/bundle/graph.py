"""A computation in a bundle: standard ONNX operators between named arrays, for any batch size.

It is smaller than an ONNX file, is checked when it is read, and can be cut: an agent keeps only the part that
its gradients depend on. `protocols.bundle.onnx_file` converts it to an ONNX file.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Finite, Int64, Label
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MAX_TENSORS, Dimensions

BATCH = "n"  # the only dimension without a fixed size
OPSET = 17
MAX_NODES = 50_000
MAX_CONSTANT_BYTES = 2**24

Type = Literal["f4", "i8", "?"]  # float32, int64, bool
# inputs or outputs of a graph: tensors, their gradients or statistics, and a few more
MAX_PORTS = 2 * MAX_TENSORS + 1000
MAX_OUTPUTS = 1000  # outputs of a node, and inputs
Name = Label
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_OUTPUTS)]
Attribute = Int64 | Finite | Name | Annotated[tuple[Int64 | Finite, ...], Meta(max_length=64)]

OPERATORS = frozenset(
    """
    Abs Add And ArgMax Cast Clip Concat ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace Div Equal
    Erf Exp Expand Floor Gather GatherElements Gemm Greater GreaterOrEqual Identity LeakyRelu Less LessOrEqual
    Log LogSoftmax MatMul Max MaxPool Min Mul Neg Not OneHot Or Pad Pow Reciprocal ReduceMax ReduceMean
    ReduceMin ReduceSum Relu Reshape ScatterElements ScatterND Shape Sigmoid Sign Sin Slice Softmax Softplus
    SpaceToDepth Split Sqrt Sub Tanh Tile TopK Transpose Where
    """.split()  # noqa: SIM905 - a list of sixty strings reads worse
)  # the operators that exports contain; each has a rule in `protocols.bundle.graph_rules`


@dataclass(frozen=True)
class Port:
    """An input or output of a graph. `BATCH` in its shape stands for the number of samples."""

    name: Name
    type: Type
    shape: Dimensions


@dataclass(frozen=True)
class Node:
    """One ONNX operator. An empty name stands for an optional input that is left out."""

    op: Name
    inputs: Names
    outputs: Names
    attributes: Annotated[dict[Name, Attribute], Meta(max_length=32)]


@dataclass(frozen=True)
class Constant:
    """A named array that is part of the graph."""

    name: Name
    value: NDArray[Any]


Ports = Annotated[tuple[Port, ...], Meta(max_length=MAX_PORTS)]


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they are computed."""

    inputs: Ports
    outputs: Ports
    nodes: Annotated[tuple[Node, ...], Meta(max_length=MAX_NODES)]
    constants: Annotated[tuple[Constant, ...], Meta(max_length=MAX_NODES)]

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.outputs)

    def keeping(self, outputs: Collection[str]) -> "Graph":
        """Return the graph with only these outputs, and the nodes, inputs and constants they depend on."""
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
        """Check that a known operator makes every array, once and before it is used.

        Raises:
            PacketCorrupt: an operator is unknown, an array is missing or made twice, or the graph is too
                large.
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
