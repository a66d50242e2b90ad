"""Units of recurrent layers, attention heads and normed weights: what switches off together.

Each model is also built with fewer units or heads. It must compute what the whole one computes with all
parameters of the others at 0, and have the same gradients.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fleetune.coordinator.spec.spec_from_torch import describe, weights_of
from fleetune.protocols.method.submodels import cut
from fleetune.protocols.model.smaller import has_smaller
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Span
from fleetune.protocols.model.weight_norm import directions
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import ChosenNeurons, neuron_mask

KEY, STEPS, INPUTS, CLASSES = Key.of("units and heads"), 7, 5, 3


class Recurrent(nn.Module):
    """A layer of torch with as many outputs as `units` says, and the last step's output to the classes."""

    def __init__(self, kind, units, outputs=None, start=None, **settings):
        super().__init__()
        self.rnn = getattr(nn, kind)(INPUTS, units, batch_first=True, **settings)
        self.fc, self.start = nn.Linear(outputs or units, CLASSES), start

    def forward(self, x):
        state = None if self.start is None else self.start(self.rnn, len(x))
        return self.fc(self.rnn(x, state)[0][:, -1])


class Cells(nn.Module):
    def __init__(self, kind, units):
        super().__init__()
        self.cell, self.fc, self.units = getattr(nn, kind)(INPUTS, units), nn.Linear(units, CLASSES), units

    def forward(self, x):
        state, pair = x.new_zeros(len(x), self.units), isinstance(self.cell, nn.LSTMCell)
        state = (state, torch.zeros(len(x), self.units)) if pair else state
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.fc(state[0] if pair else state)


SIZE = 4  # of a head


