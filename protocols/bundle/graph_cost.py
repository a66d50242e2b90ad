"""The cost of running a graph, computed before it runs; see `protocols.bundle.graph_rules`."""

from collections.abc import Mapping
from dataclasses import dataclass

from fleetune.protocols.bundle.graph import Constant, Graph, Node, Port, Type
from fleetune.protocols.bundle.graph_arrays import KNOWN_ENTRIES, Array, Given, Result, Unfit, need
from fleetune.protocols.bundle.graph_rules import RULES
from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.model.spec import MAX_AXES

# operations of one node: minutes at 1 GFLOPS, and a running node cannot be interrupted
MOST_AT_ONCE = 2 * 10**11
_TYPES: Mapping[str, Type] = {"f": "f4", "i": "i8", "b": "?"}


@dataclass(frozen=True)
class GraphCost:
    """The cost of one run of a graph.

    Attributes:
        operations: floating-point and similar operations.
        num_bytes: peak memory of the arrays, inputs and results included.
    """

    operations: int
    num_bytes: int

    def check(self, name: str, most: "GraphCost") -> None:
        """Raise PacketTooLarge if the cost exceeds `most`."""
        if self.operations > most.operations:
            raise PacketTooLarge(
                f"graph {name} takes {self.operations:.3g} operations; a model like this may take"
                f" {most.operations:.3g}"
            )
        if self.num_bytes > most.num_bytes:
            raise PacketTooLarge(
                f"graph {name} takes {self.num_bytes / 1e6:.0f} MB; here it may take"
                f" {most.num_bytes / 1e6:.0f} MB"
            )


def cost_of(name: str, graph: Graph, num_samples: int) -> GraphCost:
    """Return the cost of running a graph with `num_samples` samples.

    Args:
        name: name of the graph, for messages.
        graph: a graph that `Graph.check` accepted.
        num_samples: at least 1.

    Raises:
        PacketCorrupt: an operator is used in an unknown way, a size depends on the samples' content, shapes
            do not fit, or an output differs from its declaration.
        PacketTooLarge: a single node computes too much.
    """
    arrays: dict[str, Array | None] = {"": None}
    arrays |= {port.name: _given(port, num_samples) for port in graph.inputs}
    arrays |= {constant.name: _constant(constant) for constant in graph.constants}
    last = _last_uses(graph)
    held = peak = sum(array.num_bytes for array in arrays.values() if array)
    operations = 0
    for index, node in enumerate(graph.nodes):
        made = _made(name, node, arrays)
        arrays |= _results(node, made)
        if made.operations > MOST_AT_ONCE:
            raise PacketTooLarge(f"graph {name}: {node.op} takes {made.operations:.3g} operations at once")
        operations += made.operations
        held += sum(_bytes(arrays[output]) for output in node.outputs)
        peak = max(peak, held + made.workspace)
        held -= sum(_bytes(arrays[one]) for one in {*node.inputs, *node.outputs} if last.get(one) == index)
    _check_results(name, graph, arrays, num_samples)
    return GraphCost(operations, peak)


def shapes_of(graph: Graph, num_samples: int) -> dict[str, tuple[Type, tuple[int, ...]]]:
    """Return type and shape of every array when a graph runs with `num_samples` samples.

    Raises as `cost_of`.
    """
    arrays: dict[str, Array | None] = {"": None}
    arrays |= {port.name: _given(port, num_samples) for port in graph.inputs}
    arrays |= {constant.name: _constant(constant) for constant in graph.constants}
    for node in graph.nodes:
        arrays |= _results(node, _made("", node, arrays))
    return {name: (array.type, array.shape) for name, array in arrays.items() if array is not None}


def _made(name: str, node: Node, arrays: Mapping[str, Array | None]) -> Result:
    several = {"Split": len(node.outputs), "MaxPool": 2, "TopK": 2}.get(node.op, 1)
    if not 1 <= len(node.outputs) <= several:
        raise PacketCorrupt(f"graph {name}: {node.op} has {len(node.outputs)} results")
    try:
        made = RULES[node.op](Given(node, [arrays[one] for one in node.inputs]))
        need(len(made.array.shape) <= MAX_AXES, f"makes an array of {len(made.array.shape)} axes")
        need(made.array.size or made.array.type == "i8", "makes an empty array")  # runtimes divide by sizes
    except Unfit as problem:
        raise PacketCorrupt(f"graph {name}: {node.op} {problem}") from None
    return made


def _results(node: Node, made: Result) -> dict[str, Array]:
    """Return the arrays that a node makes, by name."""
    found = {output: made.array for output in node.outputs if output}
    if node.op in ("MaxPool", "TopK"):  # the second result holds the positions of the entries
        found |= {output: Array("i8", made.array.shape) for output in node.outputs[1:] if output}
    return found


def _given(port: Port, num_samples: int) -> Array:
    return Array(port.type, tuple(size if isinstance(size, int) else num_samples for size in port.shape))


def _constant(constant: Constant) -> Array:
    value = constant.value
    kind = _TYPES[value.dtype.kind]
    return Array(kind, value.shape, value if value.size <= KNOWN_ENTRIES else None)


def _bytes(array: Array | None) -> int:
    return 0 if array is None else array.num_bytes


def _last_uses(graph: Graph) -> dict[str, int]:
    """For each array that a node makes, the index of the last node that uses it. Outputs, inputs and
    constants are not listed: they stay in memory.
    """
    outputs_in_memory = {
        *graph.output_names,
        *(port.name for port in graph.inputs),
        *(one.name for one in graph.constants),
    }
    found: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        found |= dict.fromkeys((*node.inputs, *node.outputs), index)
    return {name: index for name, index in found.items() if name not in outputs_in_memory}


def _check_results(name: str, graph: Graph, arrays: Mapping[str, Array | None], num_samples: int) -> None:
    for port in graph.outputs:
        made, said = arrays[port.name], _given(port, num_samples)
        if made is None or (made.type, made.shape) != (said.type, said.shape):
            raise PacketCorrupt(f"graph {name}: {port.name} is not what it is said to be")
