"""Depthwise convolutions as products of units of rows: equal to torch for every division into units."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from fleetune.coordinator.export.builder import Builder
from fleetune.coordinator.export.graphs import export
from fleetune.coordinator.export.operators import depthwise
from fleetune.coordinator.export.operators.geometry import Geometry
from fleetune.coordinator.export.torch_trace import Open
from fleetune.coordinator.spec.spec_from_torch import describe, weights_of
from fleetune.protocols.bundle.bundle import TRAIN
from fleetune.protocols.bundle.onnx_file import write_onnx

SAMPLES, CHANNELS = 3, 4
# height and width (or length), kernel, stride, padding, dilation, filters for each channel
CASES = [
    ((7, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((8, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    ((9, 4), (5, 3), (2, 1), (2, 0), (1, 1), 2),
    ((10, 7), (3, 3), (1, 1), (2, 2), (2, 2), 3),
    ((9, 8), (2, 2), (3, 3), (0, 0), (1, 1), 1),  # the last columns are not read
    ((6, 3), (6, 1), (1, 1), (0, 0), (1, 1), 2),
    ((11,), (4,), (2,), (1,), (1,), 1),
    ((1, 1), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((4, 3, 5), (3, 2, 3), (1, 1, 2), (1, 0, 1), (1, 1, 1), 2),
]


def geometry_of(size, kernel, stride, padding, dilation, filters):
    image = torch.zeros(SAMPLES, CHANNELS, *size)
    weight = torch.zeros(CHANNELS * filters, 1, *kernel)
    made = torch.convolution(image, weight, None, stride, padding, dilation, False, [0] * len(size), CHANNELS)
    channels = CHANNELS, CHANNELS * filters
    return Geometry(
        Open(1), CHANNELS, size, tuple(made.shape[2:]), kernel, stride, padding, dilation, channels
    )


def divisions():
    for case in CASES:
        geometry = geometry_of(*case)
        for units in depthwise._divisions(geometry):
            yield pytest.param(geometry, units, id=f"{case[0]}-{case[1]}-{case[2]}-{units.rows_y}")


@pytest.mark.parametrize(("geometry", "units"), list(divisions()))
def test_products_of_units_equal_torch(geometry, units, monkeypatch):
    monkeypatch.setattr(depthwise, "_chosen", lambda geometry, most: units)
    channels, outputs = geometry.channels
    build, n = Builder(), Open(1)
    shapes = {
        "x": (n, channels, *geometry.x),
        "y": (n, outputs, *geometry.y),
        "weight": (outputs, 1, *geometry.kernel),
    }
    x, y, weight = (build.input(name, "f4", shape) for name, shape in shapes.items())
    graph = build.graph(
        {
            "result": depthwise.forward(build, geometry, x, weight, y.shape),
            "of_x": depthwise.input_gradient(build, geometry, y, weight, x.shape),
            "of_weight": depthwise.weight_gradient(build, geometry, x, y, weight.shape),
        }
    )
    rng = np.random.default_rng(0)
    given = {
        name: rng.normal(size=[SAMPLES if size == n else size for size in shape]).astype(np.float32)
        for name, shape in shapes.items()
    }
    found = onnxruntime.InferenceSession(write_onnx(graph)).run(None, given)
    image, gradient, filters = (torch.from_numpy(given[name]).double() for name in shapes)
    about = (geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.x), channels)
    wanted = torch.convolution(image, filters, None, *about)
    gradients = torch.ops.aten.convolution_backward(
        gradient, image, filters, None, *about, [True, True, False]
    )
    for one, other in zip(found, [wanted, *gradients[:2]], strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=2e-5)


def block():
    wide = [nn.Conv2d(20, 20, 1), nn.BatchNorm2d(20), nn.ReLU6()]
    return [*wide, nn.Conv2d(20, 20, 3, padding=1, groups=20), nn.BatchNorm2d(20), nn.Hardswish()]


def test_a_block_computes_in_one_order_of_axes():
    """Norms and activations between convolutions need no copy with samples or channels first."""
    made = {}
    for count in (1, 3):
        module = nn.Sequential(
            *(layer for _ in range(count) for layer in block()), nn.Flatten(), nn.Linear(320, 3)
        )
        spec = describe("blocks", module, (20, 4, 4), 3)
        made[count] = export(spec, module, weights_of(spec, module)).graphs[TRAIN]
    copies = [
        sum(node.op == "Transpose" and len(node.attributes["perm"]) == 4 for node in graph.nodes)
        for graph in made.values()
    ]
    assert copies[0] == copies[1]
