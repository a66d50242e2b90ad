"""Derives from a bundle the training graph of the same network with fewer neurons.

A graph contains sizes as the shapes of its tensors and as constants that reshape arrays. The shapes follow
from the smaller model. The constants that count neurons are found by following each axis through the graph
(`protocols.bundle.axis_factors`). If an axis cannot be followed, the network is not made smaller.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bundle.axis_factors import (
    RULES,
    Axes,
    Axis,
    Factor,
    Unfollowed,
    expanded,
    fixed,
    is_shorter,
    need,
    regrouped,
    small_shape,
    unchanged,
    whole_shape,
)
from fleetune.protocols.bundle.bundle import PROBE, TRAIN, Bundle
from fleetune.protocols.bundle.graph import BATCH, Constant, Graph, Node, Port
from fleetune.protocols.bundle.graph_cost import cost_of, shapes_of
from fleetune.protocols.errors import PacketError
from fleetune.protocols.model.smaller import smaller_spec
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Dimension, ModelSpec, Shape, Span, TensorSpec

# a graph may pool channels in pairs, so the number of neurons is rounded up to a multiple of these
_STEPS = (1, 2, 4)


def smaller_bundle(bundle: Bundle, counts: Sequence[int]) -> Bundle | None:
    """Return a bundle that trains the network with `counts` neurons in its groups, or up to three more in
    each.

    Its only graph is `train`. The caller must verify that it computes the same as the whole network.

    Returns:
        The bundle; None if there is no such network, if it draws random numbers, or if its graph cannot be
        made smaller.
    """
    for step in _STEPS:
        rounded = [-(-count // step) * step for count in counts]
        spec = smaller_spec(bundle.spec, [*map(min, rounded, bundle.spec.groups)])
        if spec is None or bundle.noises:
            return None
        try:
            graph = _smaller_graph(bundle.graphs[TRAIN], bundle.spec, spec)
            cost_of(TRAIN, graph, PROBE)
        except (Unfollowed, PacketError):
            continue
        return replace(bundle, spec=spec, graphs={TRAIN: graph}, recipe=None, weights=None, ort_training={})
    return None


def _smaller_graph(graph: Graph, whole: ModelSpec, small: ModelSpec) -> Graph:
    """Return the graph of the smaller model. Raises Unfollowed."""
    walk = _Walk(graph, {tensor.name: _axes_of(tensor, small) for tensor in whole.tensors})
    nodes = [walk.smaller(node) for node in graph.nodes]
    shapes = {tensor.name: tensor.shape for tensor in small.tensors}

    def resized(port: Port) -> Port:
        """Return an input or output in the smaller model: a tensor, its gradient, or its new value."""
        name = port.name.removeprefix("gradient:").removeprefix("statistic:")
        shape: tuple[Dimension, ...] = shapes.get(name, port.shape)
        need(small_shape(walk.axes[port.name]) == _numbered(shape))
        return replace(port, shape=shape)

    return replace(
        graph,
        inputs=tuple(map(resized, graph.inputs)),
        outputs=tuple(map(resized, graph.outputs)),
        nodes=tuple(walk.with_counts(node) for node in nodes),
        constants=(*graph.constants, *walk.constants),
    ).keeping(graph.output_names)


def _axes_of(tensor: TensorSpec, small: ModelSpec) -> Axes:
    def axis(size: int, spans: Sequence[Span]) -> Axis:
        if not spans:
            return (fixed(size),)
        counts = [one.count if one.group == ALWAYS_ACTIVE else small.groups[one.group] for one in spans]
        if len(spans) == 1:
            return (Factor(spans[0].count, counts[0]), fixed(spans[0].repeat))
        return (Factor(size, sum(n * one.repeat for n, one in zip(counts, spans, strict=True))),)

    return tuple(axis(*one) for one in zip(tensor.shape, tensor.axes, strict=True))


class _Walk:
    """Follows the axes of a graph's arrays from node to node.

    Args:
        graph: the graph of the whole model.
        tensors: the axes of the model's tensors.

    Attributes:
        axes: axes of each array that was reached.
        constants: new constants of the smaller graph.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, Axes]) -> None:
        self._shapes: dict[str, Shape] = {name: shape for name, (_, shape) in shapes_of(graph, PROBE).items()}
        self._values = {one.name: one.value for one in graph.constants}
        self._makers = {name: node for node in graph.nodes for name in node.outputs}
        # for MaxPool's positions: the axes of the image that they refer to
        self._images: dict[str, Axes] = {}
        self._counts: dict[str, str] = {}  # for products that count pixels: the name of the new constant
        self.constants: list[Constant] = []
        self.axes = {one.name: unchanged(one.value.shape) for one in graph.constants}
        for port in graph.inputs:
            self.axes[port.name] = tensors.get(port.name) or unchanged(_numbered(port.shape))

    def smaller(self, node: Node) -> Node:
        """Return the node in the smaller graph, and store the axes of its results. Raises Unfollowed."""
        inputs = [self.axes[name] for name in node.inputs if name]
        shape = self._shapes[node.outputs[0]]
        if node.op in ("Reshape", "Expand"):
            made, node = self._resized(node, shape)
        elif node.op == "ScatterElements":
            made = self._scattered(node)
        elif node.op in RULES:
            made = RULES[node.op](node, inputs, shape)
        else:
            need(node.op == "Shape" or not any(is_shorter(axis) for axes in inputs for axis in axes))
            made = None
        for name in filter(None, node.outputs):
            self.axes[name] = unchanged(self._shapes[name]) if made is None else made
            need(whole_shape(self.axes[name]) == self._shapes[name])
        if node.op == "MaxPool":
            self._images |= dict.fromkeys(node.outputs[1:], inputs[0])
        return node

    def with_counts(self, node: Node) -> Node:
        """Return the node, with a new constant if it counts the pixels of an image that became smaller."""
        if node.outputs[0] not in self._counts:
            return node
        return replace(node, inputs=(node.inputs[0], self._counts[node.outputs[0]]))

    def _resized(self, node: Node, shape: Shape) -> tuple[Axes, Node]:
        """Return the axes of a Reshape's or Expand's result, and the node with the smaller sizes."""
        given = self.axes[node.inputs[0]]
        made = regrouped(given, shape) if node.op == "Reshape" else expanded(given, shape)
        if node.inputs[0] in self._images:
            self._images[node.outputs[0]] = self._images[node.inputs[0]]
        if not any(map(is_shorter, made)):
            return made, node
        said = self._values.get(node.inputs[1])
        need(said is not None and said.shape == (len(made),))
        assert said is not None
        sizes = np.where(said == -1, -1, small_shape(made)).astype(np.int64)
        return made, replace(node, inputs=(node.inputs[0], self._constant(sizes)))

    def _scattered(self, node: Node) -> Axes:
        """Return the axes of MaxPool's gradient.

        The gradient is scattered by position into zeros, one for each pixel of all samples.
        The number of pixels of a sample is a constant, which becomes smaller.
        """
        image = self._images.get(node.inputs[1])
        zeros = self._makers.get(node.inputs[0])
        product = self._makers.get(zeros.inputs[0]) if zeros and zeros.op == "ConstantOfShape" else None
        need(image and product and product.op == "Mul" and len(product.inputs) == 2)
        assert image is not None
        assert product is not None
        need(product.inputs[1] in self._values)
        pixels = self._values[product.inputs[1]]
        need(pixels.size == 1 and int(pixels.ravel()[0]) * PROBE == math.prod(whole_shape(image)))
        fewer = np.full(pixels.shape, math.prod(small_shape(image)) // PROBE, pixels.dtype)
        self._counts[product.outputs[0]] = self._constant(fewer)
        return (tuple(factor for axis in image for factor in axis),)

    def _constant(self, value: NDArray[Any]) -> str:
        name = f"smaller:{len(self.constants)}"
        self.constants.append(Constant(name, value))
        return name


def _numbered(shape: Sequence[Dimension]) -> Shape:
    return tuple(PROBE if size == BATCH else int(size) for size in shape)
