"""A bundle built by hand: softmax regression with three classes, and two features by default."""

from dataclasses import replace
from typing import Any

import numpy as np

from fleetune.protocols.bundle.bundle import ANSWER, EVALUATE_GRADIENT, TRAIN, Bundle
from fleetune.protocols.bundle.graph import Constant, Graph, Node, Port
from fleetune.protocols.model.spec import ModelSpec, TensorSpec


def spec_of(features: int) -> ModelSpec:
    """The model."""
    weight = TensorSpec("out.weight", (3, features), "weight", "out", ((), ()))
    bias = TensorSpec("out.bias", (3,), "bias", "out", ((),))
    return ModelSpec("hand:made", (weight, bias), (), (features,), 3)


SPEC = spec_of(2)
_LOGITS = Node("Gemm", ("x", "out.weight", "out.bias"), ("logits",), {"transB": 1})


def _tensors(features: int) -> tuple[Port, ...]:
    return Port("out.weight", "f4", (3, features)), Port("out.bias", "f4", (3,))


def training_graph(features: int = 2) -> Graph:
    """The graph of the mean cross entropy and its gradients."""
    nodes = (
        _LOGITS,
        Node("LogSoftmax", ("logits",), ("logp",), {"axis": 1}),
        Node("OneHot", ("y", "depth", "values"), ("hot",), {"axis": 1}),
        Node("Mul", ("logp", "hot"), ("picked",), {}),
        Node("ReduceSum", ("picked", "axis1"), ("each",), {"keepdims": 0}),
        Node("ReduceMean", ("each",), ("mean",), {"keepdims": 0}),
        Node("Neg", ("mean",), ("loss",), {}),
        Node("Exp", ("logp",), ("p",), {}),
        Node("Sub", ("p", "hot"), ("excess",), {}),
        Node("Shape", ("y",), ("count",), {}),
        Node("Cast", ("count",), ("countf",), {"to": 1}),
        Node("Div", ("excess", "countf"), ("dlogits",), {}),
        Node("Gemm", ("dlogits", "x"), ("gradient:out.weight",), {"transA": 1}),
        Node("ReduceSum", ("dlogits", "axis0"), ("gradient:out.bias",), {"keepdims": 0}),
    )
    constants = (
        Constant("depth", np.array(3)),
        Constant("values", np.array([0, 1], np.float32)),
        Constant("axis1", np.array([1])),
        Constant("axis0", np.array([0])),
    )
    inputs = (Port("x", "f4", ("n", features)), Port("y", "i8", ("n",)), *_tensors(features))
    outputs = (
        Port("loss", "f4", ()),
        Port("gradient:out.weight", "f4", (3, features)),
        Port("gradient:out.bias", "f4", (3,)),
    )
    return Graph(inputs, outputs, nodes, constants)


def answer_graph(features: int = 2) -> Graph:
    """The graph of the logits, with x as features."""
    nodes = (_LOGITS, Node("Identity", ("x",), ("features",), {}))
    outputs = (Port("logits", "f4", ("n", 3)), Port("features", "f4", ("n", features)))
    return Graph((Port("x", "f4", ("n", features)), *_tensors(features)), outputs, nodes, ())


def bundle(features: int = 2, **changes: Any) -> Bundle:
    """The complete bundle."""
    train, spec = training_graph(features), spec_of(features)
    graphs = {TRAIN: train, EVALUATE_GRADIENT: train, ANSWER: answer_graph(features)}
    return replace(Bundle(spec, graphs, weights=np.zeros(spec.size, np.float32)), **changes)
