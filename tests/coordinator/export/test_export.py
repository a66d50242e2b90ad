"""Training graphs against torch's own autograd on the module as its author wrote it."""

import copy
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zstandard
from tests.helpers.nightly import sooner
from torch import nn
from torch.nn import functional

from fleetune.coordinator.export import graphs, onnx_lowering, steps
from fleetune.coordinator.export.graphs import export, forward_graph
from fleetune.coordinator.export.torch_comparison import check
from fleetune.coordinator.spec.spec_from_torch import describe
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.bundle.bundle import ANSWER, CONTRAST, DISTILLATION, EVALUATE_GRADIENT, TRAIN, Bundle
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model import architectures
from fleetune.protocols.model.loss_terms import Contrast, Distillation
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.torch_draws import GivenDraws
from fleetune.protocols.randomness import Key

KEY = Key.of("test", "export")


class Images(nn.Module):
    """Grouped, depthwise, dilated, strided and transposed convolution, residual, all norms and pools."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a = nn.Conv2d(shape[0], 18, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(18)
        self.depthwise = nn.Conv2d(18, 18, 5, padding=4, dilation=2, groups=18)
        self.instance = nn.InstanceNorm2d(18, affine=True, track_running_stats=True)
        self.grouped = nn.Conv2d(18, 24, 3, stride=2, padding=1, groups=3)
        self.group_norm = nn.GroupNorm(4, 24)
        self.bare = nn.BatchNorm2d(24, affine=False, track_running_stats=False)
        self.up = nn.ConvTranspose2d(24, 8, 3, stride=2, padding=1, output_padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout2d(0.3)
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        x = self.relu(self.norm(self.a(x)))
        x = x + functional.hardswish(self.instance(self.depthwise(x)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        x = self.drop(functional.gelu(self.group_norm(self.grouped(x))))
        x = functional.leaky_relu(self.bare(x), 0.1)
        x = functional.pad(functional.softplus(self.up(x)), (1, 0, 0, 1))
        x = functional.avg_pool2d(functional.silu(x), 3, stride=2, padding=1, count_include_pad=False)
        return self.out(functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Series(nn.Module):
    """One-dimensional layers, and what moves, cuts and joins."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a = nn.Conv1d(shape[0], 8, 5, stride=2)
        self.norm = nn.BatchNorm1d(8)
        self.unflatten = nn.Unflatten(1, (2, 4))
        self.b = nn.Conv1d(8, 12, 3, padding=2, dilation=2)
        self.prelu = nn.PReLU()
        self.drop = nn.Dropout(0.4)
        self.norm_of_rows = nn.BatchNorm1d(24)
        self.out = nn.Linear(24, classes)

    def forward(self, x):
        x = self.unflatten(self.norm(self.a(x))).flatten(1, 2)
        first, second = x.chunk(2, 1)
        x = functional.elu(self.prelu(self.b(torch.cat([second, first * 2], 1))))
        few, many = functional.max_pool1d(x, 3, 2).split([5, 7], 1)
        x = functional.avg_pool1d(torch.cat([many, few], 1)[:, :, 1:], 2)
        x = torch.cat([x.amax(-1), torch.tanh(x).mean(-1)], 1)
        x = self.drop(torch.stack([x, x**2], 1).sum(1))
        return self.out(self.norm_of_rows(x)) * x.std(1, keepdim=True)


