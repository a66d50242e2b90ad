"""The spec of any module: what it lists, which neurons it finds coupled, and that the coupling is real."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fleetune.coordinator.spec.neurons import _spans
from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.architectures import build, names
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Span
from fleetune.protocols.model.torch_backbone import last_layer
from fleetune.protocols.randomness import Key

KEY = Key.of("tests", "blueprint")


class Wired(nn.Module):
    """A module of `layers`, whose forward pass is a function of (self, x)."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.wiring = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.wiring(self, x)


def depthwise(input_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 12, 3, groups=6),  # depthwise, two outputs a channel
        nn.GroupNorm(12, 12),
        nn.Hardtanh(),
        nn.Conv2d(12, 5, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, num_classes),
    )


def dense(input_shape, num_classes):
    """Concatenation, then an addition across it."""

    def forward(self, x):
        both = torch.cat([self.a(x), self.b(x)], dim=1)
        return self.out(F.relu(both + self.c(x)).mean(dim=(2, 3)))

    channels = input_shape[0]
    a, b, c = nn.Conv2d(channels, 3, 1), nn.Conv2d(channels, 5, 1), nn.Conv2d(channels, 8, 1)
    return Wired(forward, a=a, b=b, c=c, out=nn.Linear(8, num_classes))


def channels_last(input_shape, num_classes):
    """Flattened with the channels innermost, so that channel c owns columns c, c + 4, ..."""

    def forward(self, x):
        return self.out(F.relu(self.a(x)).permute(0, 2, 3, 1).flatten(1))

    size = 4 * input_shape[1] * input_shape[2]
    return Wired(forward, a=nn.Conv2d(input_shape[0], 4, 1), out=nn.Linear(size, num_classes))


