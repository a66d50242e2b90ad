"""The models by name: sizes as the papers give them, other input shapes, the user's own, and mistakes."""

import sys

import pytest
import torch
from torch import nn

from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.architectures import build, names, try_out


def own(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * 4, num_classes))


def no_module(input_shape, num_classes):
    return "a model"


def too_wide(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes + 1))


def two_outputs(input_shape, num_classes):
    return nn.LSTM(4, num_classes, batch_first=True)


def broken(input_shape, num_classes):
    raise KeyError("width")


def token_counter(input_shape, num_classes):
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(8 * input_shape[0], num_classes))


def sizes(module):
    statistics = sum(one.numel() for name, one in module.named_buffers() if "running" in name)
    return sum(one.numel() for one in module.parameters()), statistics


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "parameters", "statistics"),
    [
        ("lenet5", (3, 32, 32), 10, 62_006, 0),
        ("lenet-dcpfl", (1, 28, 28), 10, 212_542, 0),
        ("cnn-moon", (3, 32, 32), 10, 62_006 - 850 + 7_140 + 21_760 + 2_570, 0),
        ("cnn-fedspu-cifar", (3, 32, 32), 10, 134_946 - 44, 44),
        ("cnn-fedspu-emnist", (1, 28, 28), 62, 64_802 - 80, 80),
        ("cnn-kapc", (1, 28, 28), 10, 643_850, 0),
        ("resnet8", (3, 32, 32), 10, 1_235_274, 2_688),
        ("resnet8", (1, 28, 28), 10, 1_229_002, 2_688),
        ("resnet18", (3, 32, 32), 10, 11_173_962, 9_600),
        ("mlp", (1, 8, 8), 10, 64 * 65 + 32 * 65 + 10 * 33, 0),
        ("har-cnn", (9, 128), 6, 131_014, 0),
    ],
)
def test_sizes_are_the_papers(name, input_shape, num_classes, parameters, statistics):
    assert sizes(build(name, input_shape, num_classes)) == (parameters, statistics)


def test_resnet18_has_the_21_layers_of_kapc():
    layers = [
        part
        for part in build("resnet18", (3, 16, 16), 10).modules()
        if isinstance(part, (nn.Conv2d, nn.Linear))
    ]
    assert len(layers) == 21


@pytest.mark.parametrize("name", [name for name in names() if name not in ("har-cnn", "text-embedding")])
@pytest.mark.parametrize("input_shape", [(1, 8, 8), (1, 28, 28), (3, 20, 24)])
def test_image_models_adapt_to_the_image(name, input_shape):
    module = build(name, input_shape, 7)
    assert module.training
    assert module(torch.rand(5, *input_shape)).shape == (5, 7)


def test_fedspu_models_have_one_biased_fully_connected_layer():
    module = build("cnn-fedspu-cifar", (3, 32, 32), 10)
    assert [
        (one.in_features, one.out_features, one.bias is not None)
        for one in module
        if isinstance(one, nn.Linear)
    ] == [
        (1024, 120, False),
        (120, 84, False),
        (84, 10, True),
    ]


def test_a_model_of_ones_own():
    module = build(f"{__name__}:own", (5, 2, 2), 3)
    assert sizes(module) == (5 * 4 * 3 + 3, 0)


def test_a_model_for_integers():
    assert build(f"{__name__}:token_counter", (6,), 4).training


def test_trying_out_changes_nothing():
    module = build("resnet8", (1, 16, 16), 4)
    module.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    generator = torch.get_rng_state()
    logits = try_out("mine", module, (1, 16, 16), 4)
    assert logits.shape == (2, 4)
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "input_shape", "message"),
    [
        ("lenet", (1, 28, 28), "did you mean 'lenet5'"),
        ("transformer-xxl", (1, 28, 28), "mlp, autoencoder"),
        (
            "no_such_package.models:net",
            (1, 28, 28),
            "'no_such_package.models' cannot be imported: ModuleNotFoundError",
        ),
        (":net", (1, 28, 28), "cannot be imported"),
        (f"{__name__}:absent", (1, 28, 28), "has no function 'absent'"),
        (f"{__name__}:nn", (1, 28, 28), "has no function 'nn'"),
        (f"{__name__}:no_module", (1, 28, 28), "returned str"),
        (
            f"{__name__}:broken",
            (1, 28, 28),
            "cannot be built for input (1, 28, 28) and 4 classes: KeyError: 'width'",
        ),
        (f"{__name__}:own", (5, 3, 3), "cannot take input (5, 3, 3): RuntimeError"),
        (f"{__name__}:too_wide", (1, 2, 2), "gives (2, 5) for two samples; it must give (2, 4)"),
        (f"{__name__}:two_outputs", (3, 4), "tuple with 0"),
        ("lenet5", (1, 2, 2), "(1, 2, 2)"),
        ("lenet5", (64,), "(64,)"),
        ("resnet8", (9, 128), "(9, 128)"),
        ("har-cnn", (1, 28, 28), "(1, 28, 28)"),
        ("cnn-kapc", (), "()"),
    ],
)
def test_mistakes_are_told_in_one_line(name, input_shape, message):
    with pytest.raises(ModelError) as problem:
        build(name, input_shape, 4)
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_module_that_fails_to_import(tmp_path, monkeypatch):
    (tmp_path / "typo_model.py").write_text("def net(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="cannot be imported: SyntaxError"):
        build("typo_model:net", (1, 8, 8), 10)
    assert "typo_model" not in sys.modules