class Attention(nn.Module):
    """Attention as people write it: separate projections or one, with a mask, and a sum over positions."""

    def __init__(self, heads, width=6, *, how="written", kv_heads=None):
        super().__init__()
        self.inputs, self.out, self.fc = nn.Linear(INPUTS, width), nn.Linear(heads * SIZE, width), None
        self.heads, self.kv_heads, self.how = heads, kv_heads or heads, how
        self.q = nn.Linear(width, heads * SIZE * (3 if how == "packed" else 1))
        if how != "packed":
            self.k, self.v = (nn.Linear(width, self.kv_heads * SIZE) for _ in range(2))
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.inputs(x)
        b, t, _ = x.shape
        if self.how == "packed":
            q, k, v = self.q(x).reshape(b, t, 3, self.heads, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (one(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
        if self.how == "written":
            y = ((q @ k.transpose(-2, -1) / SIZE**0.5) + mask).softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
            )
        return self.fc((x + self.out(y.transpose(1, 2).reshape(b, t, -1))).sum(1))


def normed(norm, hidden):
    return nn.Sequential(
        *(norm(nn.Conv1d(STEPS, hidden, 3, padding=1)), nn.ReLU()),
        *(norm(nn.Conv1d(hidden, hidden, 3)), nn.ReLU(), nn.Flatten()),
        *(norm(nn.Linear(hidden * (INPUTS - 2), hidden)), nn.ReLU(), nn.Linear(hidden, CLASSES)),
    )


def learned(rnn, samples):
    return torch.zeros(1, samples, rnn.hidden_size).requires_grad_().detach()


# Each with its full size and its smaller size: units, or heads.
MODELS = {
    "gru": (lambda n: Recurrent("GRU", n), 6, 4),
    "gru of two layers both ways": (
        lambda n: Recurrent("GRU", n, 2 * n, num_layers=2, bidirectional=True, dropout=0.1),
        *(6, 4),
    ),
    "gru with its own zeros": (lambda n: Recurrent("GRU", n, start=learned), 6, 2),
    "lstm": (lambda n: Recurrent("LSTM", n), 6, 4),
    "lstm of two layers without biases": (lambda n: Recurrent("LSTM", n, num_layers=2, bias=False), 6, 4),
    "rnn": (lambda n: Recurrent("RNN", n, nonlinearity="relu"), 6, 4),
    "gru cells": (lambda n: Cells("GRUCell", n), 6, 4),
    "lstm cells": (lambda n: Cells("LSTMCell", n), 6, 4),
    "attention": (Attention, 3, 2),
    "attention in one projection": (lambda n: Attention(n, how="packed"), 3, 2),
    "attention of torch": (lambda n: Attention(n, how="torch"), 3, 2),
    "attention with shared keys": (lambda n: Attention(n, how="torch", kv_heads=n // 2), 6, 4),
    "weight norm": (lambda n: normed(parametrizations.weight_norm, n), 6, 4),
    "old weight norm": (lambda n: normed(nn.utils.weight_norm, n), 6, 4),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


def made(name, size):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = MODELS[name][0](size).eval()  # without dropout
    return module, describe(name, module, (STEPS, INPUTS), CLASSES)


def load(module, spec, weights):
    module.load_state_dict({one.name: torch.from_numpy(part.copy()) for one, part in spec.views(weights)})


def logits_and_gradient(module, spec):
    x = torch.from_numpy(KEY.generator().normal(size=(4, STEPS, INPUTS)).astype(np.float32))
    module.zero_grad()
    logits = module(x)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    own = dict(module.named_parameters())
    return logits.detach().numpy(), np.concatenate(
        [own[one.name].grad.numpy().ravel() for one in spec.tensors]
    )


@pytest.mark.parametrize("name", MODELS)
def test_without_some_units_it_is_the_smaller_network(name):
    """Its outputs, and the gradients of all that is left."""
    _, size, few = MODELS[name]
    (whole, spec), (small, small_spec) = made(name, size), made(name, few)
    assert spec.share_in_groups > 0.9
    # in a group that does not depend on the size, all are kept
    kept = [
        np.isin(np.arange(all_), KEY.child(group).sample(some, all_))
        for group, (all_, some) in enumerate(zip(spec.groups, small_spec.groups, strict=True))
    ]
    assert sum(small_spec.groups) < sum(spec.groups)
    part = neuron_mask(spec, kept)
    weights = cut(weights_of(spec, whole), part, spec)
    load(whole, spec, weights)
    load(small, small_spec, weights[part])
    (found, gradient), (wanted, small_gradient) = (
        logits_and_gradient(*one) for one in ((whole, spec), (small, small_spec))
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(gradient[part], small_gradient, rtol=0, atol=1e-6)
    assert np.abs(small_gradient).max() > 1e-2


def axes_of(spec):
    return {tensor.name: tensor.axes for tensor in spec.tensors}


def test_a_unit_owns_its_rows_in_all_gates_and_its_columns():
    _, spec = made("gru", 6)
    units, gates = (Span(0, 0, 6),), (Span(0, 0, 6),) * 3
    assert axes_of(spec) == {
        "rnn.weight_ih_l0": (gates, ()),
        "rnn.weight_hh_l0": (gates, units),
        "rnn.bias_ih_l0": (gates,),
        "rnn.bias_hh_l0": (gates,),
        "fc.weight": ((), units),
        "fc.bias": ((),),
    }
    assert spec.tensors[0].uses == STEPS
    off = ~neuron_mask(spec, [np.arange(6) != 2])
    rows = np.zeros((18, 6), bool)
    rows[[2, 8, 14]] = rows[:, 2] = True
    np.testing.assert_array_equal(off[spec.slices["rnn.weight_hh_l0"]].reshape(18, 6), rows)


def test_both_directions_of_each_layer_have_their_own_units():
    _, spec = made("gru of two layers both ways", 6)
    assert spec.groups == (6, 6, 6, 6)
    both = (Span(0, 0, 6), Span(1, 0, 6)), (Span(2, 0, 6), Span(3, 0, 6))
    found = axes_of(spec)
    for end, group in (("", 2), ("_reverse", 3)):
        assert found[f"rnn.weight_ih_l1{end}"] == ((Span(group, 0, 6),) * 3, both[0])
        assert found[f"rnn.weight_hh_l1{end}"] == ((Span(group, 0, 6),) * 3, (Span(group, 0, 6),))
    assert found["fc.weight"] == ((), both[1])


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_cells_of_a_projected_lstm_are_not_its_outputs():
    module = Recurrent("LSTM", 6, 4, proj_size=4)
    spec = describe("m", module, (STEPS, INPUTS), CLASSES)
    assert spec.groups == (6, 4)
    assert axes_of(spec)["rnn.weight_hh_l0"] == ((Span(0, 0, 6),) * 4, (Span(1, 0, 4),))
    assert axes_of(spec)["rnn.weight_hr_l0"] == ((Span(1, 0, 4),), (Span(0, 0, 6),))


@pytest.mark.parametrize(
    "start",
    [
        lambda rnn, samples: torch.ones(1, samples, rnn.hidden_size),
        lambda rnn, samples: torch.zeros(1, samples, rnn.hidden_size) + torch.ones(()),
        lambda rnn, samples: torch.zeros(1, samples, rnn.hidden_size),
    ],
    ids=["ones", "sum", "zeros"],
)
def test_a_constant_state_to_begin_with_binds_no_unit(start):
    spec = describe("m", Recurrent("GRU", 6, start=start), (STEPS, INPUTS), CLASSES)
    assert spec.groups == (6,)


def written(rnn, x):
    """Zeros into which a sample was written by a view: no constant."""
    state = torch.zeros(1, len(x), rnn.hidden_size)
    state[:, :, :INPUTS].copy_(x[:, 0][None])
    return state


def test_a_state_that_samples_were_written_into_fixes_its_units():
    class Starts(Recurrent):
        def forward(self, x):
            return self.fc(self.rnn(x, written(self.rnn, x))[0][:, -1])

    assert describe("m", Starts("GRU", 6), (STEPS, INPUTS), CLASSES).groups == ()


@pytest.mark.parametrize("separate", [False, True])
def test_heads_of_torchs_attention(separate):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"kdim": INPUTS, "vdim": INPUTS} if separate else {}
            self.inputs = nn.Linear(INPUTS, 12)
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True, **sizes)
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x):
            query = self.inputs(x)
            return self.fc(self.attention(query, *[x if separate else query] * 2)[0].sum(1))

    spec = describe("m", Own(), (STEPS, INPUTS), CLASSES)
    assert spec.groups == (12, 3, 12)
    heads, found = (Span(1, 0, 3, repeat=4),), axes_of(spec)
    assert found["attention.in_proj_bias"] == (heads * 3,)
    assert found["attention.bias_k"] == ((), (), heads)
    assert found["attention.out_proj.weight"] == ((Span(2, 0, 12),), heads)
    if separate:
        assert found["attention.q_proj_weight"] == (heads, (Span(0, 0, 12),))
        assert found["attention.v_proj_weight"] == (heads, ())
    else:
        assert found["attention.in_proj_weight"] == (heads * 3, (Span(0, 0, 12),))


def test_shared_keys_bind_the_heads_that_read_them():
    _, spec = made("attention with shared keys", 6)
    assert spec.groups == (6, 3)
    assert axes_of(spec)["q.weight"][0] == (Span(1, 0, 3, repeat=2 * SIZE),)
    assert axes_of(spec)["v.weight"][0] == (Span(1, 0, 3, repeat=SIZE),)


def test_a_mask_from_the_samples_binds_no_head():
    class Padded(Attention):
        def forward(self, x):
            padding = (x.sum(2) == 0)[:, None, None]
            x = self.inputs(x)
            q, k, v = (one(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for one in (self.q, self.k, self.v))
            scores = (q @ k.transpose(-2, -1)).masked_fill(padding, -1e9)
            y = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
            return self.fc((self.out(y) * (~padding[:, 0, 0, :, None]).float()).sum(1))

    assert describe("m", Padded(3), (STEPS, INPUTS), CLASSES).groups == (6, 3, 6)


def test_layers_of_gpt2_have_their_outputs_on_the_second_axis():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(INPUTS, 8)), nn.Parameter(torch.zeros(8))
            self.second, self.fc = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, CLASSES)

        def forward(self, x):
            h = torch.addmm(self.bias, x.reshape(-1, INPUTS), self.weight).view(len(x), -1, 8)
            return self.fc((h.relu() @ self.second).sum(1))

    spec = describe("m", Turned(), (STEPS, INPUTS), CLASSES)
    assert spec.groups == (8, 6)
    found = axes_of(spec)
    assert (found["weight"], found["bias"]) == (((), (Span(0, 0, 8),)), ((Span(0, 0, 8),),))
    assert found["second"] == ((Span(0, 0, 8),), (Span(1, 0, 6),))
    assert spec.tensors[0].uses == STEPS


@pytest.mark.parametrize("name", ["weight norm", "old weight norm"])
def test_rows_of_lengths_and_directions(name):
    _, spec = made(name, 6)
    assert spec.groups == (6, 6, 6)
    lengths, direction, *_ = (one for one in spec.tensors if one.layer.startswith("2") and one.kind != "bias")
    assert lengths.axes == ((Span(1, 0, 6),), (), ())
    assert direction.axes == ((Span(1, 0, 6),), (Span(0, 0, 6),), ())
    assert [(one.shape, axis) for one, axis in directions(spec)][1] == (direction.shape, 0)
    assert not has_smaller(spec)


@pytest.mark.parametrize("name", ["weight norm", "old weight norm"])
def test_a_row_of_weight_norm_is_switched_off_by_its_length_alone(name):
    """A direction of 0 is 0 / 0."""
    _, spec = made(name, 6)
    part = ChosenNeurons(np.arange(18) % 3 > 0).mask(spec)
    values = {one.name: view for one, view in spec.views(cut(np.ones(spec.size, np.float32), part, spec))}
    lengths, direction = (
        values[one.name] for one in spec.tensors if one.layer.startswith("2") and one.kind != "bias"
    )
    np.testing.assert_array_equal(lengths.ravel(), [0, 1, 1, 0, 1, 1])
    np.testing.assert_array_equal(direction[:, :, 0][0], 1)
    np.testing.assert_array_equal(direction[:, :, 0][1], [0, 1, 1, 0, 1, 1])


def test_spectral_norm_keeps_the_neurons_of_its_weight():
    module = normed(parametrizations.spectral_norm, 6)
    spec = describe("m", module, (STEPS, INPUTS), CLASSES)
    assert spec.groups == (6, 6, 6)
    found = axes_of(spec)
    assert found["2.parametrizations.weight.original"] == ((Span(1, 0, 6),), (Span(0, 0, 6),), ())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn", "attention", "attention of torch"])
def test_no_trainer_leaves_out_rows_of_gates_or_heads(name):
    assert not has_smaller(made(name, MODELS[name][1])[1])


def test_a_parametrisation_of_the_users_fixes_its_weight():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    module = nn.Sequential(
        nn.Flatten(), nn.Linear(STEPS * INPUTS, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    nn.utils.parametrize.register_parametrization(module[3], "weight", Symmetric())
    spec = describe("m", module, (STEPS, INPUTS), CLASSES)
    assert axes_of(spec)["3.parametrizations.weight.original"] == ((), ())
    assert all(span.group != ALWAYS_ACTIVE for axis in axes_of(spec)["1.weight"] for span in axis)