def gated(input_shape, num_classes):
    """Squeeze and excitation: the gate's outputs are the channels that they scale."""

    def forward(self, x):
        x = F.relu(self.a(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return self.out((x * gate[:, :, None, None]).amax(dim=(2, 3)))

    layers = {"a": nn.Conv2d(input_shape[0], 6, 3), "down": nn.Linear(6, 2), "up": nn.Linear(2, 6)}
    return Wired(forward, **layers, out=nn.Linear(6, num_classes))


def padded_shortcut(input_shape, num_classes):
    """A shortcut that fills the new channels with zeros (He et al., option A)."""

    def forward(self, x):
        x = F.relu(self.a(x))
        return self.out(F.relu(self.b(x) + F.pad(x, (0, 0, 0, 0, 1, 2))).mean((2, 3)))

    channels = input_shape[0]
    return Wired(forward, a=nn.Conv2d(channels, 3, 1), b=nn.Conv2d(3, 6, 1), out=nn.Linear(6, num_classes))


def words(input_shape, num_classes):
    """Embedding, 1-D convolution and maximum over time."""

    def forward(self, x):
        hidden = F.relu(self.conv(self.embed(x).transpose(1, 2)))
        return self.out(self.norm(hidden.max(dim=2).values))

    layers = {"embed": nn.Embedding(20, 5), "conv": nn.Conv1d(5, 4, 3), "norm": nn.LayerNorm(4)}
    return Wired(forward, **layers, out=nn.Linear(4, num_classes))


def recurrent(input_shape, num_classes):
    """Rows of an image, read forwards and backwards by two layers."""

    def forward(self, x):
        return self.out(self.lstm(self.gru(x.flatten(1, 2))[0])[0][:, -1])

    gru = nn.GRU(input_shape[2], 5, batch_first=True, bidirectional=True)
    return Wired(forward, gru=gru, lstm=nn.LSTM(10, 6, 2, batch_first=True), out=nn.Linear(6, num_classes))


def transformer(input_shape, num_classes):
    def forward(self, x):
        return self.out(self.layer(self.inputs(x.flatten(1, 2)))[:, 0])

    layer = nn.TransformerEncoderLayer(12, 3, dim_feedforward=10, batch_first=True)
    return Wired(forward, inputs=nn.Linear(input_shape[2], 12), layer=layer, out=nn.Linear(12, num_classes))


OWN = [depthwise, dense, channels_last, padded_shortcut, recurrent, transformer]
SHAPES = {"text-embedding": (24,), "har-cnn": (9, 128), "resnet8": (3, 32, 32), "resnet18": (3, 16, 16)}
WITH_NEURONS = [name for name in names() if name != "text-embedding"]  # it has no hidden layer


def own(function):
    return f"{__name__}:{function.__name__}"


def axes(spec, name):
    return next(tensor.axes for tensor in spec.tensors if tensor.name == name)


def owners(spec, tensor, axis):
    """For each position on an axis (group, neuron), or (ALWAYS_ACTIVE, 0), shape (size, 2)."""
    spans = tensor.axes[axis] or (Span(ALWAYS_ACTIVE, 0, tensor.shape[axis]),)
    return np.array(
        [
            (span.group, span.start + neuron if span.group >= 0 else 0)
            for span in spans
            for neuron in range(span.count)
            for _ in range(span.repeat)
        ]
    )


# What a spec lists


@pytest.mark.parametrize("name", [*names(), *map(own, [*OWN, gated])])
def test_spec_holds_parameters_then_statistics(name):
    shape = SHAPES.get(name, (1, 12, 12))
    module = build(name, shape, 10)
    spec = describe(name, module, shape, 10)
    parameters = dict(module.named_parameters())
    statistics = {path: one for path, one in module.named_buffers() if one.dtype == torch.float32}
    assert [tensor.name for tensor in spec.tensors] == [*parameters, *statistics]
    assert spec.num_parameters == sum(one.numel() for one in parameters.values())
    assert spec.size == spec.num_parameters + sum(one.numel() for one in statistics.values())
    assert [tensor.shape for tensor in spec.tensors] == [
        tuple(module.state_dict()[t.name].shape) for t in spec.tensors
    ]
    assert sum(where.stop - where.start for where in spec.layers.values()) == spec.num_parameters
    assert (spec.name, spec.input_shape, spec.num_classes) == (name, shape, 10)


@pytest.mark.parametrize("name", [*WITH_NEURONS, *map(own, [*OWN, gated])])
def test_every_axis_is_filled_with_neurons_that_exist(name):
    shape = SHAPES.get(name, (1, 12, 12))
    spec = describe(name, build(name, shape, 10), shape, 10)
    seen = set()
    for tensor in spec.tensors:
        for axis, size in enumerate(tensor.shape):
            found = owners(spec, tensor, axis)
            assert len(found) == size
            for group, neuron in found[found[:, 0] >= 0]:
                assert neuron < spec.groups[group]
                seen.add((group, neuron))
    assert len(seen) == sum(spec.groups) > 0


def test_kinds_and_layers():
    spec = describe("d", depthwise((1, 8, 8), 3), (1, 8, 8), 3)
    assert [(tensor.name, tensor.kind, tensor.layer) for tensor in spec.tensors] == [
        ("0.weight", "weight", "0"),
        ("1.weight", "norm", "1"),
        ("1.bias", "norm", "1"),
        ("3.weight", "weight", "3"),
        ("3.bias", "bias", "3"),
        ("4.weight", "norm", "4"),
        ("4.bias", "norm", "4"),
        ("6.weight", "weight", "6"),
        ("6.bias", "bias", "6"),
        ("9.weight", "weight", "9"),
        ("9.bias", "bias", "9"),
        ("1.running_mean", "stat", "1"),
        ("1.running_var", "stat", "1"),
    ]


def test_frozen_parameters_and_other_buffers_are_no_part_of_it():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    module.register_buffer("scale", torch.ones(3))
    assert [tensor.name for tensor in describe("m", module, (4,), 2).tensors] == ["2.weight", "2.bias"]


# Which neurons are coupled


def test_groups_of_lenet5():
    spec, _ = draw("lenet5", (3, 32, 32), 10, KEY)
    assert spec.groups == (6, 16, 120, 84)
    assert axes(spec, "conv1.weight") == ((Span(0, 0, 6),), (), (), ())
    assert axes(spec, "conv2.weight") == ((Span(1, 0, 16),), (Span(0, 0, 6),), (), ())
    assert axes(spec, "fc1.weight") == ((Span(2, 0, 120),), (Span(1, 0, 16, repeat=25),))
    assert axes(spec, "fc2.bias") == ((Span(3, 0, 84),),)
    assert axes(spec, "out.weight") == ((), (Span(3, 0, 84),))
    assert axes(spec, "out.bias") == ((),)


def test_groups_of_mlp():
    spec, _ = draw("mlp", (1, 8, 8), 10, KEY)
    assert spec.groups == (64, 32)
    assert axes(spec, "fc1.weight") == ((Span(0, 0, 64),), ())


def test_branches_of_resnet8_share_a_group():
    spec, _ = draw("resnet8", (3, 32, 32), 10, KEY)
    assert spec.groups == (64, 64, 128, 128, 256, 256)
    outputs = {tensor.name: tensor.axes[0] for tensor in spec.tensors}
    for sharing in (
        ("conv.weight", "norm.bias", "norm.running_mean", "block1.conv2.weight", "block1.norm2.weight"),
        (
            "block2.conv2.weight",
            "block2.norm2.bias",
            "block2.shortcut.conv.weight",
            "block2.shortcut.norm.weight",
        ),
        ("block3.conv2.weight", "block3.norm2.running_var", "block3.shortcut.conv.weight"),
    ):
        assert len({outputs[name] for name in sharing}) == 1
    assert axes(spec, "out.weight") == ((), outputs["block3.conv2.weight"])


def test_depthwise_channels_stay_themselves():
    spec, _ = draw(own(depthwise), (1, 8, 8), 3, KEY)
    assert spec.groups == (6, 5)
    assert axes(spec, "3.weight") == ((Span(0, 0, 6, repeat=2),), (), (), ())
    assert axes(spec, "4.bias") == ((Span(0, 0, 6, repeat=2),),)
    assert axes(spec, "6.weight") == ((Span(1, 0, 5),), (Span(0, 0, 6, repeat=2),), (), ())


def test_inputs_of_grouped_convolutions_are_always_active():
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 16, 3)
    )
    spec = describe("m", module, (1, 8, 8), 3)
    assert spec.groups == (6,)
    assert axes(spec, "0.bias") == ((),)
    assert axes(spec, "1.weight") == ((Span(0, 0, 6),), (), (), ())


