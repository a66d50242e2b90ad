"""Training graphs with fewer neurons, and those that are left as they are."""

from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.nightly import sooner

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.protocols.bundle.axis_factors import Factor, Unfollowed, fixed, regrouped
from fleetune.protocols.bundle.bundle import TRAIN
from fleetune.protocols.bundle.graph import Constant, Node
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.smaller_graph import smaller_bundle
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import num_active

SHAPES = {
    "mlp": (1, 28, 28),
    "autoencoder": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "lenet-dcpfl": (1, 28, 28),
    "cnn-moon": (3, 32, 32),
    "cnn-kapc": (1, 28, 28),
    "cnn-fedspu-cifar": (3, 32, 32),
    "cnn-fedspu-emnist": (1, 28, 28),
    "resnet8": (3, 32, 32),
    "har-cnn": (9, 128),
}
CHANNELS = Factor(64, 25)


@pytest.fixture(scope="module")
def lenet5():
    return make_bundle("lenet5", SHAPES["lenet5"], 10, Key(1))


@pytest.mark.parametrize("name", sooner(SHAPES, kept=("lenet5", "har-cnn")))
def test_every_built_in_network_has_smaller_ones(name):
    bundle = make_bundle(name, SHAPES[name], 10, Key(1))
    for ratio in (0.1, 0.4, 0.7):
        counts = [num_active(neurons, ratio) for neurons in bundle.spec.groups]
        found = smaller_bundle(bundle, counts)
        assert [*found.graphs] == [TRAIN]
        assert all(0 <= more - few < 4 for more, few in zip(found.spec.groups, counts, strict=True))
        whole, small = (cost_of(TRAIN, one.graphs[TRAIN], 16) for one in (bundle, found))
        assert small.operations < whole.operations
        assert small.num_bytes < whole.num_bytes
        found.graphs[TRAIN].check()


def test_channels_that_are_pooled_one_by_one_need_no_partner():
    now = make_bundle("har-cnn", SHAPES["har-cnn"], 6, Key(1))
    assert smaller_bundle(now, (9, 19, 19)).spec.groups == (9, 19, 19)


def test_a_bundle_that_draws_or_has_no_such_network_has_no_smaller_one(lenet5):
    assert smaller_bundle(replace(lenet5, noises=(Noise(("n", 1), 0.5),)), (2, 6, 48, 33)) is None
    assert smaller_bundle(lenet5, (0, 6, 48, 33)) is None


@pytest.mark.parametrize(
    "node",
    [
        Node("Softmax", ("hidden",), ("new",), {"axis": 1}),
        Node("Softmax", ("hidden",), ("new",), {"axis": 7}),
        Node("ReduceMean", ("hidden",), ("new",), {"axes": (1,), "keepdims": 1}),
        Node("Mul", ("hidden", "half"), ("new",), {}),
    ],
    ids=lambda node: f"{node.op}{node.attributes}",
)
def test_what_cannot_be_followed_is_not_made_smaller(lenet5, node):
    """With what the neurons of LeNet-5's first fully connected layer give."""
    graph = lenet5.graphs[TRAIN]
    layer = next(one for one in graph.nodes if "fc1.weight" in one.inputs)
    hidden = next(one.outputs[0] for one in graph.nodes if one.inputs == layer.outputs)
    node = replace(node, inputs=(hidden, *node.inputs[1:]))
    half = Constant("half", np.full(120, 0.5, np.float32))
    changed = replace(graph, nodes=(*graph.nodes, node), constants=(*graph.constants, half))
    counts = (2, 6, 48, 33)
    assert smaller_bundle(lenet5, counts)
    assert smaller_bundle(replace(lenet5, graphs={**lenet5.graphs, TRAIN: changed}), counts) is None


@pytest.mark.parametrize(
    ("axes", "shape", "small"),
    [
        (((fixed(3),), (CHANNELS,), (fixed(9),)), (3, 576), (3, 225)),
        (((fixed(3),), (CHANNELS, fixed(9))), (3, 64, 3, 3), (3, 25, 3, 3)),
        (((fixed(3),), (fixed(1600),), (CHANNELS,)), (3 * 64, 25, 64), (192, 25, 25)),
        (((Factor(64, 26),),), (32, 2), (13, 2)),
        (((CHANNELS,),), (1, 64, 1, 1), (1, 25, 1, 1)),
    ],
)
def test_axes_are_regrouped(axes, shape, small):
    found = regrouped(axes, shape)
    assert tuple(int(np.prod([one.small for one in axis])) for axis in found) == small
    assert tuple(int(np.prod([one.whole for one in axis])) for axis in found) == shape


@pytest.mark.parametrize("shape", [(32, 2), (6, 64), (5,), (64, 2)])
def test_what_parts_neurons_is_not_followed(shape):
    with pytest.raises(Unfollowed):
        regrouped(((CHANNELS,),), shape)
