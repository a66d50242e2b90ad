"""Bundles and the graphs in them: what travels, what is refused, and what a runtime makes of it."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.helpers.linear_bundle import SPEC, bundle, training_graph

from fleetune.protocols.bundle.bundle import ANSWER, TRAIN, read_bundle
from fleetune.protocols.bundle.graph import Constant, Graph, Node, Port
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketForeign, PacketTruncated
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.randomness import Key


def test_a_bundle_comes_back_as_it_was_and_always_has_the_same_bytes():
    train = training_graph()
    noisy = replace(train, inputs=(*train.inputs, Port("noise:0", "f4", ("n", 4))))
    made = bundle(
        graphs={**bundle().graphs, TRAIN: noisy},
        class_names=("a", "b", "c"),
        noises=(Noise(("n", 4), 0.5),),
        ort_training={"file": b"bytes"},
    )
    data = made.encoded()
    assert data == made.encoded()
    back = read_bundle(data, SPEC)
    assert back.encoded() == data
    assert back.class_names == ("a", "b", "c")
    assert back.graphs[TRAIN].nodes == made.graphs[TRAIN].nodes


@pytest.mark.parametrize("cut", [0, 10, 40, -1])
def test_a_damaged_bundle_is_refused(cut):
    data = bytearray(bundle().encoded())
    with pytest.raises(PacketError):
        read_bundle(bytes(data[:cut]))
    data[cut] ^= 0xFF
    with pytest.raises(PacketError):
        read_bundle(bytes(data))


def test_a_bundle_of_another_model_is_refused():
    other = replace(SPEC, num_classes=4)
    with pytest.raises(PacketForeign, match="fleet's model is"):
        read_bundle(bundle().encoded(), other)


def _broken(change):
    graphs = {**bundle().graphs}
    graphs[TRAIN] = change(graphs[TRAIN])
    return bundle(graphs=graphs).encoded()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda g: replace(g, nodes=(*g.nodes, Node("EvilOp", ("x",), ("z",), {}))), "'EvilOp' is not known"),
        (lambda g: replace(g, nodes=g.nodes[::-1]), "out of order"),
        (lambda g: replace(g, nodes=(*g.nodes, g.nodes[0])), "out of order"),
        (lambda g: replace(g, inputs=(*g.inputs, g.inputs[0])), "is there twice"),
        (lambda g: replace(g, nodes=g.nodes[:-1]), "is never made"),
        (lambda g: replace(g, outputs=g.outputs[:-1]), "does not give gradient:out.bias"),
        (
            lambda g: replace(g, inputs=(*g.inputs[:-1], Port("out.bias", "f4", (2,)))),
            "takes out.bias as",
        ),
        (lambda g: replace(g, constants=(Constant("huge", np.arange(2**21 + 1)),)), "more than 16 MiB"),
    ],
)
def test_a_bundle_that_makes_no_sense_is_refused(change, match):
    with pytest.raises(PacketError, match=match):
        read_bundle(_broken(change))


def test_a_bundle_without_a_graph_that_every_trainer_needs_is_refused():
    graphs = {name: graph for name, graph in bundle().graphs.items() if name != ANSWER}
    with pytest.raises(PacketCorrupt, match="'answer' is missing"):
        read_bundle(bundle(graphs=graphs).encoded())


def test_a_bundle_cut_by_the_codec_names_the_damage():
    with pytest.raises(PacketTruncated):
        read_bundle(bundle().encoded()[:-3])


def test_what_an_output_does_not_need_is_cut_away():
    train = training_graph()
    kept = train.keeping({"gradient:out.bias"})
    kept.check()
    assert kept.output_names == ("gradient:out.bias",)
    assert not {"Neg", "ReduceMean"} & {node.op for node in kept.nodes}
    assert {port.name for port in kept.inputs} == {"x", "y", "out.weight", "out.bias"}
    assert {constant.name for constant in kept.constants} == {"depth", "values", "axis0"}
    assert train.keeping(train.output_names) == train


def test_the_onnx_file_is_one_that_others_read_and_computes_the_same():
    train = training_graph()
    weights = {"out.weight": np.arange(6, dtype=np.float32).reshape(3, 2), "out.bias": np.ones(3, np.float32)}
    data = write_onnx(train, weights=weights, about={"model": "häuser"})
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.value for entry in model.metadata_props] == ["häuser"]
    session = onnxruntime.InferenceSession(data)
    assert [given.name for given in session.get_inputs()] == ["x", "y"]
    x, y = np.array([[1, -1], [0.5, 2]], np.float32), np.array([0, 2])
    loss, gradient, _ = session.run(None, {"x": x, "y": y})
    logits = x @ weights["out.weight"].T + 1
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(p[[0, 1], y]).mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, (p - np.eye(3)[y]).T @ x / 2, rtol=1e-5)


@pytest.mark.parametrize("value", [-3, 2**40, 1.5, "reflect", (1, -2, 3), (0.5, 2.0)], ids=str)
def test_attributes_of_every_kind_survive(value):
    graph = Graph((), (Port("z", "f4", ()),), (Node("Neg", ("x",), ("z",), {"it": value}),), ())
    (node,) = onnx.load_from_string(write_onnx(graph)).graph.node
    found = onnx.helper.get_attribute_value(node.attribute[0])
    expected = value if not isinstance(value, tuple) else list(value)
    assert (found.decode() if isinstance(found, bytes) else found) == expected


def test_noise_is_the_same_for_the_same_key_and_keeps_the_mean():
    noise, key = Noise(("n", 50, 4), 0.25), Key.of("test")
    drawn = noise.draw(key, 0, 40)
    assert drawn.shape == (40, 50, 4)
    assert drawn.dtype == np.float32
    np.testing.assert_array_equal(drawn, noise.draw(key, 0, 40))
    assert (drawn != noise.draw(key, 1, 40)).any()
    assert set(np.unique(drawn)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(drawn.mean() - 1) < 0.03
    assert not Noise(("n", 3), 1.0).draw(key, 0, 2).any()


def test_noise_of_each_kind_has_its_distribution():
    key = Key.of("test")
    kinds = ("mask", "uniform", "normal")
    mask, uniform, normal = (Noise(("n", 1000), 0.25, kind).draw(key, 0, 100) for kind in kinds)
    np.testing.assert_array_equal(mask.ravel(), key.child("dropout", 0).uniform(100_000) >= 0.25)
    assert 0 <= uniform.min() < 1e-4 < 1 - 1e-4 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.mean()) < 0.015
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal**4).mean() - 3) < 0.1
    assert {one.dtype for one in (mask, uniform, normal)} == {np.dtype(np.float32)}


def test_noise_is_the_same_in_every_layout():
    key, kinds = Key.of("test"), ("dropout", "mask", "uniform", "normal")
    for kind in kinds:
        first, flat = Noise(("n", 7), 0.5, kind).draw(key, 2, 6), Noise((42,), 0.5, kind).draw(key, 2, 6)
        assert first.shape == (6, 7)
        np.testing.assert_array_equal(first.ravel(), flat)
