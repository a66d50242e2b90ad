"""Text models: token ids are found out, never scaled, checked, and the same to every trainer and app."""

import os
import re
import sys

import numpy as np
import pytest
import torch
from tests.helpers.fleet_processes import ROOT, Fleet, assert_equal, expected, run_toml

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.coordinator.run.models import find_model
from fleetune.edge_agent.personal.inference_graph import Predictor, write_inference
from fleetune.edge_agent.training.device_data import DeviceData, check_fits, for_vocabulary
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.errors import DataError, ModelError, SettingError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.architectures import build
from fleetune.protocols.model.token_ids import Samples, samples_of
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.run_toml import parse_run

WORDS, VOCABULARY, CLASSES = 6, 200, 3
MODULE = "token_models"
SOURCE = f"""
import numpy as np
import torch
from torch import nn
from torch.nn import functional

class Mean(nn.Module):
    def __init__(self, classes, look_up):
        super().__init__()
        self.table = nn.Embedding({VOCABULARY}, 8)
        self.out = nn.Linear(8, classes)
        self.look_up = look_up
    def forward(self, x):
        return self.out(self.look_up(self, x))

class Failing(nn.Module):
    def __init__(self, classes, fails):
        super().__init__()
        self.out = nn.Linear({WORDS}, classes)
        self.fails = fails
    def forward(self, x):
        if self.fails(self, x):
            raise KeyError("not\\nso")
        return self.out(x)

def _of(kind, look_up):
    return lambda shape, classes: kind(classes, look_up)

direct = _of(Mean, lambda m, x: m.table(x).mean(1))
cast = _of(Mean, lambda m, x: m.table(x.long()).mean(1))
indexed = _of(Mean, lambda m, x: m.table.weight[x.long()].mean(1))
chosen = _of(Mean, lambda m, x: m.table.weight.index_select(0, x.long()[:, 0]))
bag = _of(Mean, lambda m, x: functional.embedding_bag(x.long(), m.table.weight))
hot = _of(Mean, lambda m, x: (functional.one_hot(x.long(), {VOCABULARY}).float() @ m.table.weight).mean(1))
shifted = _of(Mean, lambda m, x: m.table(x.long() + 1).mean(1))
first = _of(Mean, lambda m, x: m.table(x[:, 0].long()) + x[:, 1:] @ m.table.weight[:{WORDS - 1}])
places = _of(Mean, lambda m, x: x.float() @ m.table(torch.arange({WORDS})))
best = _of(Mean, lambda m, x: m.table(x.argmax(1)) * x.float().mean(1, keepdim=True))

in_training = _of(Failing, lambda m, x: m.training)
on_threes = _of(Failing, lambda m, x: len(x) == 3)
on_much = _of(Failing, lambda m, x: len(x) == 7)

def data():
    draw = np.random.default_rng(7)
    y = np.arange(240) % {CLASSES}
    return (60 * y[:, None] + draw.integers(0, 60, (240, {WORDS}))).astype(np.uint8), y
"""
RUN = {"run": {"name": "r"}, "method": {"name": "fedavg"}}


@pytest.fixture(scope="module", autouse=True)
def user_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    del sys.modules[MODULE]


def module_of(name):
    return build(f"{MODULE}:{name}", (WORDS,), CLASSES)


def bundle_of(name):
    return make_bundle(f"{MODULE}:{name}", (WORDS,), CLASSES, Key.of("text"))


def samples(x=None):
    x, y = (sys.modules[MODULE].data()) if x is None else (x, np.zeros(len(x), np.int64))
    return DeviceData(x, y, x[:0], y[:0], x[:60], y[:60], source="here")


@pytest.mark.parametrize("name", ["direct", "cast", "indexed", "chosen", "bag", "hot"])
def test_ids_are_found_by_what_is_looked_up(name):
    assert samples_of(module_of(name), (WORDS,)) == Samples(ids=True, vocabulary=VOCABULARY)


def test_a_vocabulary_counts_from_where_ids_begin():
    assert samples_of(module_of("shifted"), (WORDS,)) == Samples(ids=True, vocabulary=VOCABULARY - 1)


def test_columns_of_ids_among_numbers_leave_samples_numbers():
    assert samples_of(module_of("first"), (WORDS,)) == Samples(ids=False, vocabulary=VOCABULARY)


@pytest.mark.parametrize("name", ["places", "best"])
def test_positions_and_the_best_of_several_are_no_ids(name):
    assert samples_of(module_of(name), (WORDS,)) == Samples(ids=False, vocabulary=None)


def test_images_are_numbers_and_looking_changes_nothing():
    module = build("cnn-kapc", (1, 28, 28), 10)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert samples_of(module, (1, 28, 28)) == Samples(ids=False, vocabulary=None)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["direct", "cast", "indexed", "hot", "first"])
