"""Loops in a bundle: what is sent, what it costs, what the runtime makes of it, and what is refused."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from msgspec import UNSET
from tests.helpers.linear_bundle import bundle, training_graph

from fleetune.coordinator.serving.bundle_server import BundleMade
from fleetune.protocols.bundle.bundle import TRAIN, read_bundle
from fleetune.protocols.bundle.graph import Body, Constant, Graph, Node, Port
from fleetune.protocols.bundle.graph_cost import START_OPERATIONS, cost_of
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import PacketError

STEPS, WIDTH, HALF = 6, 4, np.array(0.5, np.float32)
BODY = Body(
    ("state", "entry", "weight", "half"),
    ("new", "twice", "copy"),
    (
        Node("MatMul", ("state", "weight"), ("product",), {}),
        Node("Add", ("product", "entry"), ("new",), {}),
        Node("Concat", ("new", "new"), ("twice",), {"axis": 1}),
        Node("Mul", ("new", "half"), ("copy",), {}),
    ),
)
SCAN = Node(
    "Scan", ("h", "x", "w", "half"), ("last", "z", "halves"), {"states": 1, "scanned": 1, "reverse": 1}, BODY
)
GRAPH = Graph(
    (Port("h", "f4", ("n", WIDTH)), Port("x", "f4", (STEPS, "n", WIDTH)), Port("w", "f4", (WIDTH, WIDTH))),
    (
        Port("last", "f4", ("n", WIDTH)),
        Port("z", "f4", (STEPS, "n", 2 * WIDTH)),
        Port("halves", "f4", (STEPS, "n", WIDTH)),
    ),
    (SCAN,),
    (Constant("half", HALF),),
)


def given():
    rng = np.random.default_rng(1)
    shapes = {"h": (3, WIDTH), "x": (STEPS, 3, WIDTH), "w": (WIDTH, WIDTH)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("reverse", [0, 1])
def test_a_loop_computes_its_body_step_by_step(reverse):
    graph = replace(GRAPH, nodes=(replace(SCAN, attributes={**SCAN.attributes, "reverse": reverse}),))
    graph.check()
    data, arrays = write_onnx(graph), given()
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    last, twice, halves = onnxruntime.InferenceSession(data).run(None, arrays)
    state, places = arrays["h"], range(STEPS)
    for place in reversed(places) if reverse else places:
        state = state @ arrays["w"] + arrays["x"][place]
        np.testing.assert_allclose(twice[place], np.concatenate([state, state], 1), rtol=1e-5)
        np.testing.assert_allclose(halves[place], state / 2, rtol=1e-5)
    np.testing.assert_allclose(last, state, rtol=1e-5)


def test_a_loop_costs_its_body_for_each_step():
    product, others = 2 * 3 * WIDTH * WIDTH, 3 * WIDTH * (2 + 2 + 2)
    cost = cost_of("g", GRAPH, 3)
    assert cost.operations == STEPS * (product + others + 5 * START_OPERATIONS)
    arrays = given()
    made = onnxruntime.InferenceSession(write_onnx(GRAPH)).run(None, arrays)
    held = sum(one.nbytes for one in (*arrays.values(), *made))
    assert held < cost.num_bytes < held + 1000


def test_a_loop_comes_back_from_a_bundle_and_its_operators_are_asked_of_agents():
    train = training_graph()
    arrays = tuple(Constant(name, value) for name, value in {**given(), "half": HALF}.items() if name != "x")
    loop = replace(SCAN, inputs=("h", "steps", "w", "half"))
    steps = Constant("steps", given()["x"])
    train = replace(train, nodes=(*train.nodes, loop), constants=(*train.constants, *arrays, steps))
    back = read_bundle(bundle(graphs={**bundle().graphs, TRAIN: train}).encoded())
    assert back.graphs[TRAIN].nodes[-1] == loop
    assert {"Scan", "Add", "Concat"} <= set(BundleMade.of(back).needed.operators)


def test_what_is_not_wanted_of_a_loop_is_cut_from_its_body():
    (loop,) = GRAPH.keeping({"halves"}).nodes
    assert loop.outputs == ("last", "halves")
    assert [node.op for node in loop.body.nodes] == ["MatMul", "Add", "Mul"]
    arrays = given()
    (halves,) = onnxruntime.InferenceSession(write_onnx(GRAPH.keeping({"halves"}))).run(None, arrays)
    np.testing.assert_array_equal(
        halves, onnxruntime.InferenceSession(write_onnx(GRAPH)).run(["halves"], arrays)[0]
    )
    assert GRAPH.keeping(GRAPH.output_names) == GRAPH


def scan(**changes):
    return replace(GRAPH, nodes=(replace(SCAN, **changes),))


def with_body(**changes):
    return scan(body=replace(BODY, **changes))


def with_more(node):
    return with_body(nodes=(*BODY.nodes, node))


def attributes(**changes):
    return scan(attributes={**SCAN.attributes, **changes})


def of_steps(count, *nodes):
    """A loop over many short entries."""
    given = (Port("h", "f4", (1,)), Port("x", "f4", (count, 1)))
    chain = [Node("Neg", (f"{index}",), (f"{index + 1}",), {}) for index in range(1000)]
    body = Body(("0", "entry"), ("1000",), tuple(chain))
    loop = Node("Scan", ("h", "x"), ("last",), {"states": 1, "scanned": 1, "reverse": 0}, body)
    return Graph(given, (Port("last", "f4", (1,)),), (loop,), ())


WITH_BODY = Node("Neg", ("state",), ("y",), {}, BODY)
HOSTILE = {
    "no body": (scan(body=UNSET), "lacks its body"),
    "a body elsewhere": (replace(GRAPH, nodes=(SCAN, replace(WITH_BODY, inputs=("h",)))), "Neg has a body"),
    "a loop in a loop": (with_more(replace(SCAN, outputs=("a", "b", "c"))), "of another"),
    "a body in a body": (with_more(WITH_BODY), "Neg has a body"),
    "an unknown operator": (with_more(Node("If", ("entry",), ("y",), {})), "'If' is not known"),
    "arrays of outside": (with_more(Node("Neg", ("h",), ("y",), {})), "'h' out of order"),
    "an array twice": (with_more(Node("Neg", ("entry",), ("new",), {})), "'new' out of order"),
    "results that are inputs": (with_body(outputs=("new", "twice", "entry")), "does not make"),
    "a result twice": (with_body(outputs=("new", "twice", "twice")), "does not make"),
    "a result without a name": (scan(outputs=("last", "z", "")), "does not make|halves"),
    "equal inputs": (with_body(inputs=("state", "entry", "weight", "weight")), "equal inputs"),
    "fewer inputs": (scan(inputs=("h", "x", "w")), "other inputs"),
    "fewer results": (with_body(outputs=("new", "twice")), "other outputs"),
    "no state": (attributes(states=0, scanned=2), "other inputs"),
    "nothing to scan": (attributes(scanned=0), "other inputs"),
    "more scanned than there is": (attributes(scanned=9), "other inputs"),
    "a huge number of states": (attributes(states=2**62), "invalid states"),
    "a negative number": (attributes(states=-1, scanned=3), "other inputs"),
    "a number that is a text": (attributes(states="1"), "invalid states"),
    "another direction": (attributes(reverse=2), "reverse = 2, which is not 0 or 1"),
    "an unknown attribute": (attributes(axes=1), "not known here"),
    "a state that grows": (with_body(outputs=("twice", "new", "copy")), "changes a shape"),
    "states of another kind": (
        with_body(nodes=(*BODY.nodes[:3], Node("Greater", ("new", "half"), ("copy",), {}))), "than float32"
    ),
    "unlike numbers of steps": (attributes(scanned=2), "unlike numbers of steps"),
    "a number to scan": (
        replace(GRAPH, nodes=(replace(SCAN, inputs=("h", "half", "w", "x")),)), "unlike numbers of steps"
    ),
    "very many steps": (of_steps(10**7), "operations at once"),
    "steps for hours": (of_steps(10**5), "a model like this may take"),
    "an entry too large": (
        with_body(nodes=(*BODY.nodes[:3], Node("Mul", ("new", "half"), ("copy",), {"axis": 1}))), "attribute"
    ),
}  # fmt: skip


def priced(graph):
    """Check the graph as a bundle's graphs are when it is read."""
    graph.check()
    cost_of("more", graph, 3).check("more", bundle().most(3))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_loop_is_refused_before_it_runs(name):
    graph, reason = HOSTILE[name]
    with pytest.raises(PacketError, match=reason) as caught:
        priced(graph)
    assert "\n" not in str(caught.value)
