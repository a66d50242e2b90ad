"""The comparison with torch refuses wrong graphs: thirty faults of the size that real mistakes have.

A fault is a setting of the module from which the wrong graph is made, a wrong rule, or an edited graph. The
wrong graph is compared with the right module.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.helpers.nightly import sooner
from torch import nn
from torch.nn import functional

from fleetune.coordinator.export import graphs, onnx_lowering, primitives, steps, torch_trace
from fleetune.coordinator.export.torch_comparison import check
from fleetune.coordinator.spec.spec_from_torch import describe, weights_of
from fleetune.protocols.bundle.bundle import ANSWER, CONTRAST, DISTILLATION, EVALUATE_GRADIENT, TRAIN
from fleetune.protocols.bundle.graph import Constant, Node
from fleetune.protocols.errors import ModelError


class Images(nn.Module):
    """Convolutions, norms, pools and a residual."""

    RIGHT: ClassVar = {
        "eps": 1e-5, "momentum": 0.1, "padding_mode": "zeros", "slope": 0.01, "top": 6.0, "counted": True,
        "corners": False, "residual": 1.0, "swapped": False, "gelu": "none",
    }  # fmt: skip
    SHAPE = (3, 8, 8)

    def __init__(self, **wrong):
        super().__init__()
        self.settings = self.RIGHT | wrong
        given = self.settings
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode=given["padding_mode"])
        self.norm = nn.BatchNorm2d(8, given["eps"], given["momentum"])
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))
        self.last = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(32, 5)

    def forward(self, x):
        given = self.settings
        x = functional.leaky_relu(self.norm(self.conv(x)), given["slope"])
        y = functional.gelu(self.group_norm(self.deep(x)), approximate=given["gelu"])
        x = functional.max_pool2d(given["residual"] * x + self.scale * y, 2)
        x = functional.interpolate(x, size=(6, 6), mode="bilinear", align_corners=given["corners"])
        x = functional.hardtanh(x, -2.0, given["top"] / 4)
        x = functional.avg_pool2d(x, 3, 3, 1, count_include_pad=given["counted"])
        x = functional.adaptive_avg_pool2d(x, 2)
        x = (x.transpose(2, 3) if given["swapped"] else x).flatten(1)
        return self.out(self.drop(self.last(x)))


class Words(nn.Module):
    """Embedding, attention with a mask, layer norms."""

    RIGHT: ClassVar = {
        "eps": 1e-5,
        "power": -0.5,
        "diagonal": 1,
        "axis": -1,
        "shift": 0,
        "padding": 0,
        "transposed": False,
    }
    SHAPE = (7,)

    def __init__(self, **wrong):
        super().__init__()
        self.settings = self.RIGHT | wrong
        self.embed = nn.Embedding(20, 8, padding_idx=self.settings["padding"])
        self.place = nn.Parameter(torch.randn(7, 8) / 5)
        self.norm = nn.LayerNorm(8, self.settings["eps"])
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)
        with torch.no_grad():
            self.embed.weight *= 0.3

    def forward(self, x):
        given = self.settings
        x = self.embed(x) + self.place.roll(given["shift"], 0)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * 8 ** given["power"]
        mask = torch.triu(torch.ones(7, 7, dtype=torch.bool), given["diagonal"])
        scores = scores.masked_fill(mask, -1e9).softmax(given["axis"])
        weight = self.proj.weight.t() if given["transposed"] else self.proj.weight
        x = x + functional.linear(scores @ v, weight, self.proj.bias)
        return self.out(torch.tanh(x).mean(1))


class Moving(nn.Module):
    """A buffer follows the mean of what was seen in training; the traced copy keeps it constant."""

    RIGHT: ClassVar = {"moves": True}
    SHAPE = (6,)

    def __init__(self, **wrong):
        super().__init__()
        self.moves = (self.RIGHT | wrong)["moves"]
        self.a, self.out = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x):
        x = self.a(x)
        if self.training and self.moves:
            self.centre = 0.99 * self.centre + 0.01 * x.detach().mean(0)
        return self.out(torch.sin(x - self.centre))


def made(kind, **wrong):
    torch.manual_seed(5)
    return kind(**wrong)


def refuses(kind, graph_names, edit=None, **wrong):
    """Whether graphs of a wrong module, then edited, are refused in comparison with the right module."""
    right, traced = made(kind), made(kind, **wrong)
    spec = describe("a:net", right, kind.SHAPE, 5)
    model = steps.prepare(spec, traced)
    found = {name: graphs._graph(model, name) for name in graph_names}
    if edit is not None:
        found = {name: edit(graph) for name, graph in found.items()}
    try:
        check(replace(model, module=right), right, found, weights_of(spec, right))
    except ModelError as problem:
        return "differs from torch's" in str(problem)
    return False


@pytest.mark.parametrize("kind", [Images, Words])
def test_right_graphs_are_accepted(kind):
    assert not refuses(kind, [TRAIN, EVALUATE_GRADIENT, ANSWER, DISTILLATION, CONTRAST])


SETTINGS = {
    "epsilon of a batch norm": (Images, {"eps": 1e-6}),
    "epsilon of a layer norm": (Words, {"eps": 1e-6}),
    "momentum": (Images, {"momentum": 0.101}),
    "padding mode": (Images, {"padding_mode": "replicate"}),
    "slope of a leaky ReLU": (Images, {"slope": 0.0101}),
    "bound of a clamp": (Images, {"top": 6.001}),
    "padding counted in a mean": (Images, {"counted": False}),
    "aligned corners": (Images, {"corners": True}),
    "a residual that is too small": (Images, {"residual": 0.9999}),
    "a missing residual": (Images, {"residual": 0.0}),
    "swapped axes": (Images, {"swapped": True}),
    "GELU by tanh": (Images, {"gelu": "tanh"}),
    "scale of attention": (Words, {"power": -0.4999}),
    "a mask one place off": (Words, {"diagonal": 2}),
    "softmax over another axis": (Words, {"axis": -2}),
    "positions one place off": (Words, {"shift": 1}),
    "another padding token": (Words, {"padding": 3}),
    "a transposed weight": (Words, {"transposed": True}),
    "a buffer that moves": (Moving, {"moves": False}),
}  # fmt: skip


@pytest.mark.parametrize("fault", sooner(SETTINGS, kept=5))
def test_a_wrong_setting_is_refused(fault):
    kind, wrong = SETTINGS[fault]
    assert refuses(kind, [TRAIN], **wrong)


def _without_gradient(name):
    """The graph gives zeros for one gradient."""

    def edit(graph):
        port = next(port for port in graph.outputs if port.name == f"gradient:{name}")
        nodes = tuple(
            replace(node, outputs=tuple("unused" if one == port.name else one for one in node.outputs))
            for node in graph.nodes
        )
        zeros = Constant("zeros", np.zeros(port.shape, np.float32))
        last = Node("Identity", ("zeros",), (port.name,), {})
        return replace(graph, nodes=(*nodes, last), constants=(*graph.constants, zeros))

    return edit


def _unmoved(name):
    """The graph gives the running statistic that it got."""

    def edit(graph):
        nodes = tuple(
            Node("Identity", (name,), node.outputs, {}) if f"statistic:{name}" in node.outputs else node
            for node in graph.nodes
        )
        return replace(graph, nodes=nodes)

    return edit


def _without_noise(graph):
    """The first factor of dropout is not used."""
    nodes = tuple(
        Node("Identity", (node.inputs[0],), node.outputs, {}) if "noise:0" in node.inputs else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _with_constants_in_half_precision(graph):
    def half(one):
        return (
            one
            if one.value.dtype != np.float32
            else replace(one, value=one.value.astype(np.float16).astype("f4"))
        )

    return replace(graph, constants=tuple(half(one) for one in graph.constants))


def _for_three_samples(graph):
    """The number of samples is a constant, as in the first trace."""
    counted = {node.outputs[0] for node in graph.nodes if node.op == "Shape"}
    three = Constant("three", np.array([3], np.int64))
    nodes = tuple(
        Node("Identity", ("three",), node.outputs, {}) if node.outputs[0] in counted else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, constants=(*graph.constants, three))


EDITS = {
    "a missing gradient of a bias": (Images, _without_gradient("deep.bias")),
    "a missing gradient of a scale": (Images, _without_gradient("scale")),
    "a running variance that stays": (Images, _unmoved("norm.running_var")),
    "a dropout that is left out": (Images, _without_noise),
    "constants in half precision": (Images, _with_constants_in_half_precision),
    "a mean over a fixed number of samples": (Images, _for_three_samples),
}


@pytest.mark.parametrize("fault", sooner(EDITS, kept=2))
def test_a_wrong_graph_is_refused(fault):
    kind, edit = EDITS[fault]
    assert refuses(kind, [TRAIN], edit)


def _biased_variance(monkeypatch):
    note = primitives.Primitives.note

    def wrong(self, running, batch, momentum, single=None):
        note(self, running, batch * (127 / 128 if batch.ndim == 1 else 1), momentum, single)

    monkeypatch.setattr(primitives.Primitives, "note", wrong)
    return Images, TRAIN


def _variance_as_a_constant(monkeypatch):
    backward = primitives._Standardised.backward

    def wrong(ctx, *given):
        centred, inverse, scale, *_ = ctx.saved_tensors
        found, *rest = backward(ctx, *given)
        return found + centred * scale * inverse**2 * (given[0] * centred).mean(ctx.axes, keepdim=True), *rest

    monkeypatch.setattr(primitives._Standardised, "backward", staticmethod(wrong))
    return Words, TRAIN


def _gradient_to_both_sides_of_zero(monkeypatch):
    def wrong(build, out, gradient, x, slope, is_result):
        del is_result
        return onnx_lowering.RULES["mul"](build, out, gradient, 1.0)

    monkeypatch.setitem(onnx_lowering.RULES, "leaky_relu_backward", wrong)
    monkeypatch.setattr(torch_trace, "DECOMPOSED", _without("leaky_relu_backward"))
    return Images, EVALUATE_GRADIENT


def _without(name):
    from fleetune.coordinator.export.torch_trace import DECOMPOSED

    return [one for one in DECOMPOSED if one != name]


def _distillation_without_its_square(monkeypatch):
    from fleetune.protocols.model import torch_loss_terms

    def wrong(logits, teacher, strength, temperature):
        return torch_loss_terms.distillation(logits, teacher, strength, temperature) / temperature

    monkeypatch.setattr(steps, "distillation", wrong)
    return Words, DISTILLATION


def _near_and_far_exchanged(monkeypatch):
    from fleetune.protocols.model import torch_loss_terms

    monkeypatch.setattr(
        steps, "contrast", lambda f, near, far, *rest: torch_loss_terms.contrast(f, far, near, *rest)
    )
    return Images, CONTRAST


RULES = {
    "a biased running variance": _biased_variance,
    "a norm whose variance is a constant": _variance_as_a_constant,
    "the gradient of a kink": _gradient_to_both_sides_of_zero,
    "distillation without its square": _distillation_without_its_square,
    "near and far exchanged": _near_and_far_exchanged,
}


@pytest.mark.parametrize("fault", sooner(RULES, kept=2))
def test_a_wrong_rule_is_refused(fault, monkeypatch):
    kind, graph = RULES[fault](monkeypatch)
    assert refuses(kind, [graph])


def test_thirty_faults_are_planted():
    assert len(SETTINGS) + len(EDITS) + len(RULES) == 30