def test_text_models_are_exported_and_know_their_vocabulary(name):
    bundle = read_bundle(bundle_of(name).encoded())
    assert bundle.input_type == ("f4" if name == "first" else "i8")
    assert bundle.vocabulary == {"hot": MOST_IDS, "first": None}.get(name, VOCABULARY)


def trained(backend, data, weights):
    settings = TrainingSection(epochs=15, batch_size=16, learning_rate=0.5)
    fit = LocalTrainer(backend, data, settings).fit(weights, FitPlan(), Key.of("fit"))
    return fit, LocalTrainer(backend, data, settings).accuracy(fit.weights)


@pytest.mark.parametrize("name", ["direct", "cast"])
def test_torch_onnx_and_the_exported_file_take_the_same_ids(name):
    bundle = bundle_of(name)
    fits = []
    for kind in ("torch", "onnx"):
        backend = make_backend(kind, bundle.spec, bundle, 1)
        data = for_vocabulary(check_fits(samples(), bundle.spec), backend.vocabulary)
        x, _ = data.batch("train", np.arange(4))
        assert x.dtype == np.int64
        np.testing.assert_array_equal(x, samples().x_train[:4])  # bytes, and yet not divided by 255
        fits.append(trained(backend, data, bundle.weights))
    (by_torch, accuracy), (by_onnx, same) = fits
    np.testing.assert_allclose(by_onnx.weights, by_torch.weights, rtol=1e-4, atol=1e-5)
    assert accuracy == same > 0.9
    predictor = Predictor.of(write_inference(bundle, by_onnx.weights, {}))
    data = samples()
    labels = predictor.probabilities(data.x_test).argmax(1)
    assert (labels == data.y_test).mean() == same


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((4, WORDS), 200, np.uint8), r"token id 200 in the train samples; the model knows 0\.\.199"),
        (np.full((4, WORDS), -1, np.float32), "token id -1 in the train samples"),
        (np.full((4, WORDS), 0.5, np.float32), "fractions in the train samples; the model takes token ids"),
    ],
)
def test_other_samples_are_one_line(x, message):
    with pytest.raises(DataError, match=message):
        for_vocabulary(samples(x), VOCABULARY)
    assert for_vocabulary(samples(x), None).ids is False


@pytest.mark.parametrize(("key", "value"), [("mean", 0.5), ("std", 2.0)])
def test_ids_are_not_scaled_by_a_run_either(key, value):
    model = {"name": f"{MODULE}:direct", "input_shape": [WORDS], "num_classes": CLASSES}
    with pytest.raises(SettingError, match=f"data.{key}: model .* takes token ids; leave it out"):
        find_model(parse_run({**RUN, "model": model, "data": {key: value}}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("in_training", "cannot be exported"),
        ("on_threes", "depends on the batch size"),
        ("on_much", "cannot be exported"),
    ],
)
def test_whatever_a_model_raises_while_it_is_exported_is_one_line(name, said):
    with pytest.raises(ModelError, match=rf"{MODULE}:{name}' {said}.*KeyError: ") as caught:
        bundle_of(name)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_trained_is_one_line_when_it_is_served():
    model = {"name": f"{MODULE}:in_training", "input_shape": [WORDS], "num_classes": CLASSES}
    with pytest.raises(ModelError, match="cannot be trained: KeyError"):
        find_model(parse_run({**RUN, "model": model}))


@pytest.mark.nightly
@pytest.mark.fleet
def test_a_text_model_of_ones_own_is_simulated_and_served(tmp_path, user_code):
    toml = run_toml(
        name="text",
        model=f"{MODULE}:cast",
        shape=f"[{WORDS}]",
        source=f"{MODULE}:data",
        devices=2,
        start_with=2,
    ).replace("num_classes = 10", f"num_classes = {CLASSES}")
    toml = re.sub(r"(?m)^(mean|std) = .*$", "", toml)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (user_code, ROOT)))}
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator(**paths)
        for device in fleet.shares:
            fleet.start_agent(device, options=("--leave-after-run", "--trust", MODULE), **paths)
        fleet.wait_finished()
        found = fleet.outcome()
        assert_equal(found, expected(toml, tmp_path / "simulated"))
        fleet.start_coordinator("--fresh", **paths)
        for device in fleet.shares:
            fleet.start_agent(device, trainer="onnx")  # without the model's code
        fleet.wait_finished()
        again = np.frombuffer(fleet.outcome().shared, np.float32)
    np.testing.assert_allclose(again, np.frombuffer(found.shared, np.float32), rtol=1e-3, atol=1e-5)