class Words(nn.Module):
    """Whole numbers in: embedding, attention by hand or torch's, LayerNorm, mean over the words."""

    def __init__(self, classes, own_attention):
        super().__init__()
        self.embedding = nn.Embedding(40, 16, padding_idx=0)
        self.place = nn.Parameter(torch.randn(1, 9, 16) / 10)
        self.norm = nn.LayerNorm(16)
        self.queries = nn.Linear(16, 48)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.out = nn.Linear(16, classes)
        self.own_attention = own_attention

    def forward(self, x):
        x = self.embedding(x) + self.place
        n, words, size = x.shape
        q, k, v = self.queries(self.norm(x)).view(n, words, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.own_attention:
            found = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v
        else:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + found.transpose(1, 2).reshape(n, words, size)
        return self.out(torch.sigmoid(x + self.feed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, classes, kind):
        super().__init__()
        self.layer = kind(6, 8, batch_first=True)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.layer(x)[0][:, -1])


def named(name):
    return lambda shape: architectures.build(name, shape, 10)


MODELS = {
    "mlp": (named("mlp"), (1, 8, 8)),
    "lenet5": (named("lenet5"), (1, 28, 28)),
    "lenet-dcpfl": (named("lenet-dcpfl"), (1, 12, 12)),
    "cnn-kapc": (named("cnn-kapc"), (3, 17, 18)),
    "cnn-fedspu-cifar": (named("cnn-fedspu-cifar"), (3, 32, 32)),
    "cnn-fedspu-emnist": (named("cnn-fedspu-emnist"), (1, 28, 28)),
    "resnet8": (named("resnet8"), (1, 28, 28)),
    "resnet18": (named("resnet18"), (3, 16, 16)),
    "har-cnn": (named("har-cnn"), (9, 64)),
    "images": (lambda shape: Images(shape, 10), (3, 12, 10)),
    "series": (lambda shape: Series(shape, 10), (6, 30)),
    "words": (lambda _: Words(10, own_attention=True), (9,)),
    "words-causal": (lambda _: Words(10, own_attention=False), (9,)),
    "lstm": (lambda _: Recurrent(10, nn.LSTM), (5, 6)),
}


@cache
def exported(name):
    """The model, its spec and what became of it; exported once for all tests."""
    make, shape = MODELS[name]
    module = seeded(lambda: make(shape))
    spec = describe(name, module, shape, 10)
    made = export(spec, module, weights_of(spec, module))
    price(made)
    return module, spec, made


def price(made):
    """Devices know what each graph takes before they run it, for one sample as for many."""
    for name, graph in made.graphs.items():
        one, many = (cost_of(name, graph, num_samples) for num_samples in (1, 9))
        assert 0 < one.operations < many.operations < 10 * one.operations + 10**6


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def weights_of(spec, module):
    state = module.state_dict()
    return np.concatenate([state[tensor.name].numpy().ravel() for tensor in spec.tensors])


def exported_module(module, shape, classes=4, name="mine:net"):
    spec = describe(name, module, shape, classes)
    made = export(spec, module, weights_of(spec, module))
    price(made)
    return spec, made


def run(graph: Graph, given):
    session = onnxruntime.InferenceSession(write_onnx(graph), providers=["CPUExecutionProvider"])
    feeds = {port.name: np.asarray(given[port.name]) for port in graph.inputs}
    return dict(zip(graph.output_names, session.run(None, feeds), strict=True))


def batch(module, spec, num_samples, noises=()):
    rng = KEY.generator()
    if any(isinstance(part, nn.Embedding) for part in module.modules()):
        x = rng.integers(40, size=(num_samples, *spec.input_shape))
    else:
        x = rng.normal(size=(num_samples, *spec.input_shape)).astype(np.float32)
    given = {"x": x, "y": rng.integers(spec.num_classes, size=num_samples)}
    for index, noise in enumerate(noises):
        given[f"noise:{index}"] = noise.draw(KEY, index, num_samples)
    return given


def torch_step(module, given, *, training=True):
    """Loss, gradients and new statistics as torch has them; the module is a copy."""
    module = copy.deepcopy(module).train(training)
    x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])
    with GivenDraws(lambda index, _: torch.from_numpy(given[f"noise:{index}"])):
        loss = functional.cross_entropy(module(x), y)
    loss.backward()
    found = {"loss": loss.item()}
    found |= {f"gradient:{name}": one.grad.numpy() for name, one in module.named_parameters()}
    found |= {f"statistic:{name}": one.numpy() for name, one in module.named_buffers() if one.ndim == 1}
    return found