def test_concatenated_channels_are_added_to_others():
    spec, _ = draw(own(dense), (1, 8, 8), 3, KEY)
    assert spec.groups == (3, 5)
    assert axes(spec, "c.weight")[0] == axes(spec, "out.weight")[1] == (Span(0, 0, 3), Span(1, 0, 5))


def test_a_gate_belongs_to_its_channels():
    spec, _ = draw(own(gated), (1, 8, 8), 3, KEY)
    assert spec.groups == (6, 2)
    assert axes(spec, "up.weight") == ((Span(0, 0, 6),), (Span(1, 0, 2),))


def test_zero_padded_channels_bind_nothing():
    spec, _ = draw(own(padded_shortcut), (1, 8, 8), 3, KEY)
    assert axes(spec, "b.weight")[0] == (Span(1, 0, 1), Span(0, 0, 3), Span(1, 1, 2))
    assert spec.groups == (3, 3)


def test_channels_innermost_in_a_flatten():
    spec, _ = draw(own(channels_last), (1, 8, 8), 3, KEY)
    assert axes(spec, "out.weight")[1] == (Span(0, 0, 4),) * 64


def test_embedding_and_convolution_over_time():
    spec, _ = draw(own(words), (9,), 3, KEY)
    assert spec.groups == (5, 4)
    assert axes(spec, "embed.weight") == ((), (Span(0, 0, 5),))
    assert axes(spec, "conv.weight") == ((Span(1, 0, 4),), (Span(0, 0, 5),), ())
    assert axes(spec, "norm.weight") == axes(spec, "norm.bias") == ((Span(1, 0, 4),),)
    assert next(tensor.kind for tensor in spec.tensors if tensor.name == "norm.weight") == "norm"


def test_a_layer_used_twice_is_coupled_to_itself():
    def forward(self, x):
        return self.out(F.relu(self.again(F.relu(self.again(F.relu(self.first(x)))))))

    layers = {"first": nn.Linear(4, 6), "again": nn.Linear(6, 6), "out": nn.Linear(6, 2)}
    spec = describe("m", Wired(forward, **layers), (4,), 2)
    assert spec.groups == (6,)
    assert axes(spec, "again.weight") == ((Span(0, 0, 6),), (Span(0, 0, 6),))


