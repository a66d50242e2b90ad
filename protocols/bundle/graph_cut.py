"""Splits a bundle's graphs at the last frozen layer, so that frozen layers run once for each sample.

The lower graph computes a sample's features; the upper graphs train from these. The boundary consists of the
arrays that the frozen part of the graph `train` passes to the trained part. The other graphs compute the same
arrays with the same operators under other names, so arrays are matched by how they are computed. A graph
cannot be split if its frozen part is random or if its trained part needs the samples themselves.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fleetune.protocols.bundle.bundle import TRAIN, Bundle
from fleetune.protocols.bundle.graph import Graph, Node, Port
from fleetune.protocols.bundle.graph_cost import shapes_of
from fleetune.protocols.model.spec import Dimension

_SAMPLES = "x"
_MOVING = frozenset(
    """
    Concat DepthToSpace Expand Flatten Gather Identity Pad Reshape Slice SpaceToDepth Split Squeeze Tile
    Transpose Unsqueeze
    """.split()  # noqa: SIM905 - a list of strings reads worse
    # Operators that only move, repeat or drop entries. A convolution's windows hold its input many times,
    # so the boundary is better placed before such operators.
)
_BATCH_SIZE = {"start": 0, "end": 1}  # attributes of a Shape node that reads only the number of samples


@dataclass(frozen=True)
class Cut:
    """A bundle split in two.

    Attributes:
        lower: graph from the samples and frozen tensors to the boundary's arrays.
        upper: the bundle's graphs by name, with the boundary's arrays as inputs in place of the samples.
    """

    lower: Graph
    upper: dict[str, Graph]

    @property
    def ports(self) -> list[tuple[Port, int]]:
        """The upper graphs' inputs for the boundary's arrays, in order, each with its numbers per sample."""
        return [
            (Port(f"boundary:{index}", port.type, port.shape), _size(port.shape))
            for index, port in enumerate(self.boundary)
        ]

    @property
    def boundary(self) -> tuple[Port, ...]:
        """The arrays between the two parts, float32; their first axis is the sample."""
        return self.lower.outputs

    @property
    def size(self) -> int:
        """Numbers per sample at the boundary."""
        return sum(_size(port.shape) for port in self.boundary)


def _size(shape: tuple[Dimension, ...]) -> int:
    """Return how many numbers a sample has in an array of this shape."""
    return math.prod(int(length) for length in shape[1:])


def cut(bundle: Bundle) -> Cut | None:
    """Return the split bundle; None if the trained part uses samples directly or a graph cannot be split."""
    if not bundle.spec.frozen:
        return None
    train, ways = bundle.graphs[TRAIN], _Ways()
    named = ways.of(train)
    chance = {port.name for port in train.inputs if port.name.startswith("noise:")}
    names = _boundary(train, {tensor.name for tensor in bundle.spec.tensors} | chance)
    if not names or _SAMPLES in names:
        return None
    rows = _rows(train)
    ports = [Port(f"boundary:{index}", "f4", rows[name].shape) for index, name in enumerate(names)]
    boundary = {named[name]: (port, rows[name].order) for name, port in zip(names, ports, strict=True)}
    lower = _lower(train, {name: rows[name] for name in names})
    upper = {}
    for name, graph in bundle.graphs.items():
        found = _upper(graph, ways.of(graph), boundary)
        if found is None:
            return None
        upper[name] = found
    return Cut(lower, upper)


@dataclass(frozen=True)
class _Rows:
    """How an array holds a row for each sample.

    Attributes:
        shape: its shape with the samples on the first axis.
        order: the order of its axes that puts the samples first; () if they are first. This order is its own
            inverse.
    """

    shape: tuple[Dimension, ...]
    order: tuple[int, ...] = ()


def _lower(train: Graph, boundary: Mapping[str, _Rows]) -> Graph:
    """Return the part of a graph that computes these arrays, with the samples on their first axis."""
    nodes, outputs = list(train.nodes), []
    for name, rows in boundary.items():
        made = f"{name}:rows" if rows.order else name
        nodes += [Node("Transpose", (name,), (made,), {"perm": rows.order})] if rows.order else []
        outputs.append(Port(made, "f4", rows.shape))
    graph = replace(train, nodes=tuple(nodes), outputs=tuple(outputs))
    return graph.keeping(graph.output_names)


class _Ways:
    """Numbers computations: arrays that are computed alike have the same number in all graphs."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def of(self, graph: Graph) -> dict[str, int]:
        """Return the number of each array of a graph, by the array's name."""
        found = {"": -1}
        for port in graph.inputs:
            found[port.name] = self._number(("in", port.name))
        for one in graph.constants:
            content = (one.value.dtype.str, one.value.shape, one.value.tobytes())
            found[one.name] = self._number(("constant", *content))
        for node in graph.nodes:
            computation = (
                node.op,
                tuple(found[name] for name in node.inputs),
                repr(sorted(node.attributes.items())),
                repr(node.body),
            )
            for place, name in enumerate(node.outputs):
                found[name] = self._number((*computation, place))
        return found

    def _number(self, computation: object) -> int:
        return self._known.setdefault(computation, len(self._known))