def relative(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def assert_alike(found, wanted, spec):
    names = [f"gradient:{tensor.name}" for tensor in spec.tensors if tensor.kind != "stat"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    flat = [np.concatenate([side[name].ravel() for name in names]) for side in (found, wanted)]
    assert relative(*flat) < 1e-5
    mean = np.linalg.norm(flat[1]) / flat[1].size ** 0.5
    for name in names:
        size = np.linalg.norm(wanted[name])
        if size > 1e-3 * mean * wanted[name].size ** 0.5:  # smaller ones are rounding, e.g. before a norm
            assert np.linalg.norm(found[name] - wanted[name]) < 1e-5 * size, name
    for name, value in found.items():
        if name.startswith("statistic:"):
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", sooner(MODELS, kept=("mlp", "lenet5", "resnet8", "har-cnn")))
def test_gradients_and_statistics_are_torchs(name):
    module, spec, made = exported(name)
    tensors = dict(module.state_dict())
    for num_samples in (9, 3):  # neither traced nor compared while exporting
        given = batch(module, spec, num_samples, made.noises)
        for graph, training in ((TRAIN, True), (EVALUATE_GRADIENT, False)):
            found = run(made.graphs[graph], tensors | given)
            assert_alike(found, torch_step(module, given, training=training), spec)
            statistics = {one for one in found if one.startswith("statistic:")}
            changing = {f"statistic:{tensor.name}" for tensor in spec.tensors if tensor.kind == "stat"}
            assert statistics == (changing if training else set())


@pytest.mark.nightly
def test_a_deep_network_without_kinks_is_right_in_every_batch(monkeypatch):
    """With ReLU a value on its kink makes torch differ from torch in float64 by as much, now and then."""

    def smooth(x, inplace=False):
        return functional.softplus(x) - 0.5

    monkeypatch.setattr(functional, "relu", smooth)
    monkeypatch.setattr(nn.ReLU, "forward", lambda _, x: smooth(x))
    module = seeded(lambda: architectures.build("resnet18", (3, 32, 32), 10))
    spec = describe("resnet18", module, (3, 32, 32), 10)
    graph, tensors = graphs._graph(steps.prepare(spec, module), TRAIN), dict(module.state_dict())
    for num_samples in (9, 3, 2):
        given = batch(module, spec, num_samples)
        assert_alike(run(graph, tensors | given), torch_step(module, given), spec)


LARGE = {"resnet18", "cnn-fedspu-cifar", "cnn-fedspu-emnist"}


@pytest.mark.parametrize("name", sooner(MODELS, kept=("mlp", "lenet5", "resnet8", "har-cnn", "words")))
def test_answers_are_those_of_evaluation(name):
    module, spec, made = exported(name)
    given = batch(module, spec, 5)
    found = run(made.graphs[ANSWER], dict(module.state_dict()) | given)
    backend = TorchBackend(spec, copy.deepcopy(module))
    for what in ("logits", "features"):
        assert relative(found[what], backend.answer(given["x"], what)) < 1e-5


@pytest.mark.parametrize("name", sooner(MODELS, kept=("mlp", "lenet5", "resnet8", "har-cnn", "words")))
def test_files_are_valid_and_small(name):
    _, _, made = exported(name)
    for graph in made.graphs.values():
        graph.check()
        data = write_onnx(graph)
        onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
        assert len(zstandard.compress(data)) < (20_000 if "resnet" in name else 7_000)
        read = {name for node in graph.nodes for name in node.inputs} | set(graph.output_names)
        assert all(read.intersection(node.outputs) for node in graph.nodes)
        assert all(constant.name in read for constant in graph.constants)


@pytest.mark.parametrize("name", sooner(["lenet5", "images", "words"], kept=["lenet5"]))
def test_the_same_module_gives_the_same_bytes(name):
    _, spec, made = exported(name)
    make, shape = MODELS[name]
    module = seeded(lambda: make(shape))
    again = export(spec, module, weights_of(spec, module))
    assert again.noises == made.noises
    assert again.graphs.keys() == made.graphs.keys()
    for graph, other in zip(made.graphs.values(), again.graphs.values(), strict=True):
        assert write_onnx(graph) == write_onnx(other)


@pytest.mark.parametrize("name", ["lenet5", "cnn-fedspu-emnist", "series", "words"])
@pytest.mark.parametrize("graph", [DISTILLATION, CONTRAST])
def test_loss_terms_are_those_of_the_torch_backend(name, graph):
    module, spec, made = exported(name)
    given = batch(module, spec, 6, made.noises)
    rng = KEY.child("guide").generator()
    weights = weights_of(spec, module)
    backend = TorchBackend(spec, copy.deepcopy(module))
    what = "logits" if graph == DISTILLATION else "features"
    size = backend.answer(given["x"], what).shape
    answers = tuple(rng.normal(size=size).astype(np.float32) for _ in range(1 + (graph == CONTRAST)))
    loss_term = (Distillation if graph == DISTILLATION else Contrast)(*[weights] * len(answers), 0.6, 2.5)
    names = ("teacher",) if graph == DISTILLATION else ("near", "far")
    extra = dict(zip(names, answers, strict=True)) | {
        "strength": np.float32(0.6),
        "temperature": np.float32(2.5),
    }
    found = run(made.graphs[graph], dict(module.state_dict()) | given | extra)
    noises = [torch.from_numpy(given[f"noise:{index}"]) for index in range(len(made.noises))]
    with GivenDraws(lambda index, _: noises[index]):
        loss = backend.step(given["x"], given["y"], KEY, extra_loss=ExtraLoss(loss_term, answers))
    flat = np.concatenate(
        [found[f"gradient:{one.name}"].ravel() for one in spec.tensors if one.kind != "stat"]
    )
    assert relative(flat, backend.gradient[: spec.num_parameters]) < 1e-5
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    without_term = torch_step(module, given)
    assert (
        relative(
            flat,
            np.concatenate([without_term[f"gradient:{n}"].ravel() for n, _ in module.named_parameters()]),
        )
        > 1e-3
    )


def test_forward_graph_gives_loss_and_statistics():
    module, spec, made = exported("cnn-fedspu-emnist")
    graph = forward_graph(spec, module)
    statistics = [f"statistic:{one.name}" for one in spec.tensors if one.kind == "stat"]
    assert sorted(graph.output_names) == sorted(["loss", *statistics])
    given = dict(module.state_dict()) | batch(module, spec, 4)
    found, wanted = run(graph, given), run(made.graphs[TRAIN], given)
    for name in graph.output_names:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_input_types_are_those_the_module_takes():
    assert exported("words")[2].input_type == "i8"
    assert exported("mlp")[2].input_type == "f4"


def test_dropout_is_a_graph_input_only_in_training():
    _, _, made = exported("series")
    assert made.noises == (Noise(("n", 24), 0.4),)
    assert exported("images")[2].noises == (Noise(("n", 24, 1, 1), 0.3),)
    inputs = {name: {port.name for port in graph.inputs} for name, graph in made.graphs.items()}
    assert [name for name, ports in inputs.items() if "noise:0" in ports] == [TRAIN, DISTILLATION, CONTRAST]


def test_the_mean_over_all_batches_counts_them():
    """BatchNorm with momentum None, over several steps."""
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 4))
    spec, made = exported_module(module, (6,))
    statistics = {name: one.numpy().copy() for name, one in module.state_dict().items() if one.ndim == 1}
    module.train()
    for step in range(1, 4):
        given = batch(module, spec, 4 + step)
        given["x"] += step
        found = run(
            made.graphs[TRAIN], dict(module.state_dict()) | statistics | given | {"batches": np.float32(step)}
        )
        module(torch.from_numpy(given["x"]))
        for name in ("1.running_mean", "1.running_var"):
            statistics[name] = found[f"statistic:{name}"]
            np.testing.assert_allclose(statistics[name], module.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_norm_used_twice_moves_its_statistics_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x):
            return self.out(self.norm(self.a(self.norm(x))))

    module = Twice()
    spec, made = exported_module(module, (6,))
    given = batch(module, spec, 7)
    found = run(made.graphs[TRAIN], dict(module.state_dict()) | given)
    assert_alike(found, torch_step(module, given), spec)


