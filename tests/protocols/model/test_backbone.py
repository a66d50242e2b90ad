"""A model of which a part trains: what is frozen, what travels, both trainers alike, and users' mistakes."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file
from tests.helpers import card
from tests.helpers.nightly import sooner
from tests.hostile import body_of
from torch import nn

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.run.enrolment import begin
from fleetune.coordinator.spec.partial_training import described
from fleetune.edge_agent.training.cached_features import cache_features, fits
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.errors import (
    ModelError,
    PacketCorrupt,
    PacketForeign,
    PacketNotFinite,
    SettingError,
)
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.backbone_file import backbone_file, read_backbone
from fleetune.protocols.model.compute_cost import step_products
from fleetune.protocols.model.torch_backbone import frozen_tensors
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import AdapterSection, ModelSection, TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import read_enrolment

SHAPE, CLASSES = (1, 8, 8), 5
MODULE = "backbone_models"
HEAD = {"trainable": ("head",)}
LORA = {"trainable": ("head",), "adapters": AdapterSection(2, ("body.*",), alpha=4.0)}
BODY_ABOVE = {"trainable": ("body.conv2", "body.norm2", "head")}
UPPER_LORA = {"trainable": ("head",), "adapters": AdapterSection(2, ("body.conv2",))}
PARTS = [
    HEAD,
    LORA,
    {"adapters": AdapterSection(1, ("head", "body.conv2"))},
    {"trainable": ("body.norm2", "head")},
]


def net(shape, classes):
    body = nn.Sequential()
    body.add_module("conv1", nn.Conv2d(shape[0], 6, 3, stride=2))
    body.add_module("norm1", nn.BatchNorm2d(6))
    body.add_module("relu1", nn.ReLU())
    body.add_module("conv2", nn.Conv2d(6, 8, 3, padding=1))
    body.add_module("norm2", nn.BatchNorm2d(8))
    body.add_module("relu2", nn.ReLU())
    body.add_module("flatten", nn.Flatten())
    whole = nn.Sequential()
    whole.add_module("body", body)
    whole.add_module("head", nn.Linear(8 * 9, classes))
    return whole


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType(MODULE)
    module.net = net
    monkeypatch.setitem(sys.modules, MODULE, module)


def section(**part):
    return ModelSection(f"{MODULE}:net", input_shape=SHAPE, num_classes=CLASSES, **part)


def run_of(**model):
    model = {"name": f"{MODULE}:net", "input_shape": SHAPE, "num_classes": CLASSES, **model}
    return parse_run({"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}})


def batch(seed, n=6):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, *SHAPE)).astype(np.float32), rng.integers(0, CLASSES, n)


def frozen_of(module):
    return {name: tensor.detach().numpy().copy() for name, tensor in frozen_tensors(module)}


def test_the_spec_holds_what_trains_and_names_what_is_frozen():
    spec, _ = described(section(**LORA), Key(1))
    assert [tensor.name for tensor in spec.tensors] == [
        "body.conv1.lora_a.weight",
        "body.conv1.lora_b.weight",
        "body.conv2.lora_a.weight",
        "body.conv2.lora_b.weight",
        "head.weight",
        "head.bias",
    ]
    assert spec.backbone.adapters.scale == 2.0
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    assert shapes["body.conv2.lora_a.weight"] == (2, 6, 3, 3)
    assert shapes["body.conv2.lora_b.weight"] == (8, 2, 1, 1)
    frozen = [tensor.name for tensor in spec.frozen]
    assert frozen[:4] == ["body.conv1.weight", "body.conv1.bias", "body.norm1.weight", "body.norm1.bias"]
    assert frozen[-4:] == [f"body.norm{n}.running_{what}" for n in (1, 2) for what in ("mean", "var")]


def test_a_model_that_trains_in_whole_is_described_as_ever():
    whole, _ = described(section(), Key(1))
    everything, _ = described(section(trainable=("*",)), Key(1))
    assert codec.encode(whole, whole) == codec.encode(everything, everything)
    frozen, _ = described(section(**HEAD), Key(1))
    bodies = [body_of(codec.encode(spec, spec)) for spec in (whole, frozen)]
    assert [b"backbone\x83" in body for body in bodies] == [False, True]


def tied(shape, classes):
    a, b = nn.Linear(64, 64), nn.Linear(64, 64)
    b.weight = a.weight
    return nn.Sequential(nn.Flatten(), a, nn.ReLU(), b, nn.Linear(64, classes))


def test_a_tied_weight_trains_with_either_of_its_layers():
    sys.modules[MODULE].tied = tied
    model = ModelSection(f"{MODULE}:tied", input_shape=SHAPE, num_classes=CLASSES, trainable=("3", "4"))
    spec, _ = described(model, Key(1))
    assert [tensor.name for tensor in spec.tensors] == ["1.weight", "3.bias", "4.weight", "4.bias"]
    assert [tensor.name for tensor in spec.frozen] == ["1.bias"]


@pytest.mark.parametrize("part", sooner(PARTS, kept=2))
def test_both_trainers_train_the_same_part(part):
    spec, module = described(section(**part), Key(1))
    frozen = {name: value + 0.1 for name, value in frozen_of(module).items()}
    bundle = make_run_model_bundle(section(**part), Key(1))
    assert bundle.spec == spec
    given = {name: value.copy() for name, value in frozen.items()}
    pair = [
        make_backend("torch", spec, None, 1, frozen=given),
        make_backend("onnx", spec, bundle, 1, frozen=given),
    ]
    weights = np.random.default_rng(0).normal(size=spec.size).astype(np.float32) / 4
    for backend in pair:
        views = {tensor.name: view for tensor, view in spec.views(weights)}
        for name in (name for name in views if name.endswith("running_var")):
            views[name][...] = 1.0
        backend.load(weights)
    x, y = batch(3)
    for step in range(3):
        losses = [backend.step(x, y, Key(step)) for backend in pair]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        torch_gradient, onnx_gradient = (backend.gradient for backend in pair)
        assert np.linalg.norm(torch_gradient - onnx_gradient) <= 1e-5 * np.linalg.norm(torch_gradient)
        for backend in pair:
            backend.weights[:] -= 0.1 * backend.gradient
    np.testing.assert_allclose(pair[0].weights, pair[1].weights, atol=1e-5)
    np.testing.assert_allclose(*(one.answer(x, "logits") for one in pair), atol=1e-4)
    for name, value in frozen.items():
        np.testing.assert_array_equal(given[name], value)  # statistics of frozen norms too


def all_ways(spec, settings, frozen):
    bundle = make_run_model_bundle(settings, Key(1))
    return (
        make_backend("torch", spec, None, 1, frozen=frozen),
        make_backend("torch", spec, None, 1, frozen=frozen, device=card.NAME),
        make_backend("onnx", spec, bundle, 1, frozen=frozen),
    )


@pytest.mark.parametrize(("part", "size"), sooner([(HEAD, 72), (UPPER_LORA, 126), (BODY_ABOVE, 54)], kept=1))
def test_from_its_features_on_a_model_trains_as_in_whole(part, size):
    spec, module = described(section(**part), Key(1))
    x, y = batch(3, n=7)
    data = DeviceData(x, y, x[:2], y[:2], x[2:5], y[2:5])
    for whole in all_ways(spec, section(**part), frozen_of(module)):
        upper = whole.upper_layers()
        assert upper.size == size
        weights = np.random.default_rng(0).uniform(0.1, 0.5, spec.size).astype(np.float32)
        found = []
        for backend, samples in ((whole, data), (upper.backend, cache_features(upper, data))):
            trainer = LocalTrainer(
                backend, samples, TrainingSection(epochs=2, batch_size=3, learning_rate=0.1)
            )
            fit = trainer.fit(weights, FitPlan(), Key(4))
            found.append(
                (fit.weights, fit.loss, trainer.loss(fit.weights, "test"), trainer.gradient(fit.weights))
            )
            assert samples.fingerprint == data.fingerprint
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(  # after all this: the whole model still computes
            whole.answer(x, "features"), upper.backend.answer(upper.features(x), "features"), atol=1e-5
        )


@pytest.mark.parametrize("part", sooner([{"trainable": ("body.conv1", "head")}, LORA, {}], kept=1))
def test_a_model_that_trains_from_its_first_layer_has_no_features(part):
    spec, module = described(section(**part), Key(1))
    frozen = frozen_of(module) if part else {}
    assert {backend.upper_layers() for backend in all_ways(spec, section(**part), frozen)} == {None}


def test_features_end_below_dropout(monkeypatch):
    def dropping(shape, classes):
        whole = net(shape, classes)
        layers = list(whole.body)
        whole.body = nn.Sequential(*layers[:3], nn.Dropout(0.5), *layers[3:])
        return whole

    monkeypatch.setattr(sys.modules[MODULE], "net", dropping)
    spec, module = described(section(**HEAD), Key(1))
    x, y = batch(3)
    for whole in all_ways(spec, section(**HEAD), frozen_of(module)):
        upper = whole.upper_layers()
        assert upper.size == 6 * 9
        weights = np.full(spec.size, 0.1, np.float32)
        found = []
        for backend, given in ((whole, x), (upper.backend, upper.features(x))):
            backend.load(weights)
            found.append(backend.step(given, y, Key(8)))
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_features_of_a_depthwise_layer_have_a_row_for_each_sample(monkeypatch):
    """Its graph computes with the channels first."""

    def separable(shape, classes):
        whole = net(shape, classes)
        whole.body.conv1, whole.body.norm1 = nn.Conv2d(shape[0], 16, 3, stride=2), nn.BatchNorm2d(16)
        whole.body.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        whole.body.norm2 = nn.Conv2d(16, 8, 1)
        return whole

    monkeypatch.setattr(sys.modules[MODULE], "net", separable)
    part = {"trainable": ("body.norm2", "head")}
    spec, module = described(section(**part), Key(1))
    x, y = batch(3)
    _, _, whole = all_ways(spec, section(**part), frozen_of(module))
    upper = whole.upper_layers()
    assert upper.size == 16 * 9
    weights, gradients = np.full(spec.size, 0.1, np.float32), []
    for backend, given in ((whole, x), (upper.backend, upper.features(x))):
        backend.load(weights)
        backend.step(given, y, Key(8))
        gradients.append(backend.gradient)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_features_that_take_too_much_memory_are_not_kept():
    spec, module = described(section(**HEAD), Key(1))
    upper = make_backend("torch", spec, None, 1, frozen=frozen_of(module)).upper_layers()
    x, y = batch(3, n=10)
    data = DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])
    assert fits(upper, data, None)
    assert fits(upper, data, 4 * 4 * 72 * 10)
    assert not fits(upper, data, 4 * 4 * 72 * 10 - 4)


def test_adapters_change_nothing_until_they_are_trained():
    run = run_of(trainable=["head"], adapters={"rank": 2, "of": ["body.conv*"]})
    beginning = begin(run)
    spec, frozen = (
        beginning.enrolment.spec,
        read_backbone(beginning.backbone, beginning.enrolment.spec.backbone),
    )
    tensors = {tensor.name: view for tensor, view in spec.views(beginning.enrolment.weights)}
    assert np.abs(tensors["body.conv2.lora_a.weight"]).max() > 0
    assert not tensors["body.conv2.lora_b.weight"].any()
    backend = make_backend("torch", spec, None, 1, frozen={name: one.copy() for name, one in frozen.items()})
    backend.load(beginning.enrolment.weights)
    plain = net(SHAPE, CLASSES).eval()
    state = {**frozen, **{name: one for name, one in tensors.items() if "lora" not in name}}
    plain.load_state_dict({name: torch.tensor(one) for name, one in state.items()}, strict=False)
    x, _ = batch(1)
    laid_out = {"memory_format": torch.channels_last}  # as the backend has it: sums have an order
    with torch.no_grad():
        wanted = plain.to(**laid_out)(torch.from_numpy(x).to(**laid_out)).numpy()
    np.testing.assert_array_equal(backend.answer(x, "logits"), wanted)


def test_a_bundles_recipe_draws_both_parts_as_torch_does():
    from fleetune.protocols.bundle.first_weights import draw_adapters, draw_frozen, draw_weights

    settings, key = run_of(trainable=["head"], adapters={"rank": 2, "of": ["body.conv2"]}), Key(9)
    spec, module = described(settings.model, key)
    bundle = make_run_model_bundle(settings.model, key)
    drawn = draw_weights(bundle.recipe, spec, key)
    tensors = {tensor.name: view for tensor, view in spec.views(draw_adapters(drawn, spec, key))}
    own = dict(module.named_parameters())
    np.testing.assert_array_equal(tensors["head.weight"], own["head.weight"].detach())
    frozen = draw_frozen(bundle.recipe, spec, key)
    for name, value in frozen_of(module).items():
        np.testing.assert_array_equal(frozen[name], value)


def test_a_pretrained_file_gives_the_frozen_part_and_may_lack_the_head(tmp_path):
    _, module = described(section(), Key(5))
    state = {name: one.numpy() for name, one in module.state_dict().items() if "batches" not in name}
    state["head.weight"] = np.zeros((9, 72), np.float32)  # of other classes
    del state["head.bias"]
    path = tmp_path / "w.safetensors"
    save_file(state, path)
    beginning = begin(run_of(weights=str(path), trainable=["head"]))
    spec = beginning.enrolment.spec
    assert spec.num_parameters == 72 * CLASSES + CLASSES
    assert {name: one.tobytes() for name, one in load(beginning.backbone).items()} == {
        tensor.name: state[tensor.name].tobytes() for tensor in spec.frozen
    }
    assert beginning.enrolment.weights.any()
    assert read_enrolment(codec.encode(beginning.enrolment, spec)).spec == spec

    del state["body.conv2.weight"]
    save_file(state, path)
    with pytest.raises(ModelError, match=r"has no tensor body.conv2.weight, which is frozen"):
        begin(run_of(weights=str(path), trainable=["head"]))


def test_other_values_are_another_model():
    spec, _ = described(section(**HEAD), Key(1))
    one, other = (begin(run_of(trainable=["head"])) for _ in range(2))
    assert one.backbone == other.backbone
    assert one.enrolment.spec.hash == other.enrolment.spec.hash != spec.hash


def test_a_file_that_is_not_the_backbone_is_refused():
    spec, module = described(section(**HEAD), Key(1))
    tensors = frozen_of(module)
    file = backbone_file(spec.backbone, tensors)
    assert {name: one.tolist() for name, one in load(file).items()} == {
        name: one.tolist() for name, one in read_backbone(file, spec.backbone).items()
    }
    for hostile, problem in (
        (file[:-4], PacketCorrupt),
        (file + b"\0", PacketCorrupt),
        (b"\xff" * 8 + file[8:], PacketForeign),
        (b"", PacketForeign),
        (file[:-4] + np.float32(np.nan).tobytes(), PacketNotFinite),
    ):
        with pytest.raises(problem):
            read_backbone(hostile, spec.backbone)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            {"trainable": ["hed"]},
            r"model.trainable: 'hed' matches no layer of the model; did you mean 'head'",
        ),
        (
            {"adapters": {"rank": 2, "of": ["body.norm*"]}},
            r"matches body.norm1 \(BatchNorm2d\), which is not",
        ),
        ({"adapters": {"rank": 2, "of": ["fc"]}}, r"model.adapters.of: 'fc' matches no layer"),
        ({"trainable": ["head"], "adapters": {"rank": 2, "of": ["*"]}}, r"layer head trains in full"),
        ({"trainable": ["head"], "init": "kaiming"}, r"model.init: 'kaiming' draws what trains"),
    ],
)
def test_users_mistakes_are_one_line(part, line):
    with pytest.raises(SettingError, match=line) as problem:
        begin(run_of(**part))
    assert "\n" not in str(problem.value)


def test_a_step_costs_no_more_than_what_lies_above_the_lowest_trained_layer():
    whole, _ = described(section(), Key(1))
    head, _ = described(section(**HEAD), Key(1))
    forward = sum(tensor.size * tensor.uses for tensor in whole.tensors)
    assert step_products(whole) < 3 * forward
    assert step_products(head) == forward + 72 * CLASSES
    assert step_products(head, ()) == forward


def test_norms_below_evaluate_while_the_rest_trains():
    _, module = described(section(trainable=("body.norm2", "head")), Key(1))
    module.train()
    assert not module.body.norm1.training
    assert module.body.norm2.training
