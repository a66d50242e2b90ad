"""The cost of running a graph, computed before it runs; see `protocols.bundle.graph_rules`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fleetune.protocols.bundle.graph import Body, Constant, Graph, Node, Port, Type
from fleetune.protocols.bundle.graph_arrays import KNOWN_ENTRIES, Array, Given, Result, Unfit, need
from fleetune.protocols.bundle.graph_rules import RULES
from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.model.spec import MAX_AXES

# operations of one node: minutes at 1 GFLOPS, and a running node cannot be interrupted
MOST_AT_ONCE = 2 * 10**11
START_OPERATIONS = 1000  # a runtime takes about a microsecond to start a node, however small its arrays are
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
    given = _given_arrays(graph, num_samples)
    kept = {*graph.output_names, *given}
    arrays, cost = _run(name, graph.nodes, given, kept)
    _check_results(name, graph, arrays, num_samples)
    return cost


def shapes_of(graph: Graph, num_samples: int) -> dict[str, tuple[Type, tuple[int, ...]]]:
    """Return type and shape of every array when a graph runs with `num_samples` samples.

    Raises as `cost_of`.
    """
    arrays, _ = _run("", graph.nodes, _given_arrays(graph, num_samples), ())
    return {name: (array.type, array.shape) for name, array in arrays.items() if array is not None}


Arrays = dict[str, Array | None]


def _given_arrays(graph: Graph, num_samples: int) -> Arrays:
    arrays: Arrays = {"": None}
    arrays |= {port.name: _given(port, num_samples) for port in graph.inputs}
    return arrays | {constant.name: _constant(constant) for constant in graph.constants}


def _run(name: str, nodes: Sequence[Node], given: Arrays, kept: Collection[str]) -> tuple[Arrays, GraphCost]:
    """Return all arrays by name, and the cost of computing them.

    Args:
        name: name of the graph, for messages.
        nodes: the operators in their order.
        given: arrays that are there before, by name.
        kept: arrays that stay in memory until the end.
    """
    arrays, last = dict(given), _last_uses(nodes, kept)
    held = peak = sum(array.num_bytes for array in arrays.values() if array)
    operations = 0
    for index, node in enumerate(nodes):
        made = _made(name, node, arrays)
        arrays |= _results(node, made)
        if made.operations > MOST_AT_ONCE:
            raise PacketTooLarge(f"graph {name}: {node.op} takes {made.operations:.3g} operations at once")
        operations += made.operations
        held += sum(_bytes(arrays[output]) for output in node.outputs)
        peak = max(peak, held + made.workspace)
        held -= sum(_bytes(arrays[one]) for one in {*node.inputs, *node.outputs} if last.get(one) == index)
    return arrays, GraphCost(operations, peak)


def _made(name: str, node: Node, arrays: Mapping[str, Array | None]) -> Result:
    several = {"Split": len(node.outputs), "Scan": len(node.outputs), "MaxPool": 2, "TopK": 2}
    if not 1 <= len(node.outputs) <= several.get(node.op, 1):
        raise PacketCorrupt(f"graph {name}: {node.op} has {len(node.outputs)} results")
    given = Given(node, [arrays[one] for one in node.inputs])
    try:
        made = _scan(name, given, node.body) if isinstance(node.body, Body) else RULES[node.op](given)
        for array in (made.array, *made.others):
            need(len(array.shape) <= MAX_AXES, f"makes an array of {len(array.shape)} axes")
            need(array.size or array.type == "i8", "makes an empty array")  # runtimes divide by sizes
    except Unfit as problem:
        raise PacketCorrupt(f"graph {name}: {node.op} {problem}") from None
    return made


def _scan(name: str, given: Given, body: Body) -> Result:
    """Return the results of a node that repeats its body, see `protocols.bundle.graph.Node`."""
    given.only("states scanned reverse")
    states, scanned = given.number("states", 0), given.number("scanned", 0)
    inputs, own = given.all, states + scanned
    need(states >= 1 <= scanned and own <= len(inputs) == len(body.inputs), "has a body of other inputs")
    need(states <= given.count == len(body.outputs), "has a body of other outputs")
    need(all(one.type == "f4" for one in inputs[:own]), "repeats with other numbers than float32")
    lengths = {one.shape[:1] for one in inputs[states:own]}
    need(len(lengths) == 1 and () not in lengths, "has unlike numbers of steps")
    ((steps,),) = lengths
    entries = [
        *(replace(one, content=None) for one in inputs[:states]),
        *(Array("f4", one.shape[1:]) for one in inputs[states:own]),
        *inputs[own:],
    ]
    step: Arrays = {"": None, **dict(zip(body.inputs, entries, strict=True))}
    arrays, cost = _run(name, body.nodes, step, {*step, *body.outputs})
    made = [one for one in (arrays[output] for output in body.outputs) if one]
    need(len(made) == given.count and all(one.type == "f4" for one in made), "has other results than float32")
    need([one.shape for one in made[:states]] == [one.shape for one in inputs[:states]], "changes a shape")
    results = [
        Array("f4", one.shape if index < states else (steps, *one.shape)) for index, one in enumerate(made)
    ]
    operations = steps * (cost.operations + START_OPERATIONS * (1 + len(body.nodes)))
    workspace = cost.num_bytes - sum(one.num_bytes for one in inputs[own:])
    return Result(results[0], operations, workspace, tuple(results[1:]))


def _results(node: Node, made: Result) -> dict[str, Array]:
    """Return the arrays that a node makes, by name."""
    if made.others:
        return dict(zip(node.outputs, (made.array, *made.others), strict=True))
    found = {output: made.array for output in node.outputs if output}
    if node.op in ("MaxPool", "TopK"):  # the second result holds the positions of the entries
        found |= {output: Array("i8", made.array.shape) for output in node.outputs[1:] if output}
    return found


def _given(port: Port, num_samples: int) -> Array:
    return Array(port.type, tuple(size if isinstance(size, int) else num_samples for size in port.shape))


def _constant(constant: Constant) -> Array:
    value = constant.value
    kind = _TYPES[value.dtype.kind]
    known = kind == "i8" and value.size <= KNOWN_ENTRIES
    return Array(kind, value.shape, value if known else None)


def _bytes(array: Array | None) -> int:
    return 0 if array is None else array.num_bytes


def _last_uses(nodes: Sequence[Node], kept: Collection[str]) -> dict[str, int]:
    """For each array that may be freed, the index of the last node that uses it."""
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        found |= dict.fromkeys((*node.inputs, *node.outputs), index)
    return {name: index for name, index in found.items() if name not in kept}


def _check_results(name: str, graph: Graph, arrays: Mapping[str, Array | None], num_samples: int) -> None:
    for port in graph.outputs:
        made, said = arrays[port.name], _given(port, num_samples)
        if made is None or (made.type, made.shape) != (said.type, said.shape):
            raise PacketCorrupt(f"graph {name}: {port.name} is not what it is said to be")