@pytest.mark.parametrize(
    "between",
    [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(),
        nn.GELU(),
        nn.SiLU(),
        nn.Hardswish(),
        nn.Softplus(),
        nn.PReLU(6),
        nn.PReLU(),
        nn.Dropout(),
        nn.Dropout2d(),
        nn.Identity(),
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, affine=False),
        nn.InstanceNorm2d(6, affine=True),
        nn.GroupNorm(2, 6),
        nn.LayerNorm([6, 8, 8]),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.LPPool2d(2, 2),
        nn.AdaptiveMaxPool2d(3),
        nn.AdaptiveAvgPool2d(3),
        nn.Upsample(scale_factor=2),
        nn.ZeroPad2d(1),
        nn.ReflectionPad2d(1),
        nn.Conv2d(6, 6, 3, groups=6, padding_mode="circular", padding=1),
        nn.Sequential(nn.Flatten(2), nn.MaxPool1d(2), nn.Unflatten(2, (4, 8))),
    ],
    ids=lambda layer: str(layer).split("\n")[0],
)
def test_layers_that_keep_channels_apart(between):
    module = nn.Sequential(
        nn.Conv2d(1, 6, 1), between, nn.Conv2d(6, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    spec = describe("m", module, (1, 8, 8), 2)
    assert spec.groups == (6,)
    assert axes(spec, "2.weight") == ((), (Span(0, 0, 6),), (), ())
    assert all(tensor.axes[0] == (Span(0, 0, 6),) for tensor in spec.tensors if tensor.shape == (6,))


@pytest.mark.parametrize(
    "unknown",
    [
        lambda self, h: h.cumsum(dim=2),
        lambda self, h: F.softmax(h, dim=2),
        lambda self, h: h + self.x,
        lambda self, h: h.index_put((torch.tensor([0]),), torch.zeros(1)),
    ],
    ids=["cumsum", "softmax", "input-shortcut", "index_put"],
)
def test_what_is_not_understood_is_always_active(unknown):
    def forward(self, x):
        self.x = x
        return self.out(F.relu(self.head(unknown(self, self.a(x)))).mean(1))

    layers = {"a": nn.Linear(4, 4), "head": nn.Linear(4, 3), "out": nn.Linear(3, 2)}
    spec = describe("m", Wired(forward, **layers), (5, 4), 2)
    assert spec.groups == (3,)
    assert axes(spec, "a.weight") == ((), ())
    assert axes(spec, "head.weight") == ((Span(0, 0, 3),), ())


def test_flipped_channels_are_coupled_with_their_mirror_image():
    module = Wired(
        lambda self, x: self.out(self.a(x) + self.a(x).flip(1)), a=nn.Linear(3, 4), out=nn.Linear(4, 2)
    )
    spec = describe("m", module, (3,), 2)
    assert spec.groups == (2,)
    assert axes(spec, "a.bias") == ((Span(0, 0, 1), Span(0, 1, 1, repeat=2), Span(0, 0, 1)),)


def test_one_column_that_hears_two_neurons_makes_them_one():
    def forward(self, x):
        both = torch.cat([self.a(x), self.b(x)], dim=2)  # one behind the other in time, not side by side
        return self.out(F.relu(self.c(both)).mean(2))

    layers = {
        "a": nn.Conv1d(1, 4, 3),
        "b": nn.Conv1d(1, 4, 3),
        "c": nn.Conv1d(4, 3, 1),
        "out": nn.Linear(3, 2),
    }
    spec = describe("m", Wired(forward, **layers), (1, 9), 2)
    assert spec.groups == (4, 3)
    assert (
        axes(spec, "a.weight")[0] == axes(spec, "b.bias")[0] == axes(spec, "c.weight")[1] == (Span(0, 0, 4),)
    )


@pytest.mark.parametrize(
    "total", [lambda h: h.sum(1, keepdim=True), lambda h: torch.sum(input=h, axis=1, keepdim=True)]
)
def test_neurons_that_are_summed_are_one(total):
    def forward(self, x):
        return self.out(total(self.a(x).unflatten(1, (4, 2))).flatten(1))

    spec = describe("m", Wired(forward, a=nn.Linear(3, 8), out=nn.Linear(2, 2)), (3,), 2)
    assert spec.groups == (2,)
    assert axes(spec, "a.bias") == ((Span(0, 0, 2),) * 4,)
    assert axes(spec, "out.weight") == ((), (Span(0, 0, 2),))


@pytest.mark.parametrize(
    "scale",
    [
        lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda h: (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True),
        lambda h: (
            h
            * torch.sigmoid(torch.cat([h.amax(-1, keepdim=True), h.mean(-1, keepdim=True)], -1).sum(-1, True))
        ),
        lambda h: h @ h.transpose(1, 2) @ h,
        lambda h: F.scaled_dot_product_attention(h, h, h),
    ],
    ids=["root mean square", "mean and deviation", "gate", "product", "attention"],
)
def test_what_is_computed_of_a_whole_layer_couples_none_of_it(scale):
    module = Wired(lambda self, x: self.out(scale(self.a(x)).sum(1)), a=nn.Linear(3, 4), out=nn.Linear(4, 2))
    spec = describe("m", module, (5, 3), 2)
    assert spec.groups == (4,)
    assert axes(spec, "a.weight")[0] == axes(spec, "out.weight")[1] == (Span(0, 0, 4),)


def test_a_single_neuron_is_always_active_and_couples_none():
    """A gate of one value, as an attention over time: methods keep at least one neuron of a group."""

    def forward(self, x):
        h = self.a(x)
        return self.out((self.gate(h).softmax(1).transpose(1, 2) @ h).squeeze(1))

    spec = describe(
        "m", Wired(forward, a=nn.Linear(3, 4), gate=nn.Linear(4, 1), out=nn.Linear(4, 2)), (5, 3), 2
    )
    assert spec.groups == (4,)
    assert axes(spec, "gate.weight") == ((), (Span(0, 0, 4),))
    assert axes(spec, "gate.bias") == ((),)


def test_columns_of_constants_are_always_active():
    def forward(self, x):
        logits = self.out(torch.cat(tensors=[self.a(x), self.token.expand(len(x), 2)], dim=1))
        self.idle(x)
        return logits

    layers = {"a": nn.Linear(3, 4), "token": nn.Parameter(torch.ones(2)), "out": nn.Linear(6, 2)}
    spec = describe("m", Wired(forward, **layers, idle=nn.Linear(3, 5)), (3,), 2)
    assert axes(spec, "token") == ((),)
    assert axes(spec, "out.weight") == ((), (Span(0, 0, 4), Span(ALWAYS_ACTIVE, 0, 2)))


def test_word_vectors_that_score_words_again():
    def forward(self, x):
        scores = F.linear(self.embed(x).mean(1), self.embed.weight)
        return self.out(F.relu(self.a(F.relu(scores))))

    layers = {"embed": nn.Embedding(7, 5), "a": nn.Linear(7, 4), "out": nn.Linear(4, 2)}
    spec = describe("m", Wired(forward, **layers), (6,), 2)
    assert spec.groups == (5, 4)
    assert axes(spec, "embed.weight") == ((), (Span(0, 0, 5),))
    assert axes(spec, "a.weight") == ((Span(1, 0, 4),), ())


def test_a_weight_that_is_also_used_otherwise_is_always_active():
    def forward(self, x):
        return self.out(F.relu(self.a(x))) + self.a.weight.mean()

    spec = describe("m", Wired(forward, a=nn.Linear(3, 4), out=nn.Linear(4, 2)), (3,), 2)
    assert spec.groups == ()
    assert axes(spec, "a.weight") == axes(spec, "out.weight") == ((), ())


def test_transformer_layers_have_heads_and_hidden_neurons():
    """The shortcut around them brings the samples, so the layer's own width is always active."""
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, batch_first=True)
    module = Wired(lambda self, x: self.out(self.layer(x).mean(1)), layer=layer, out=nn.Linear(8, 2))
    spec = describe("m", module, (5, 8), 2)
    assert spec.groups == (2, 12)
    assert axes(spec, "layer.self_attn.in_proj_weight") == ((Span(0, 0, 2, repeat=4),) * 3, ())
    assert axes(spec, "layer.self_attn.out_proj.weight") == ((), (Span(0, 0, 2, repeat=4),))
    assert axes(spec, "layer.linear2.weight") == ((), (Span(1, 0, 12),))


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 5)))))
def test_spans_say_what_each_position_is(places):
    spans = _spans(places)
    said = [
        None if span.group == ALWAYS_ACTIVE else (span.group, span.start + neuron)
        for span in spans
        for neuron in range(span.count)
        for _ in range(span.repeat)
    ]
    assert said == (places if any(places) else [])


