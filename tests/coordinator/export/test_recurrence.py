"""Recurrent layers as loops: torch's own results and gradients, in graphs of any number of steps."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.helpers.nightly import sooner
from torch import nn

from fleetune.coordinator.export.graphs import export, forward_graph
from fleetune.coordinator.export.ort_training import training_part
from fleetune.coordinator.export.primitives import Primitives
from fleetune.coordinator.spec.spec_from_torch import describe, weights_of
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.bundle.bundle import ANSWER, TRAIN, Bundle, read_bundle
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.architectures import training_flops
from fleetune.protocols.randomness import Key

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
}
SETTINGS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "bias": False},
    "bidirectional": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def results(layer, x, start):
    output, last = layer(x, start)
    return output, *(last if isinstance(last, tuple) else (last,))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_torchs_results_and_gradients_in_float64(kind, settings, steps):
    layer = seeded(lambda: KINDS[kind](3, 5, **SETTINGS[settings])).double()
    rng = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    x = normal(2, steps, 3) if layer.batch_first else normal(steps, 2, 3)
    states = [normal(layer.num_layers * (1 + layer.bidirectional), 2, 5) for _ in range(1 + (kind == "lstm"))]
    start = tuple(states) if kind == "lstm" else states[0]
    wanted = results(layer, x, start)
    with Primitives({}):
        found = results(layer, x, start)
    given = [normal(*one.shape).detach() for one in wanted]
    leaves = [x, *states, *layer.parameters()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(all_, leaves, given) for all_ in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Sensors(nn.Module):
    """A layer over a series; the logits come from the last output and the last states."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = KINDS[kind](3, 6, **settings)
        self.out = nn.Linear(6 * (1 + self.layer.bidirectional), 4)

    def forward(self, x):
        output, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        states = last if isinstance(last, tuple) else (last,)
        end = output[:, -1] if self.layer.batch_first else output[-1]
        return self.out(end) + sum(state[-1].sum(1, keepdim=True) for state in states)


def bundle_of(module):
    spec = describe("mine:net", module, (7, 3), 4)
    weights = weights_of(spec, module)
    made = export(spec, module, weights)
    cost = {"flops_per_sample": training_flops(module, (7, 3)), "activation_bytes_per_sample": 1e5}
    bundle = Bundle(spec, made.graphs, made.noises, made.input_type, weights=weights, **cost)
    return read_bundle(bundle.encoded(), spec)


def forward(module, steps=4):
    return forward_graph(describe("mine:net", module, (steps, 3), 4), module)


def loops(graph):
    return [node for node in graph.nodes if node.op == "Scan"]


MODELS = {
    "lstm, two layers": ("lstm", {"num_layers": 2, "dropout": 0.3, "batch_first": True}),
    "lstm, bidirectional": ("lstm", {"bidirectional": True}),
    "gru, two layers": ("gru", {"num_layers": 2, "bias": False}),
    "gru, bidirectional": ("gru", {"bidirectional": True, "batch_first": True}),
    "tanh": ("tanh", {"batch_first": True}),
    "relu": ("relu", {"num_layers": 2, "bidirectional": True}),
}


@pytest.mark.parametrize("name", sooner(MODELS, kept=("lstm, two layers",)))
def test_both_trainers_train_alike(name):
    kind, settings = MODELS[name]
    module = seeded(lambda: Sensors(kind, **settings))
    bundle = bundle_of(module)  # the export compared each graph with torch
    count = module.layer.num_layers * (1 + module.layer.bidirectional)
    assert len(loops(bundle.graphs[TRAIN])) == 2 * count
    assert all(len(loop.outputs) < 4 for loop in loops(bundle.graphs[ANSWER]))  # no arrays for gradients
    rng = Key(5).generator()
    x, y = rng.normal(size=(6, 7, 3)).astype(np.float32), rng.integers(4, size=6)
    losses, backends = [], (OnnxBackend(bundle), TorchBackend(bundle.spec, module))
    for backend in backends:
        backend.load(bundle.weights)
        losses.append(backend.step(x, y, Key(1)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    found, wanted = (backend.gradient for backend in backends)
    assert np.linalg.norm(found - wanted) < 2e-6 * np.linalg.norm(wanted)


def test_a_graph_does_not_grow_with_the_steps_but_its_cost_does():
    few, many = (forward(seeded(lambda: Sensors("lstm")), steps) for steps in (5, 500))
    assert len(few.nodes) == len(many.nodes)
    few, many = (cost_of(TRAIN, one, 3) for one in (few, many))
    assert 90 < many.operations / few.operations < 100


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_layer_with_projections_is_written_out_by_torch():
    module = seeded(lambda: Sensors("lstm", proj_size=2))
    module.out = nn.Linear(2, 4)
    assert not loops(forward(module))


def test_packed_sequences_are_refused_by_name():
    module = seeded(lambda: Sensors("gru", batch_first=True))
    pack = partial(nn.utils.rnn.pack_padded_sequence, batch_first=True)
    module.forward = lambda x: module.out(module.layer(pack(x, torch.full((len(x),), 3)))[1][-1])
    with pytest.raises(ModelError, match=r"reads a packed sequence, .*; give it padded samples"):
        forward(module)


def test_an_lstms_operations_count_for_its_cost():
    module = seeded(lambda: Sensors("lstm", batch_first=True))
    steps, products = 11, 4 * 6 * (3 + 6)
    assert training_flops(module, (steps, 3)) == pytest.approx(3 * 2 * steps * products, rel=0.05)


def test_onnxruntime_training_refuses_a_loop_by_name():
    module = seeded(lambda: Sensors("gru"))
    spec = describe("mine:net", module, (4, 3), 4)
    with pytest.raises(ModelError, match="no gradient of Scan, the loop of a recurrent layer; agents train"):
        training_part(spec, module, weights_of(spec, module))
