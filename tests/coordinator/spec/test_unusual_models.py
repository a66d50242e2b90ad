"""Users' models that cannot take part: one line that names the module and a remedy."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.helpers.errors import raises
from torch import nn

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.spec.partial_training import described
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection

MODULE, SHAPE, CLASSES = "unusual_models", (1, 8, 8), 10


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, CLASSES))


class PerPlace(nn.Module):
    """Works on two samples alone."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, x):
        return x * self.scale


def of_two():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), PerPlace())


class Folded(nn.Module):
    """Two samples stay two, three become four."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        logits = self.out(x.flatten(1))
        return logits if len(x) == 2 else torch.cat([logits, logits[:1]])


class Squeezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Conv2d(1, CLASSES, 8)

    def forward(self, x):
        return self.out(x).squeeze()


class LoneFails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False))
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out(self.inner(x))


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.none = nn.Linear(64, CLASSES), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.out(x.flatten(1)) + self.none.sum()


def scripted():
    return torch.jit.script(plain())


def doubled(**_):
    return plain().double()


def scripted_inside():
    return nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(64, CLASSES)))


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))


def section(make):
    setattr(sys.modules[MODULE], make.__name__, lambda shape, classes: make())
    return ModelSection(f"{MODULE}:{make.__name__}", input_shape=SHAPE, num_classes=CLASSES)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (of_two, r"depends on the batch size: 2 \(PerPlace\) takes 2 samples and fails on 3 .*x.shape\[0\]"),
        (Folded, r"depends on the batch size: it gives \(4, 10\) for 3 samples; make it \(3, 10\)"),
        (WithEmpty, r"none has no entries, shape \(0,\); leave it out"),
        (scripted, r"the model itself is a TorchScript module.*return the nn.Module"),
        (doubled, r"parameter 1.weight is float64.*return module.float\(\)"),
        (scripted_inside, r"1 is a TorchScript module.*return the nn.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_that_cannot_be_described_is_one_line(make, line):
    with pytest.raises(ModelError, match=line) as problem:
        described(section(make), Key(1))
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Squeezing, ("Squeezing", "(10,)", "(1, 10)", "flatten(1)")),
        (LoneFails, ("LoneFails", "inner.1 (BatchNorm1d)", "Expected more than 1 value")),
    ],
)
def test_one_test_sample_is_one_line(make, named):
    spec, _ = described(section(make), Key(1))
    backend = make_backend("torch", spec, None, 1)
    x = np.zeros((1, *SHAPE), np.float32)
    for ask in (lambda: backend.evaluate(x, np.array([1])), lambda: backend.losses(x, np.array([1]))):
        with raises(ModelError, *named):
            ask()
    assert backend.evaluate(np.zeros((2, *SHAPE), np.float32), np.array([1, 2]))[1].shape == (2, CLASSES)


def normed_by(norm):
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 16)), nn.ReLU(), nn.Linear(16, CLASSES))


def test_the_old_spectral_norm_is_refused_for_its_random_vectors():
    """Its accuracy after six rounds on digits was 0.2 %, with exit code 0."""
    with pytest.raises(ModelError, match=r"1 has torch.nn.utils.spectral_norm.*use torch.nn.utils.param"):
        described(section(lambda: normed_by(torch.nn.utils.spectral_norm)), Key(1))
    described(section(lambda: normed_by(torch.nn.utils.parametrizations.spectral_norm)), Key(1))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_old_weight_norm_exports_as_the_new_one():
    def normed():
        return normed_by(torch.nn.utils.weight_norm)

    def newly_normed():
        return normed_by(torch.nn.utils.parametrizations.weight_norm)

    old, new = (make_run_model_bundle(section(make), Key(1)) for make in (normed, newly_normed))
    assert {"1.weight_g", "1.weight_v"} < {tensor.name for tensor in old.spec.tensors}
    assert old.graphs.keys() == new.graphs.keys()
    assert [len(one.nodes) for one in old.graphs.values()] == [len(one.nodes) for one in new.graphs.values()]


class Unyielding(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("not twice")


def test_a_module_that_cannot_be_copied_is_one_line_in_export():
    def unyielding():
        return nn.Sequential(nn.Flatten(), Unyielding(64, CLASSES))

    with pytest.raises(ModelError, match=r"torch cannot copy it: .*not twice; let agents with torch"):
        make_run_model_bundle(section(unyielding), Key(1))
