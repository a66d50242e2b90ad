"""One sample a batch: batch norms over one value use their running statistics, with every trainer alike."""

import sys
from types import ModuleType

import numpy as np
import pytest
from tests.helpers.errors import raises
from torch import nn

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.edge_agent.training.backend import ExtraLoss
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import (
    LocalTrainer,
    single_sample_line,
    trains_on_single_samples,
)
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.tools.research.simulate import simulate

MODULE, SHAPE, CLASSES = "single_sample_models", (1, 8, 8), 10


def net(shape, classes):
    """Of its norms one has 36 values a channel for a sample, two have one."""
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "wide": nn.BatchNorm2d(4),
        "relu": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(144, 16),
        "narrow": nn.BatchNorm1d(16),
        "relu2": nn.ReLU(),
        "plain": nn.BatchNorm1d(16, affine=False, momentum=0.3),
        "drop": nn.Dropout(0.2),
        "out": nn.Linear(16, classes),
    }
    made = nn.Sequential()
    for name, layer in layers.items():
        made.add_module(name, layer)
    return made


def untracked(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, classes))


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType(MODULE)
    module.net, module.untracked = net, untracked
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.fixture
def bundle(_module):
    return make_bundle(f"{MODULE}:net", SHAPE, CLASSES, Key(5))


def pair(bundle):
    return TorchBackend.from_spec(bundle.spec), OnnxBackend(bundle)


def start(spec):
    """Small weights, and statistics of some training."""
    weights = np.random.default_rng(0).normal(size=spec.size).astype(np.float32) / 8
    for tensor, view in spec.views(weights):
        if tensor.name.endswith("running_var"):
            view[...] = np.abs(view) + 0.5
    return weights


def samples(count):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, *SHAPE)).astype(np.float32), rng.integers(0, CLASSES, count)


def statistics(spec, weights):
    return {
        tensor.name: weights[spec.slices[tensor.name]] for tensor in spec.tensors if tensor.kind == "stat"
    }


def test_both_trainers_leave_the_statistics_of_single_values_and_move_the_others(bundle):
    spec, weights = bundle.spec, start(bundle.spec)
    x, y = samples(1)
    data = DeviceData(x, y, x[:0], y[:0], x, y)
    fits = []
    for backend in pair(bundle):
        trainer = LocalTrainer(backend, data, TrainingSection(epochs=4, batch_size=16, learning_rate=0.05))
        fits.append(trainer.fit(weights, FitPlan(), Key(3)))
    np.testing.assert_allclose(fits[0].weights, fits[1].weights, atol=1e-6)
    assert fits[0].loss == pytest.approx(fits[1].loss, rel=1e-5)
    before = statistics(spec, weights)
    for fit in fits:
        kept = {
            name.rpartition(".")[0]
            for name, value in statistics(spec, fit.weights).items()
            if np.array_equal(value, before[name])
        }
        assert kept == {"narrow", "plain"}
        assert not np.array_equal(fit.weights[: spec.num_parameters], weights[: spec.num_parameters])


def test_a_loss_term_on_one_sample_agrees(bundle):
    x, y = samples(1)
    teacher = np.linspace(-1, 1, CLASSES, dtype=np.float32)[None]
    found = []
    for backend in pair(bundle):
        backend.load(start(bundle.spec))
        term = Distillation(start(bundle.spec), strength=0.7, temperature=2.0)
        loss = backend.step(x, y, Key(3), extra_loss=ExtraLoss(term, (teacher,)))
        found.append((loss, backend.gradient.copy()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert np.linalg.norm(found[0][1] - found[1][1]) <= 1e-5 * np.linalg.norm(found[0][1])


def test_single_samples_are_noticed_with_norms_only(bundle):
    sizes = ((0, 8), (1, 8), (2, 8), (2, 1))
    assert [trains_on_single_samples(bundle.spec, *one) for one in sizes] == [False, True, False, True]
    without = make_bundle("mlp", SHAPE, CLASSES, Key(5)).spec
    assert not trains_on_single_samples(without, 1, 8)
    assert "device-3 has 1 training sample" in single_sample_line("device-3 has 1 training sample", 16)
    assert "training.batch_size" in single_sample_line("device-3 has 9 training samples", 1)


def test_a_norm_without_running_statistics_is_named():
    bundle = make_bundle(f"{MODULE}:untracked", SHAPE, CLASSES, Key(5))
    with raises(ModelError, "track_running_stats=True"):
        TorchBackend.from_spec(bundle.spec).step(*samples(1), Key(1))


@pytest.mark.parametrize("trainer", ["torch", "onnx"])
def test_a_simulated_device_with_one_sample_trains(tmp_path, trainer, caplog):
    settings = {
        "run": {"name": "single", "rounds": 2},
        "model": {"name": f"{MODULE}:net"},
        "method": {"name": "fedavg"},
        "data": {"source": "digits"},
        "fleet": {"devices": 3, "trainer": trainer},
    }
    rows = [list(range(20)), list(range(20, 40)), ([40], [41, 42])]
    with caplog.at_level("INFO", logger="fleetune"):
        result = simulate(settings, tmp_path, partition=rows, report=False)
    assert caplog.text.count("device-2 has 1 training sample") == 1
    assert result.finished
    assert np.isfinite(result.devices["accuracy_personal"]).all()