def _boundary(train: Graph, moving_inputs: Collection[str]) -> list[str] | None:
    """Return the arrays at the boundary: they depend on samples but not on trained inputs.

    The trained part uses them.

    An array that only rearranges smaller ones is replaced by these. None: an array has no row for each
    sample.

    Args:
        train: the graph.
        moving_inputs: inputs that change between uses of the same sample: trained tensors and noise.
    """
    of_samples, moving = {_SAMPLES}, set(moving_inputs)
    handed: dict[str, None] = {}
    for node in train.nodes:
        if moving.isdisjoint(node.inputs):
            if node.op != "Shape" and not of_samples.isdisjoint(node.inputs):
                of_samples.update(node.outputs)
            continue
        handed.update(dict.fromkeys(name for name in node.inputs if name in of_samples - moving))
        moving.update(node.outputs)
    shapes, found = {name: rows.shape for name, rows in _rows(train).items()}, dict[str, None]()
    made = {name: node for node in train.nodes for name in node.outputs}
    for name in handed:
        sources = _sources(name, made, of_samples)
        whole = _size(shapes[name]) if name in shapes else math.inf
        if sources <= shapes.keys() and sum(_size(shapes[one]) for one in sources) <= whole:
            found.update(dict.fromkeys(sorted(sources)))
        elif name in shapes:
            found[name] = None
        else:
            return None
    return list(found)


def _sources(name: str, made: Mapping[str, Node], of_samples: Collection[str]) -> set[str]:
    """Return the arrays whose entries the array `name` rearranges without computing new ones."""
    node = made.get(name)
    if node is None or node.op not in _MOVING:
        return {name}
    return {one for given in node.inputs if given in of_samples for one in _sources(given, made, of_samples)}


def _rows(graph: Graph) -> dict[str, _Rows]:
    """Return the float32 arrays that have a row for each sample, on the first or the second axis."""
    few, many = shapes_of(graph, 3), shapes_of(graph, 5)
    found = dict[str, _Rows]()
    samples: Dimension = "n"
    for name, (kind, shape) in few.items():
        rest, other = shape[1:], many[name][1]
        if kind == "f4" and shape[:1] == (3,) and other == (5, *rest):
            found[name] = _Rows((samples, *rest))
        elif kind == "f4" and shape[1:2] == (3,) and other == (shape[0], 5, *shape[2:]):
            found[name] = _Rows((samples, shape[0], *shape[2:]), (1, 0, *range(2, len(shape))))
    return found


def _upper(
    graph: Graph, ways: Mapping[str, int], boundary: Mapping[int, tuple[Port, tuple[int, ...]]]
) -> Graph | None:
    """Return the part of a graph above the boundary; None if it needs the samples themselves.

    Args:
        graph: the graph.
        ways: see `_Ways`.
        boundary: the port that replaces an array, and the order of its axes in the array (`_Rows.order`).
    """
    given, turns = dict[str, str](), dict[str, Node]()
    for name, (port, order) in ((name, boundary[way]) for name, way in ways.items() if way in boundary):
        given[name] = f"{port.name}:turned" if order else port.name
        if order:
            turns[given[name]] = Node("Transpose", (port.name,), (given[name],), {"perm": order})
    first = next(iter(boundary.values()))[0].name
    made = {name: node for node in graph.nodes for name in node.outputs}
    wanted, needed = list(graph.output_names), set[int]()
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        node = made.get(name)
        if name in seen or name in given or node is None:
            continue
        seen.add(name)
        if not _asks_for_number(node):
            wanted += node.inputs
        needed.add(id(node))
    nodes = [_fed(node, given, first) for node in graph.nodes if id(node) in needed]
    used = {name for node in nodes for name in node.inputs}
    nodes = [*(node for name, node in turns.items() if name in used), *nodes]
    used |= {name for node in nodes for name in node.inputs}
    if _SAMPLES in used:
        return None
    results = [Node("Identity", (given[name],), (name,), {}) for name in graph.output_names if name in given]
    used |= {given[name] for name in graph.output_names if name in given}
    ports = [port for port, _ in boundary.values() if port.name in used]
    return replace(
        graph,
        inputs=(*ports, *(port for port in graph.inputs if port.name in used)),
        nodes=(*nodes, *results),
        constants=tuple(one for one in graph.constants if one.name in used),
    )


def _asks_for_number(node: Node) -> bool:
    return node.op == "Shape" and node.inputs == (_SAMPLES,) and dict(node.attributes) == _BATCH_SIZE


def _fed(node: Node, given: Mapping[str, str], first: str) -> Node:
    if _asks_for_number(node):
        return replace(node, inputs=(first,))
    return replace(node, inputs=tuple(given.get(name, name) for name in node.inputs))