class NextWord(nn.Module):
    """The embedding is the head too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(40, 8), nn.LayerNorm(8), nn.Linear(8, 40)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x).mean(1)))


def test_a_tied_tensor_gets_the_gradients_of_both_uses():
    module = seeded(NextWord)
    spec, made = exported_module(module, (5,), 40)
    given = batch(module, spec, 6)
    found = run(made.graphs[TRAIN], dict(module.state_dict()) | given)
    assert_alike(found, torch_step(module, given), spec)
    backend = TorchBackend(spec, copy.deepcopy(module))
    backend.step(given["x"], given["y"], KEY)
    assert relative(found["gradient:embedding.weight"].ravel(), backend.gradient[: 40 * 8]) < 1e-5
    answer = run(made.graphs[ANSWER], dict(module.state_dict()) | given)
    assert answer["features"].shape == (6, 8)  # of the head, whose weight has the embedding's name


def test_frozen_parameters_and_buffers_become_constants():
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    module[0].weight.requires_grad_(False)
    spec, made = exported_module(module, (6,))
    given = batch(module, spec, 3)
    found = run(made.graphs[TRAIN], dict(module.state_dict()) | given)
    wanted = copy.deepcopy(module)
    functional.cross_entropy(wanted(torch.from_numpy(given["x"])), torch.from_numpy(given["y"])).backward()
    assert relative(found["gradient:0.bias"], wanted[0].bias.grad.numpy()) < 1e-5
    assert "gradient:0.weight" not in found


def test_the_module_and_the_random_numbers_stay_as_they_were():
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 4)))
    module[0].eval()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    exported_module(module, (6,))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module] == [False, True, True]
    assert module[1].momentum is None
    assert torch.equal(torch.get_rng_state(), state)


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def within(function):
    """The function in the midst of a model, as block2.inner."""
    block = nn.Sequential()
    block.add_module("inner", Block(function))
    model = nn.Sequential()
    for name, part in (("block1", nn.Linear(6, 8)), ("block2", block), ("out", nn.Linear(8, 4))):
        model.add_module(name, part)
    return model


def half_zeroed(x):
    mask = torch.ones_like(x)
    mask.chunk(2, 1)[0].zero_()
    return x * mask


def first_sample_zeroed(x):
    x = x * 1
    x[0] = 0
    return x


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (torch.digamma, r"'mine:net' cannot be exported: block2\.inner uses aten\.digamma\.default, which"),
        (functional.dropout, r"block2\.inner draws random numbers \(dropout\) in evaluation"),
        (lambda x: x + torch.rand_like(x), r"block2\.inner draws random numbers \(uniform\) in evaluation"),
        (lambda x: x[:, torch.randperm(8)], r"block2\.inner uses aten\.randperm"),
        (lambda x: functional.rrelu(x, training=True), r"block2\.inner uses aten\.rrelu_with_noise"),
        (lambda x: x - x.flip(0), r"block2\.inner uses aten\.flip.*batch axis"),
        (lambda x: x * (x[: len(x) // 2].sum() > 0), r"block2\.inner uses aten\.slice.*depends on the batch"),
        (lambda x: x if x.sum() > 0 else -x, r"cannot be exported: .*agents with torch can train it"),
        (
            lambda x: torch.view_as_complex(x.view(-1, 4, 2)).abs().repeat(1, 2),
            r"block2\.inner uses .*complex numbers",
        ),
        (
            lambda x: x * torch.polar(torch.ones(8), torch.ones(8)).real,
            r"block2\.inner uses .*complex numbers",
        ),
        (half_zeroed, r"block2\.inner uses aten\.split_scatter.*torch\.cat or torch\.stack"),
        (first_sample_zeroed, r"block2\.inner uses aten\.select.*single sample of the batch"),
        (lambda x: x.double().float(), r"block2\.inner uses aten\._to_copy.*float64"),
    ],
)
def test_what_has_no_form_is_named_with_its_module(function, told):
    with pytest.raises(ModelError, match=told) as raised:
        exported_module(within(function).train(), (6,))
    assert "\n" not in str(raised.value)


def by_rank(x):
    largest, places = x.topk(3, -1)
    return torch.zeros_like(x).scatter(-1, places, largest.softmax(-1)) + x.sort(descending=True)[0]


def turned(x):
    theta = torch.tensor([[0.9, 0.2, 0.1], [-0.3, 1.1, 0.05]]) + x[:, :6].view(-1, 2, 3) / 10
    image = (x.unsqueeze(-1) * x.unsqueeze(-2)).unsqueeze(1)
    grid = functional.affine_grid(theta, image.shape, align_corners=False)
    outside, border = (
        functional.grid_sample(image, grid, padding_mode=mode, align_corners=False)
        for mode in ("zeros", "border")
    )
    return (outside + border).mean((1, 2))


def pooled_in_another_layout(x):
    image = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    return x * functional.adaptive_avg_pool2d(image, 1).sum((1, 2, 3))[:, None]


def written_in_parts(x):
    """Writes through views of views into memory that is read, and kept for the backward pass, afterwards."""
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y.view(-1, 2, 4)[:, 1, 2:4] = 3 * x[:, 2:4]  # view, select, slice
    y.view(-1, 2, 4).transpose(1, 2)[..., 0].mul_(x[:, 4:])
    turn = x.new_empty(x.shape)
    turn[..., ::2], turn[..., 1::2] = -x[..., 1::2], x[..., ::2]
    before = turn[:, :4]
    turn.t_()
    turn[0] += 1  # a slice of all samples
    turn.t_()
    return y * y + turn * before.repeat(1, 2)


@pytest.mark.parametrize(
    "function",
    [
        by_rank,
        lambda x: x * torch.div(torch.arange(8), 3, rounding_mode="floor"),
        lambda x: x * torch.div(x * 5, 2, rounding_mode="trunc"),
        lambda x: x * ((x > 1).any(-1, keepdim=True) | (x > -1).all(-1, keepdim=True)),
        lambda x: x * (x > 0).cumsum(-1),
        lambda x: x * x.view(-1, 4, 2).unfold(1, 2, 1).square().mean((1, 3)).repeat(1, 4),
        turned,
        pooled_in_another_layout,
        written_in_parts,
        lambda x: functional.pad(x[:, None], (2, 1), mode="circular")[:, 0, :8] * x,
    ],
    ids=["rank", "floor", "trunc", "any-all", "count", "windows", "affine", "layout", "parts", "circular"],
)
def test_an_operator_within_a_model_is_torchs(function):
    module = seeded(lambda: within(function))
    spec, made = exported_module(module, (6,))
    given = batch(module, spec, 9)
    assert_alike(run(made.graphs[TRAIN], dict(module.state_dict()) | given), torch_step(module, given), spec)


def test_a_backward_operator_is_named_with_the_module_of_its_forward(monkeypatch):
    def smoothed(x):
        return functional.avg_pool1d(x[:, None], 3, 1, 1)[:, 0]

    monkeypatch.delitem(onnx_lowering.RULES, "avg_pool2d_backward")
    with pytest.raises(ModelError, match=r"block2\.inner uses aten\.avg_pool2d_backward.*wrap the model"):
        exported_module(within(smoothed), (6,))


def test_a_graph_that_differs_from_torch_is_refused():
    module, spec, made = exported("lenet5")
    model = steps.prepare(spec, module)
    graph = made.graphs[TRAIN]
    wrong = tuple(
        replace(node, op="Abs") if node.op == "Relu" and index > 5 else node
        for index, node in enumerate(graph.nodes)
    )
    with pytest.raises(ModelError, match=r"gradient:\S+ of graph train differs from torch's by .*\d samples"):
        check(model, module, {TRAIN: replace(graph, nodes=wrong)}, weights_of(spec, module))


class Scaled(nn.Module):
    """A scale without axes, as CLIP has one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


