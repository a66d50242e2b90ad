"""A graph's price and ONNX Runtime agree on every size, or the graph is refused before it runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import onnxruntime
import pytest
from tests.helpers.linear_bundle import bundle, training_graph

from fleetune.protocols.bundle.bundle import TRAIN, read_bundle
from fleetune.protocols.bundle.graph import MAX_NODES, Body, Constant, Graph, Node, Port
from fleetune.protocols.bundle.graph_arrays import Array, Given, Unfit
from fleetune.protocols.bundle.graph_rules import RULES
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import PacketError

F = np.float32
FAR = (2**31 - 1, 2**31, 2**63 - 1, -(2**31), -(2**63))


def evil(nodes, constants):
    """The bundle of a graph that also makes a large array if the content of the array `lie` is above zero."""
    more = (
        Node("Mul", ("lie", "far"), ("product",), {}),
        Node("Max", ("product", "one"), ("size",), {}),
        Node("Expand", ("loss", "size"), ("large",), {}),
    )
    arrays = {"far": np.array([4 * 10**8]), "one": np.array([1])} | constants
    train = training_graph()
    graph = replace(
        train,
        nodes=(*train.nodes, *nodes, *more),
        constants=(*train.constants, *(Constant(name, np.array(one)) for name, one in arrays.items())),
    )
    return bundle(graphs={**bundle().graphs, TRAIN: graph}).encoded()


def reduced(op, inputs=("given",), **attributes):
    """What the array `given` of two axes loses by a reduction."""
    return (
        Node(op, inputs, ("made",), attributes),
        Node("Shape", ("made",), ("sizes",), {"start": 0, "end": 1}),
        Node("Sub", ("sizes", "rows"), ("lie",), {}),
    )


def sliced(*inputs):
    """The size of a slice."""
    return Node("Slice", inputs, ("made",), {}), Node("Shape", ("made",), ("lie",), {})


def real(*nodes):
    """Nodes that make the real number `real`, and then the whole number `lie` out of it."""
    return (*nodes, Node("Cast", ("real",), ("lie",), {"to": 7}))


TWO_AXES = {"given": np.ones((2, 2), F), "rows": [2]}
REAL = "Expand has a size that depends on data"
LIES = {
    **{
        f"{op} over no axis": (reduced(op, axes=()), TWO_AXES, f"{op} is over no axis")
        for op in ("ReduceMax", "ReduceMean", "ReduceMin")
    },
    "ReduceSum over no axis": (
        reduced("ReduceSum", ("given", "none")),
        TWO_AXES | {"none": np.zeros(0, np.int64)},
        "ReduceSum is over no axis",
    ),
    "an axis twice": (reduced("ReduceMax", axes=(0, -2)), TWO_AXES, "ReduceMax has an axis of .* twice"),
    "keepdims of 2": (
        reduced("ReduceMax", axes=(0,), keepdims=2),
        TWO_AXES | {"rows": [1]},
        "ReduceMax has keepdims = 2, which is not 0 or 1",
    ),
    "keepdims of ArgMax": (reduced("ArgMax", keepdims=-1), TWO_AXES, "ArgMax has keepdims = -1"),
    "a start before the array": (
        sliced("given", "start", "end", "axis", "step"),
        {"given": [1, 2, 3], "start": [-100], "end": [-200], "axis": [0], "step": [-1]},
        "Slice of 3 goes back from -100 to -200",
    ),
    "a sliced axis twice": (
        sliced("given", "start", "end", "axes"),
        {"given": [1, 2, 3], "start": [0, 0], "end": [2, 0], "axes": [0, -1]},
        "Slice has an axis of .* twice",
    ),
    "a power": (
        real(
            Node("Pow", ("base", "three"), ("power",), {}),
            Node("Sub", ("power", "cube"), ("rest",), {}),
            Node("Mul", ("rest", "much"), ("real",), {}),
        ),
        {"base": F([1.7]), "three": F([3]), "cube": F([1.7]) ** F(3), "much": F([1e15])},
        REAL,
    ),
    "a quotient": (
        real(Node("Div", ("given", "other"), ("real",), {})), {"given": F([0]), "other": F([0])}, REAL,
    ),
    "a real constant": ((Node("Cast", ("given",), ("lie",), {"to": 7}),), {"given": F([1e30])}, REAL),
    "a bool of seven": (
        (Node("Cast", ("given",), ("lie",), {"to": 7}),), {"given": np.frombuffer(b"\x07", np.bool_)}, REAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_size_that_the_runtime_sees_differently_is_refused(name):
    nodes, constants, reason = LIES[name]
    with pytest.raises(PacketError, match=reason) as caught:
        read_bundle(evil(nodes, constants))
    assert "\n" not in str(caught.value)


FLAGS = [
    ("Gemm", "transA"),
    ("Gemm", "transB"),
    ("CumSum", "exclusive"),
    ("CumSum", "reverse"),
    ("TopK", "largest"),
    ("ArgMax", "keepdims"),
    ("ReduceSum", "keepdims"),
    ("ReduceMean", "keepdims"),
]


@pytest.mark.parametrize(("op", "name"), FLAGS)
@pytest.mark.parametrize("value", [2, -1, 1.0, "1", (1,)])
def test_a_flag_is_0_or_1(op, name, value):
    with pytest.raises(Unfit, match=name):
        said(op, [np.ones((2, 2), F), np.array([1])], **{name: value})


def said(op, arrays, results=1, **attributes):
    """What a rule says that an operator makes of these constants."""
    names = tuple(f"i{index}" for index in range(len(arrays)))
    kinds = {"f": "f4", "i": "i8", "b": "?"}
    given = [
        Array(kinds[one.dtype.kind], one.shape, one if one.dtype.kind == "i" else None) for one in arrays
    ]
    return RULES[op](Given(Node(op, names, ("z", "y")[:results], attributes), given)).array


def runtime_of(op, arrays, **attributes):
    """A function that runs one operator on arrays like these."""
    ports = tuple(
        Port(f"i{index}", {"f": "f4", "i": "i8"}[one.dtype.kind], (f"n{index}",) * one.ndim)
        for index, one in enumerate(arrays)
    )
    kind = "i8" if op == "Shape" or arrays[0].dtype.kind == "i" else "f4"
    names = tuple(port.name for port in ports)
    graph = Graph(ports, (Port("z", kind, ("m",)),), (Node(op, names, ("z",), attributes),), ())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(write_onnx(graph), options)
    return lambda *them: session.run(None, dict(zip(names, them, strict=True)))[0]


@pytest.mark.parametrize("size", [0, 1, 3, 4])
def test_slices_are_those_of_the_runtime(size):
    x, zero = np.arange(size), np.array([0])
    run = runtime_of("Slice", [x] + [zero] * 4)
    compared = 0
    for start, end, step in product(
        (*range(-6, 7), *FAR), (*range(-6, 7), *FAR), (1, 2, 5, -1, -2, -5, *FAR)
    ):
        given = [x, np.array([start]), np.array([end]), zero, np.array([step])]
        try:
            shape = said("Slice", given).shape
        except Unfit:
            continue
        assert run(*given).shape == shape, (start, end, step)
        compared += 1
    assert compared > 1500


@pytest.mark.parametrize(("start", "end"), [(a, b) for a in range(-4, 5) for b in range(-4, 5)])
def test_cut_shapes_are_those_of_the_runtime(start, end):
    x = np.ones((2, 3), F)
    attributes = {"start": start, "end": end}
    assert (
        runtime_of("Shape", [x], **attributes)(x).tolist()
        == said("Shape", [x], **attributes).content.tolist()
    )


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Max", "Min"])
def test_followed_numbers_are_those_of_the_runtime(op):
    several = np.array([0, 1, -1, 3, 2**31, -(2**62) - 1, 2**63 - 1, -(2**63)])
    a, b = (one.ravel() for one in np.meshgrid(several, several))
    assert said(op, [a, b]).content.tolist() == runtime_of(op, [a, b])(a, b).tolist()


def relus(count):
    return tuple(Node("Relu", ("loss",), (f"r{index}",), {}) for index in range(count))


def looping(bodies, count):
    body = Body(("0", "entry"), (f"{count}",), tuple(
        Node("Add", (f"{index}", "entry"), (f"{index + 1}",), {}) for index in range(count)
    ))  # fmt: skip
    attributes = {"states": 1, "scanned": 1, "reverse": 0}
    return tuple(
        Node("Scan", ("mean", "logp"), (f"loop {index}",), attributes, body) for index in range(bodies)
    )


@pytest.mark.parametrize("nodes", [relus(MAX_NODES), looping(20, 500)], ids=["nodes", "bodies"])
def test_a_graph_that_takes_minutes_to_start_is_refused(nodes):
    train = training_graph()
    graph = replace(train, nodes=(*train.nodes, *nodes))
    with pytest.raises(PacketError, match=r"graph has 100\d\d operators, of 10000 at most"):
        read_bundle(bundle(graphs={**bundle().graphs, TRAIN: graph}).encoded())
