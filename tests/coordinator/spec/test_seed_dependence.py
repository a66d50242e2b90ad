"""What another seed draws otherwise in a user's model travels with the run; what cannot travel is refused."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.helpers.frozen_models import FrozenLayer, Masked, Shuffled, WithProjection
from torch import nn

from fleetune.coordinator.bundle_file import write_bundle
from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.run.enrolment import begin
from fleetune.coordinator.run.models import find_model
from fleetune.coordinator.spec.partial_training import described
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.errors import ModelError, PacketForeign, SettingError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.backbone_file import read_backbone
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection, TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.research.simulate import simulate

SHAPE, CLASSES = (1, 8, 8), 10
MODULE = "two_builds_models"
TRAVELS = {
    FrozenLayer: {"inner.weight", "inner.bias"},
    WithProjection: {"projection"},
    Masked: {"mask"},
    Shuffled: {"order"},
}


class PlainAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.random = torch.randn(64, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(x.flatten(1) @ self.random)


class PlainList(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.randperm(64)[:16].tolist()
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(x.flatten(1)[:, self.rows])


class RandomDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(64, dtype=torch.float64))
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out((x.flatten(1) * self.scale).float())


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(64), persistent=False)
        self.register_buffer("anchors", torch.linspace(0, 1, 64))
        self.norm = nn.BatchNorm1d(64)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out(self.norm(x.flatten(1) * self.anchors + self.places / 64))


class Counting(nn.Module):
    """Its steps are warmed up by a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.out(x.flatten(1)) * self.steps.clamp(max=10) / 10


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)


def section(kind, **part):
    setattr(sys.modules[MODULE], kind.__name__, lambda shape, classes: kind())
    name = f"{MODULE}:{kind.__name__}"
    return ModelSection(name, input_shape=SHAPE, num_classes=CLASSES, **part)


def run_of(kind, **model):
    named = {"name": section(kind).name, "input_shape": list(SHAPE), "num_classes": CLASSES, **model}
    return parse_run({"run": {"name": "r"}, "model": named, "method": {"name": "fedavg"}})


def batch(seed, n=12):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, *SHAPE)).astype(np.float32), rng.integers(0, CLASSES, n)


def trained(backend):
    """What two epochs make of small weights, and what the model then answers."""
    x, y = batch(1)
    data = DeviceData(x, y, x[:0], y[:0], x[:2], y[:2])
    trainer = LocalTrainer(backend, data, TrainingSection(epochs=2, batch_size=4, learning_rate=0.1))
    weights = np.random.default_rng(0).uniform(0.05, 0.2, backend.spec.size).astype(np.float32)
    fit = trainer.fit(weights, FitPlan(), Key(4))
    backend.load(fit.weights)
    return fit.weights, backend.answer(x, "logits")


@pytest.mark.parametrize("kind", TRAVELS)
def test_what_another_seed_draws_travels_and_both_trainers_agree(kind):
    beginning = begin(run_of(kind))
    spec = beginning.enrolment.spec
    assert {tensor.name for tensor in spec.frozen} == TRAVELS[kind]
    bundle = make_run_model_bundle(section(kind), Key(77)).for_devices(spec)  # of another seed
    found = []
    for trainer in ("torch", "onnx"):
        frozen = read_backbone(memoryview(bytearray(beginning.backbone)), spec.backbone)
        found.append(trained(make_backend(trainer, spec, bundle, 1, frozen=frozen)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_constant_buffers_and_running_statistics_do_not_travel_in_a_backbone():
    spec, _ = described(section(Constants), Key(1))
    assert not spec.frozen
    assert [tensor.name for tensor in spec.tensors if tensor.kind == "stat"] == [
        "norm.running_mean",
        "norm.running_var",
    ]


@pytest.mark.parametrize("kind", [FrozenLayer, WithProjection])
def test_simulations_with_both_trainers_agree_and_the_shared_model_is_whole(tmp_path, kind):
    settings = {
        "run": {"name": "r", "rounds": 2, "seed": 3},
        "model": {"name": section(kind).name},
        "method": {"name": "fedavg"},
        "data": {"source": "digits"},
        "fleet": {"devices": 2},
    }
    found = []
    for trainer in ("torch", "onnx"):
        changed = {"fleet.trainer": trainer}
        result = simulate(settings, tmp_path / trainer, set=changed, report=False)
        tensors = load_file(result.folder / "models" / "shared.safetensors")
        assert tensors.keys() >= TRAVELS[kind]
        found.append((result.devices["accuracy_personal"].to_numpy(), tensors))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for name, value in found[0][1].items():
        np.testing.assert_allclose(value, found[1][1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [FrozenLayer, WithProjection])
def test_a_bundles_file_begins_a_run_without_torch_and_devices_get_no_values_in_it(tmp_path, kind):
    settings = run_of(kind)
    written = write_bundle(settings, tmp_path / "m.bundle", None)
    by_torch = find_model(settings)
    found = find_model(run_of(kind, name=f"bundle:{written.path}"))
    assert found.frozen.keys() == by_torch.frozen.keys() == TRAVELS[kind]
    for name, value in by_torch.frozen.items():
        np.testing.assert_array_equal(found.frozen[name], value)
    spec = begin(settings).enrolment.spec
    sent = written.bundle.for_devices(spec)
    assert not isinstance(sent.frozen, bytes)
    sent.check_is_of(spec)


def test_a_run_of_an_older_version_that_sent_no_backbone_is_named():
    bundle = make_run_model_bundle(section(WithProjection), Key(1))
    older, _ = described(section(Constants), Key(1))
    with pytest.raises(PacketForeign, match=r"takes projection as a frozen tensor.*begin a new run"):
        bundle.for_devices(older)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (PlainAttribute, r"tensor random is random and is no parameter or buffer.*register_buffer"),
        (PlainList, r"a value that is neither is random and is no parameter or buffer"),
        (RandomDouble, r"buffer scale is random, and its torch.float64 values do not fit into float32"),
    ],
)
def test_what_cannot_travel_is_refused_in_one_line(kind, line):
    with pytest.raises(ModelError, match=line) as problem:
        described(section(kind), Key(1))
    assert "\n" not in str(problem.value)


def test_int8_does_not_round_a_buffer_of_whole_numbers():
    with pytest.raises(SettingError, match=r"model.backbone: int8 would round buffer order of torch.int64"):
        described(section(Shuffled, backbone="int8"), Key(1))


def test_a_buffer_that_training_changes_starts_anew_with_the_weights_and_has_no_graph():
    spec, _ = described(section(Counting), Key(1))
    backend = make_backend("torch", spec, None, 1)
    first, again = trained(backend), trained(backend)
    np.testing.assert_array_equal(first[0], again[0])
    with pytest.raises(ModelError, match=r"the model itself \(Counting\) changes its buffer steps while it"):
        make_run_model_bundle(section(Counting), Key(1))