class Halved(nn.Module):
    """Writes into the samples that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        x[:, :3].mul_(0.5)
        return self.layer(x)


@pytest.mark.parametrize("made", [Scaled, Halved])
def test_both_trainers_train_alike(made):
    module = seeded(made)
    spec, graphs = exported_module(module, (6,))
    weights = weights_of(spec, module)
    cost = {"flops_per_sample": 1e3, "activation_bytes_per_sample": 1e3}
    bundle = Bundle(spec, graphs.graphs, graphs.noises, graphs.input_type, weights=weights, **cost)
    given, losses = batch(module, spec, 7), []
    backends = OnnxBackend(bundle), TorchBackend(spec, module)
    for backend in backends:
        backend.load(weights)
        losses.append(backend.step(given["x"].copy(), given["y"], KEY))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert relative(*(backend.gradient for backend in backends)) < 2e-6


def test_a_tensor_with_the_name_of_an_input_is_refused():
    module = within(torch.relu)
    module.register_parameter("x", nn.Parameter(torch.ones(4)))
    with pytest.raises(ModelError, match=r"tensor 'x'.*rename"):
        exported_module(module, (6,))


def test_without_onnxruntime_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"onnxruntime is missing.*pip install"):
        exported_module(nn.Linear(6, 4), (6,))


def test_dropouts_count_and_multiply():
    asked = []

    def numbers(*draw):
        asked.append(draw)
        return torch.full(draw[1].shape, float(len(asked) + 1))

    x = torch.ones(3, 4, 5, 6)
    with GivenDraws(numbers):
        first = nn.Dropout(0.25)(x)
        functional.dropout(x, 0.5, training=False)
        functional.dropout(x, 0.0)
        second = functional.dropout2d(x, p=0.5)
        third = nn.Dropout(0.1, inplace=True)(x)
    noises = Noise((3, 4, 5, 6), 0.25), Noise((3, 4, 1, 1), 0.5), Noise((3, 4, 5, 6), 0.1)
    assert asked == list(enumerate(noises))
    assert first.unique() == 2
    assert second.unique() == 3
    assert third is x
    assert x.unique() == 4