# That the coupling is real


def load(module, spec, weights):
    state = {tensor.name: torch.from_numpy(part) for tensor, part in spec.views(weights)}
    module.load_state_dict(state, strict=False)
    return module.eval()


def silenced(spec, weights, silent):
    """Every output of a neuron in `silent` is 0: its rows, biases, norm parameters and running means."""
    weights = weights.copy()
    for tensor, part in spec.views(weights):
        rows = silent(owners(spec, tensor, 0))
        part[rows] = 1 if tensor.name.endswith("running_var") else 0
    return weights


def disturbed(spec, weights, silent):
    """Whoever listens to a neuron in `silent` hears it differently: columns of weights."""
    weights = weights.copy()
    for tensor, part in spec.views(weights):
        if len(tensor.shape) > 1 and tensor.axes[1]:
            rows = np.arange(len(part)) % 3  # a norm would not notice what is the same for all of them
            part[:, silent(owners(spec, tensor, 1))] += rows.reshape(-1, *[1] * (part.ndim - 1))
    return weights


@pytest.mark.parametrize("name", [*WITH_NEURONS, *map(own, OWN)])
def test_nobody_hears_a_silent_neuron(name):
    """With a third of all neurons silent, what the spec calls their columns matters no more; it did."""
    shape = SHAPES.get(name, (1, 12, 12))
    spec, weights = draw(name, shape, 10, KEY)
    weights += KEY.generator().uniform(0, 0.05, spec.size).astype(np.float32)
    module = build(name, shape, 10)
    batch = torch.from_numpy(KEY.child("batch").generator().random((2, *shape), np.float32))
    drawn = [KEY.child(group).uniform(count) < 1 / 3 for group, count in enumerate(spec.groups)]

    def silent(found, only=None):
        return np.array(
            [group >= 0 and only in (None, group) and drawn[group][neuron] for group, neuron in found]
        )

    def logits(values):
        with torch.no_grad():
            return load(module, spec, values)(batch)

    quiet = silenced(spec, weights, silent)
    assert logits(quiet).std() > 0
    assert torch.allclose(logits(quiet), logits(disturbed(spec, quiet, silent)), rtol=0, atol=1e-6)
    loud = logits(weights)
    for group, chosen in enumerate(drawn):
        heard = disturbed(spec, weights, lambda found, group=group: silent(found, group))
        assert not chosen.any() or not torch.allclose(loud, logits(heard), rtol=0, atol=1e-3)


