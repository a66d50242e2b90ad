"""A computation in a bundle: standard ONNX operators between named arrays, for any batch size.

It is smaller than an ONNX file, is checked when it is read, and can be cut: an agent keeps only the part that
its gradients depend on. `protocols.bundle.onnx_file` converts it to an ONNX file.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from fleetune.protocols.bounds import Finite, Int64, Label
from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.model.spec import MAX_TENSORS, Dimensions

BATCH = "n"  # the only dimension without a fixed size
OPSET = 17
# ONNX Runtime starts a graph in a time that grows with the square of this: 8 s for 10,000 on one core.
# The largest graph of the zoo's models has 5827, of 128 steps of a GRUCell.
MAX_NODES = 10_000
MAX_BODY_NODES = 1000
_MOST_LISTED = 50_000  # nodes, or constants, that are decoded before `Graph.check` counts them
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
    ReduceMin ReduceSum Relu Reshape Scan ScatterElements ScatterND Shape Sigmoid Sign Sin Slice Softmax
    Softplus SpaceToDepth Split Sqrt Sub Tanh Tile TopK Transpose Where
    """.split()  # noqa: SIM905 - a list of sixty strings reads worse
)  # the operators that exports contain; each has a rule in `protocols.bundle.graph_cost`


@dataclass(frozen=True)
class Port:
    """An input or output of a graph. `BATCH` in its shape stands for the number of samples."""

    name: Name
    type: Type
    shape: Dimensions


@dataclass(frozen=True)
class Node:
    """One ONNX operator. An empty name stands for an optional input that is left out.

    A node with the operator Scan repeats the nodes of its body, once for each entry along the first axis of
    some inputs. Its attributes give the numbers of inputs of each kind, in this order:
        states      float32 arrays that a step passes to the next one; the first step gets the node's inputs
        scanned     float32 arrays of which each step gets one entry; with reverse = 1, from the last to the
                    first
        (the rest)  arrays of which each step gets all
    Its outputs are the states after the last step, and then arrays with an entry from each step.
    """

    op: Name
    inputs: Names
    outputs: Names
    attributes: Annotated[dict[Name, Attribute], Meta(max_length=32)]
    body: "Body | UnsetType" = UNSET

    def keeping(self, outputs: Collection[str]) -> "Node":
        """Return the node with these outputs and the states; a Scan's body then computes no others."""
        if isinstance(self.body, UnsetType):
            return self
        states: Any = self.attributes["states"]
        pairs = zip(self.outputs, self.body.outputs, strict=True)
        kept = [pair for index, pair in enumerate(pairs) if pair[0] in outputs or index < states]
        results = tuple(inner for _, inner in kept)
        body = replace(self.body, outputs=results, nodes=tuple(_needed(self.body.nodes, results)))
        return replace(self, outputs=tuple(outer for outer, _ in kept), body=body)


@dataclass(frozen=True)
class Body:
    """What a Scan computes in each step. Its arrays have names of their own.

    Attributes:
        inputs: names of the node's inputs in the body, in their order.
        outputs: names of the node's outputs in the body, in their order.
        nodes: the operators in the order in which they are computed; none is a Scan.
    """

    inputs: Names
    outputs: Names
    nodes: Annotated[tuple[Node, ...], Meta(max_length=MAX_BODY_NODES)]


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
    nodes: Annotated[tuple[Node, ...], Meta(max_length=_MOST_LISTED)]
    constants: Annotated[tuple[Constant, ...], Meta(max_length=_MOST_LISTED)]

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.outputs)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, with those in the bodies of others."""
        return sum(1 + (len(node.body.nodes) if isinstance(node.body, Body) else 0) for node in self.nodes)

    @property
    def operators(self) -> set[str]:
        """The names of the operators in the graph and in the bodies of its nodes."""
        bodies = [node.body for node in self.nodes if isinstance(node.body, Body)]
        return {node.op for nodes in (self.nodes, *(body.nodes for body in bodies)) for node in nodes}

    def keeping(self, outputs: Collection[str]) -> "Graph":
        """Return the graph with only these outputs, and the nodes, inputs and constants they depend on."""
        nodes = _needed(self.nodes, outputs)
        wanted = {*outputs, *(name for node in nodes for name in node.inputs)}
        return replace(
            self,
            inputs=tuple(port for port in self.inputs if port.name in wanted),
            outputs=tuple(port for port in self.outputs if port.name in outputs),
            nodes=tuple(nodes),
            constants=tuple(constant for constant in self.constants if constant.name in wanted),
        )

    def check(self) -> None:
        """Check that a known operator makes every array, once and before it is used.

        Raises:
            PacketCorrupt: an operator is unknown, or an array is missing or made twice.
            PacketTooLarge: the graph has too many nodes, or too large constants.
        """
        if self.num_nodes > MAX_NODES:
            raise PacketTooLarge(
                f"graph has {self.num_nodes} operators, of {MAX_NODES} at most;"
                " a Python loop makes new ones in each step"
            )
        if sum(one.value.nbytes for one in self.constants) > MAX_CONSTANT_BYTES:
            raise PacketTooLarge(f"graph has constants of more than {MAX_CONSTANT_BYTES >> 20} MiB")
        known = {""}
        for name in self._given():
            if name in known:
                raise PacketCorrupt(f"graph: {name!r} is there twice")
            known.add(name)
        _check_order(self.nodes, known, self.output_names)
        for node in self.nodes:
            if isinstance(node.body, Body):
                _check_body(node, node.body)

    def _given(self) -> Iterator[str]:
        for port in self.inputs:
            yield port.name
        for constant in self.constants:
            yield constant.name


def _check_body(node: Node, body: Body) -> None:
    if any(one.op == "Scan" for one in body.nodes):
        raise PacketCorrupt("graph: Scan in the body of another")
    made = {name for one in body.nodes for name in one.outputs} - {""}
    if len({*body.outputs} & made) != len(body.outputs) or "" in node.outputs:
        raise PacketCorrupt("graph: Scan has a result that its body does not make")
    if len({*body.inputs, ""}) <= len(body.inputs):
        raise PacketCorrupt("graph: Scan has a body with equal inputs")
    _check_order(body.nodes, {"", *body.inputs}, body.outputs)


def _check_order(nodes: Collection[Node], known: set[str], outputs: Collection[str]) -> None:
    """Check operators and names of nodes that compute these outputs; `known` has the arrays given to them."""
    for node in nodes:
        if node.op not in OPERATORS:
            raise PacketCorrupt(f"graph: operator {node.op!r} is not known here; update this agent")
        missing = set(node.inputs) - known
        again = (set(node.outputs) & known) - {""}
        if missing or again:
            raise PacketCorrupt(f"graph: {node.op} has {min(missing | again)!r} out of order")
        if (node.op == "Scan") != isinstance(node.body, Body):
            raise PacketCorrupt(f"graph: {node.op} {'lacks its' if node.op == 'Scan' else 'has a'} body")
        known.update(node.outputs)
    if absent := set(outputs) - known:
        raise PacketCorrupt(f"graph: output {min(absent)!r} is never made")


def _needed(nodes: Sequence[Node], outputs: Collection[str]) -> list[Node]:
    """Return the nodes that these outputs depend on."""
    wanted, found = set(outputs), list[Node]()
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            found.append(node.keeping(wanted))
            wanted.update(node.inputs)
    return found[::-1]
