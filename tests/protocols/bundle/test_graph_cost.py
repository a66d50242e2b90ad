"""What a graph takes is known before it runs; what would take too much, or end the process, never runs."""

import re
import threading
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from tests.helpers.linear_bundle import bundle, training_graph

from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.onnx_sessions import Sessions
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle.bundle import ANSWER, TRAIN, read_bundle
from fleetune.protocols.bundle.graph import OPERATORS, Constant, Graph, Node, Port
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.graph_rules import RULES
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.errors import ModelError, PacketCorrupt, PacketError, PacketTooLarge, TrainingStopped
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.randomness import Key

X = Port("x", "f4", ("n", 4))


def graph_of(*nodes, inputs=(X,), constants=None, shape=("n", 4), kind="f4"):
    """Nodes whose last one makes `z`."""
    arrays = tuple(Constant(name, np.array(value)) for name, value in (constants or {}).items())
    return Graph(tuple(inputs), (Port("z", kind, shape),), nodes, arrays)


def test_every_operator_that_may_stand_in_a_bundle_has_a_rule():
    assert {*RULES, "Scan"} == OPERATORS


F = np.float32
IMAGE = np.linspace(-1, 1, 2 * 4 * 6 * 6, dtype=F).reshape(2, 4, 6, 6)
KERNEL = np.linspace(-1, 1, 8 * 2 * 3 * 3, dtype=F).reshape(8, 2, 3, 3)
TABLE = np.arange(12, dtype=F).reshape(3, 4)
CASES = [
    ("MatMul", {}, [np.ones((5, 1, 3, 4), F), np.ones((2, 4, 6), F)]),
    ("Gemm", {"transA": 1, "transB": 1, "alpha": 2.0}, [TABLE, np.ones((5, 3), F), np.ones(5, F)]),
    ("Conv", {"group": 2, "strides": (2, 1), "pads": (1, 0, 2, 1), "dilations": (1, 2)}, [IMAGE, KERNEL]),
    ("Conv", {"kernel_shape": (3, 3)}, [IMAGE, np.ones((5, 4, 3, 3), F), np.ones(5, F)]),
    ("ConvTranspose", {"strides": (2, 3), "pads": (1, 1, 0, 1), "output_padding": (1, 0)},
     [IMAGE, np.ones((4, 5, 3, 3), F)]),
    ("ConvTranspose", {"group": 2, "dilations": (2, 1)}, [IMAGE, np.ones((4, 3, 3, 3), F)]),
    ("MaxPool", {"kernel_shape": (2, 3), "strides": (2, 2), "pads": (0, 1, 1, 1)}, [IMAGE]),
    ("Reshape", {}, [TABLE, np.array([2, -1])]),
    ("Reshape", {}, [TABLE, np.array([0, 2, 2])]),
    ("Transpose", {"perm": (0, 2, 3, 1)}, [IMAGE]),
    ("Transpose", {}, [TABLE]),
    ("Concat", {"axis": -1}, [TABLE, np.ones((3, 1), F)]),
    ("Slice", {}, [TABLE, np.array([1, -2]), np.array([2**31, -1]), np.array([0, 1])]),
    ("Slice", {}, [TABLE, np.array([-1]), np.array([-100]), np.array([1]), np.array([-2])]),
    ("Gather", {"axis": 1}, [TABLE, np.array([[0, 3], [1, 1]])]),
    ("GatherElements", {"axis": 1}, [TABLE, np.array([[0, 3], [1, 1], [2, 2]])]),
    ("ScatterElements", {"axis": 0, "reduction": "add"}, [TABLE, np.array([[0, 1]]), np.ones((1, 2), F)]),
    ("ScatterND", {"reduction": "add"}, [TABLE, np.array([[2], [2]]), np.ones((2, 4), F)]),
    ("Expand", {}, [np.ones((3, 1), F), np.array([2, 1, 5])]),
    ("Tile", {}, [TABLE, np.array([2, 3])]),
    ("ConstantOfShape", {}, [np.array([2, 3])]),
    ("Pad", {}, [TABLE, np.array([0, -1, 2, 3])]),
    ("OneHot", {"axis": 1}, [np.array([0, 2]), np.array(3), np.array([0, 1], F)]),
    ("ReduceMax", {"axes": (-1,), "keepdims": 0}, [IMAGE]),
    ("ReduceMean", {}, [IMAGE]),
    ("ReduceSum", {"keepdims": 0}, [IMAGE, np.array([0, 2])]),
    ("ArgMax", {"axis": 1, "keepdims": 0}, [TABLE]),
    ("TopK", {"axis": 1, "largest": 0}, [TABLE, np.array([3])]),
    ("Shape", {"start": 1, "end": 3}, [IMAGE]),
    ("SpaceToDepth", {"blocksize": 2}, [IMAGE]),
    ("DepthToSpace", {"blocksize": 2}, [IMAGE]),
    ("Where", {}, [np.array([True, False, True, True]), TABLE, np.ones((5, 1, 1), F)]),
    ("Cast", {"to": 7}, [TABLE]),
    ("CumSum", {}, [TABLE, np.array(0)]),
    ("Add", {}, [TABLE, np.ones((2, 1, 1), F)]),
    ("Less", {}, [TABLE, np.ones(4, F)]),
    ("Softmax", {"axis": 1}, [TABLE]),
    ("Clip", {}, [TABLE, np.array(0, F), np.array(1, F)]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes", "arrays"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_says_what_the_runtime_makes(op, attributes, arrays):
    names = [f"i{index}" for index in range(len(arrays))]
    kinds = {"f": "f4", "i": "i8", "b": "?"}
    node = Node(op, tuple(names), ("z", "places") if op == "TopK" else ("z",), attributes)
    constants = tuple(Constant(name, one) for name, one in zip(names, arrays, strict=True))
    bare = Graph((), (Port("z", "f4", ()),), (node,), constants)
    session = onnxruntime.InferenceSession(_without_port(bare))
    (made,) = session.run(None, {})
    said = replace(bare, outputs=(Port("z", kinds[made.dtype.kind], made.shape),))
    assert cost_of("g", said, 1).num_bytes >= made.nbytes
    for wrong in ((*made.shape, 1), (made.size + 1,)):
        with pytest.raises(PacketCorrupt, match="z is not what it is said to be"):
            cost_of("g", replace(said, outputs=(replace(said.outputs[0], shape=wrong),)), 1)


def _without_port(graph):
    """Its file, the result's type left for the runtime to find."""
    import onnx

    model = onnx.load_from_string(write_onnx(graph))
    del model.graph.output[:]
    model.graph.output.append(onnx.ValueInfoProto(name="z"))
    return model.SerializeToString()


def test_costs_of_shipped_bundles_are_near_what_is_said_of_the_models():
    made = shipped_bundle("lenet5", (3, 32, 32), 10)
    costs = {name: cost_of(name, graph, 32) for name, graph in made.graphs.items()}
    said = 32 * made.flops_per_sample
    assert 1.0 < costs[TRAIN].operations / said < 1.2
    assert 0.3 < costs[ANSWER].operations / said < 0.5
    assert costs[TRAIN].num_bytes > 4 * (2 * made.spec.size + 32 * 3 * 32 * 32)


HOSTILE = {
    "division of whole numbers by zero": graph_of(
        Node("Div", ("i", "zero"), ("z",), {}), constants={"i": [7], "zero": [0]}, shape=(1,), kind="i8"
    ),
    "division of the least whole number by -1": graph_of(
        Node("Div", ("i", "m"), ("z",), {}), constants={"i": [-(2**63)], "m": [-1]}, shape=(1,), kind="i8"
    ),
    "division by the number of samples less three": graph_of(
        Node("Shape", ("x",), ("s",), {"end": 1}),
        Node("Sub", ("s", "three"), ("d",), {}),
        Node("Div", ("i", "d"), ("z",), {}),
        constants={"i": [7], "three": [3]},
        shape=(1,),
        kind="i8",
    ),
    "remainder": graph_of(
        Node("Mod", ("i", "zero"), ("z",), {}), constants={"i": [7], "zero": [0]}, shape=(1,), kind="i8"
    ),
    "a loop": graph_of(Node("Loop", ("x",), ("z",), {})),
    "an if": graph_of(Node("If", ("x",), ("z",), {})),
    "a huge constant": graph_of(
        Node("ConstantOfShape", ("s",), ("z",), {}), constants={"s": [2**20, 2**20]}, shape=(2**20, 2**20)
    ),
    "a huge expansion": graph_of(
        Node("Expand", ("x", "s"), ("z",), {}), constants={"s": [2**40, 1, 1]}, shape=(2**40, "n", 4)
    ),
    "a huge tile": graph_of(Node("Tile", ("x", "t"), ("z",), {}), constants={"t": [2**20, 2**20]}),
    "a huge pad": graph_of(Node("Pad", ("x", "p"), ("z",), {}), constants={"p": [0, 0, 2**40, 0]}),
    "a huge product": graph_of(
        Node("Expand", ("x", "s"), ("y",), {}),
        Node("Transpose", ("y",), ("t",), {"perm": (0, 2, 1)}),
        Node("MatMul", ("y", "t"), ("z",), {}),
        constants={"s": [2**22, 1, 1]},
        shape=(2**22, "n", "n"),
    ),
    "a size out of the samples": graph_of(
        Node("Cast", ("x",), ("i",), {"to": 7}),
        Node("Reshape", ("i", "flat"), ("s",), {}),
        Node("ConstantOfShape", ("s",), ("z",), {}),
        constants={"flat": [-1]},
    ),
    "a reshape to nothing": graph_of(Node("Reshape", ("x", "s"), ("z",), {}), constants={"s": [0, -1, 0]}),
    "an empty array": graph_of(Node("ConstantOfShape", ("s",), ("z",), {}), constants={"s": [0]}, shape=(0,)),
    "an unknown attribute": graph_of(Node("Softmax", ("x",), ("z",), {"body": 1})),
    "a stride of zero": graph_of(
        Node("MaxPool", ("m",), ("z",), {"kernel_shape": (2, 2), "strides": (0, 0)}),
        constants={"m": IMAGE},
    ),
    "a block of zero": graph_of(
        Node("SpaceToDepth", ("m",), ("z",), {"blocksize": 0}), constants={"m": IMAGE}
    ),
    "no groups": graph_of(
        Node("Conv", ("m", "k"), ("z",), {"group": 0}), constants={"m": IMAGE, "k": KERNEL}
    ),
    "a kernel larger than its image": graph_of(
        Node("Conv", ("m", "k"), ("z",), {"dilations": (2**30, 2**30)}),
        constants={"m": IMAGE, "k": np.ones((1, 4, 2, 2), F)},
    ),
    "an axis that is not there": graph_of(
        Node("Softmax", ("x",), ("z",), {}), Node("Concat", ("z",), ("y",), {"axis": 9})
    ),
    "many axes to sum over": graph_of(Node("ReduceSum", ("x", "a"), ("z",), {}), constants={"a": [0] * 999}),
    "more sizes than axes": graph_of(Node("ReduceSum", ("x", "a"), ("z",), {}), constants={"a": [0] * 17}),
    "many axes": graph_of(Node("Reshape", ("one", "s"), ("z",), {}), constants={"s": [1] * 9, "one": [7]}),
    "another result": graph_of(Node("Relu", ("x",), ("z",), {}), shape=("n", 5)),
}  # fmt: skip


REASONS = {
    **dict.fromkeys([name for name in HOSTILE if name.startswith("division")], "Div is of whole numbers"),
    "remainder": "operator 'Mod' is not known",
    "a loop": "operator 'Loop' is not known",
    "an if": "operator 'If' is not known",
    "a huge constant": "operations at once",
    "a huge expansion": "operations",
    "a huge tile": "operations",
    "a huge pad": "operations",
    "a huge product": "takes 554 MB; here it may take 67 MB",
    "a size out of the samples": "a size that depends on data",
    "a reshape to nothing": "Reshape of|Reshape is",
    "an empty array": "makes an empty array",
    "an unknown attribute": "attribute 'body', which is not known",
    "a stride of zero": "has no kernel",
    "a block of zero": "by 0",
    "no groups": "is of",
    "a kernel larger than its image": "has a kernel larger than",
    "an axis that is not there": "has axis 9 of 2",
    "many axes to sum over": "a size that depends on data",
    "more sizes than axes": "has 17 sizes",
    "many axes": "makes an array of 9 axes",
    "another result": "z is not what it is said to be",
}


def priced(graph, num_samples=3):
    """As a bundle's graphs are when it is read."""
    graph.check()
    cost_of("more", graph, num_samples).check("more", bundle().most(num_samples))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_before_it_runs(name):
    with pytest.raises(PacketError) as caught:
        priced(HOSTILE[name])
    assert "\n" not in str(caught.value)
    assert re.search(REASONS[name], str(caught.value))


def test_a_bundle_with_such_a_graph_is_not_read():
    train = training_graph()
    huge = Node("Expand", ("loss", "size"), ("nobody wants it",), {})
    bomb = replace(
        train, nodes=(*train.nodes, huge), constants=(*train.constants, Constant("size", np.array([2**28])))
    )
    with pytest.raises(PacketTooLarge, match="graph train takes 1074 MB; here it may take"):
        read_bundle(bundle(graphs={**bundle().graphs, TRAIN: bomb}).encoded())


def chained(count, width=64):
    """Products one behind the other: a few bytes a node, and as long as you like."""
    nodes = [Node("MatMul", (f"h{index}", "w"), (f"h{index + 1}",), {}) for index in range(count)]
    port = Port("h0", "f4", (width, width))
    return Graph(
        (port, Port("w", "f4", (width, width))), (Port(f"h{count}", "f4", (width, width)),), tuple(nodes), ()
    )


def test_chained_products_are_priced_as_a_whole():
    with pytest.raises(
        PacketTooLarge, match=r"graph more takes 5\.37e\+11 operations; a model like this may take"
    ):
        priced(chained(2000, 512))


def test_noises_are_what_a_graph_takes():
    with pytest.raises(PacketCorrupt, match="takes no noise:0"):
        read_bundle(bundle(noises=(Noise(("n", 2**39), 0.5),)).encoded())


def test_what_reads_well_for_few_samples_is_priced_again_for_as_many_as_there_are():
    """A size that falls with the number of samples: the last batch is the largest."""
    falling = graph_of(
        Node("Shape", ("x",), ("s",), {"end": 1}),
        Node("Mul", ("s", "minus"), ("m",), {}),
        Node("Add", ("m", "start"), ("size",), {}),
        Node("ConstantOfShape", ("size",), ("c",), {}),
        Node("ReduceSum", ("c",), ("r",), {}),
        Node("Add", ("x", "r"), ("z",), {}),
        constants={"minus": [-(2**38)], "start": [3 * 2**38 + 1]},
    )
    made = bundle(graphs={**bundle().graphs, "more": falling})
    priced(falling)
    sessions = Sessions(made)
    x = np.ones((3, 4), F)
    assert sessions.run("more", frozenset({"z"}), {"x": x})["z"].tolist() == [[1.0] * 4] * 3
    with pytest.raises(PacketTooLarge, match="ConstantOfShape takes"):
        sessions.run("more", frozenset({"z"}), {"x": x[:2]})


def test_a_run_may_take_no_more_than_the_device_has():
    feeds = {"x": np.ones((8, 2), F), "out.weight": np.ones((3, 2), F), "out.bias": np.ones(3, F)}
    Sessions(bundle()).run(ANSWER, frozenset({"logits"}), feeds)
    with pytest.raises(PacketTooLarge, match="here it may take 0 MB"):
        Sessions(bundle(), room=100).run(ANSWER, frozenset({"logits"}), feeds)


def endless(guard):
    """Sessions that compute for hours unless something ends them."""
    graph = replace(chained(9_000, 256), inputs=(Port("x", "f4", ("n", 4)), *chained(1, 256).inputs))
    graph = replace(graph, nodes=(Node("Shape", ("x",), ("unused",), {}), *graph.nodes))
    made = bundle(graphs={**bundle().graphs, "more": graph}, flops_per_sample=1e13)
    return Sessions(made, guard=guard), {
        "x": np.ones((1, 4), F),
        "h0": np.eye(256, dtype=F),
        "w": np.eye(256, dtype=F),
    }


def test_a_run_that_takes_too_long_is_ended_in_its_middle():
    sessions, feeds = endless(StepGuard(lambda: None, longest_s=0.3))
    with pytest.raises(ModelError, match=r"a step took longer than 0\.3 s and was ended"):
        sessions.run("more", frozenset({"h9000"}), feeds)


def test_a_run_that_nobody_wants_any_more_is_ended_in_its_middle():
    stopped = threading.Event()
    sessions, feeds = endless(StepGuard(lambda: "the agent stops" if stopped.is_set() else None))
    threading.Timer(0.3, stopped.set).start()
    with pytest.raises(TrainingStopped, match="during a step: the agent stops"):
        sessions.run("more", frozenset({"h9000"}), feeds)
    stopped.clear()
    answer = sessions.run(
        ANSWER,
        frozenset({"logits"}),
        {"x": np.ones((1, 2), F), "out.weight": np.ones((3, 2), F), "out.bias": np.ones(3, F)},
    )
    assert answer["logits"].tolist() == [[3.0] * 3]  # and the next one runs


def test_a_step_is_priced_before_anything_is_drawn_for_it():
    train = training_graph()
    others = tuple(node for node in train.nodes if node.outputs != ("loss",))
    more = (
        Node("Neg", ("mean",), ("bare",), {}),
        Node("ReduceMean", ("noise:0",), ("noise",), {"keepdims": 0}),
        Node("Add", ("bare", "noise"), ("loss",), {}),
    )
    noise = Noise(("n", 2**28), 0.5)
    noisy = replace(
        train,
        nodes=(*others, *more),
        inputs=(*train.inputs, Port("noise:0", "f4", noise.shape)),
    )
    made = bundle(graphs={**bundle().graphs, TRAIN: noisy}, noises=(noise,))
    with pytest.raises(PacketTooLarge, match="graph train takes 3221 MB"):
        read_bundle(made.encoded())
    said = replace(made, activation_bytes_per_sample=1e15)
    backend = OnnxBackend(read_bundle(said.encoded()), room=10**8)
    with pytest.raises(PacketTooLarge, match="graph train takes"):
        backend.step(np.ones((2, 2), F), np.array([0, 1]), Key.of("test"))


def test_recipes_fill_tensors_that_are_there():
    from fleetune.protocols.bundle.bundle import Recipe, Uniform

    with pytest.raises(PacketCorrupt, match="fills 'nowhere', which is no tensor"):
        read_bundle(bundle(recipe=Recipe((Uniform("nowhere", 1.0),), {})).encoded())


def test_the_training_graph_of_the_hand_made_bundle_is_priced():
    assert cost_of(TRAIN, training_graph(), 5).operations > 2 * 5 * 2 * 3