# Same in, same out


def test_the_same_module_gives_the_same_spec():
    first, second = (describe("m", build("resnet8", (1, 16, 16), 4), (1, 16, 16), 4) for _ in range(2))
    assert first == second
    assert first.hash == second.hash


def test_the_hash_follows_the_shape():
    hashes = {
        draw("cnn-kapc", shape, classes, KEY)[0].hash
        for shape in ((1, 28, 28), (1, 8, 8))
        for classes in (10, 7)
    }
    assert len(hashes) == 4


def test_draw_follows_its_key_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    spec, weights = draw("cnn-fedspu-cifar", (3, 32, 32), 10, KEY)
    _, again = draw("cnn-fedspu-cifar", (3, 32, 32), 10, KEY)
    _, other = draw("cnn-fedspu-cifar", (3, 32, 32), 10, KEY.child("other"))
    assert torch.equal(torch.get_rng_state(), before)
    assert weights.dtype == np.float32
    assert weights.shape == (spec.size,) == (134_946,)
    assert np.array_equal(weights, again)
    assert not np.array_equal(weights, other)
    assert np.all(weights[spec.slices["norm2.running_var"]] == 1)
    assert np.all(weights[spec.slices["norm2.running_mean"]] == 0)
    assert weights.flags.writeable


def test_describing_leaves_the_module_as_it_was():
    module = build("resnet8", (1, 16, 16), 4)
    module.block1.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    describe("m", module, (1, 16, 16), 4)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(one.grad is None for one in module.parameters())


# Mistakes


def tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def same_storage():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight.data = module[0].weight.data
    return module


def registered_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def test_two_tensors_in_the_same_memory_are_refused():
    with pytest.raises(ModelError, match=r"model 'm': 0\.weight and 2\.weight are two tensors in"):
        describe("m", same_storage(), (4,), 4)


@pytest.mark.parametrize(
    ("make", "tensors"), [(tied, "0.weight 0.bias 2.bias"), (registered_twice, "0.weight 0.bias")]
)
def test_a_tied_tensor_stands_once_under_its_first_name(make, tensors):
    module = make()
    spec = describe("m", module, (4,), 4)
    assert [tensor.name for tensor in spec.tensors] == tensors.split()
    assert spec.groups == ()  # its rows are outputs of the network, and its columns inputs
    assert last_layer(spec, module) == "2"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(5, 2), r"cannot take input \(4,\)"),
        (nn.Linear(4, 3), r"gives \(2, 3\) for two samples; it must give \(2, 2\)"),
        (nn.Flatten(), "no trainable parameters"),
        (nn.Linear(4, 2).half(), r"weight is torch\.float16"),
    ],
    ids=["input", "output", "nothing", "half"],
)
def test_modules_that_do_not_fit(module, message):
    with pytest.raises(ModelError, match=message):
        describe("m", module, (4,), 2)
