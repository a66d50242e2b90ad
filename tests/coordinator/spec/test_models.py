"""Where a coordinator's model comes from: torch, a bundle that is shipped, a bundle in a file."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.linear_bundle import bundle
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.coordinator.export.recipe import recipe_of
from fleetune.coordinator.run import models
from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.bundle.first_weights import draw_convolutions, draw_weights
from fleetune.protocols.bundle.shipped import MODELS, bundle_path, shipped_bundle
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.model.architectures import build
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.payloads import run_key

SHAPES = {"har-cnn": (9, 128), "resnet8": (3, 32, 32), "cnn-fedspu-cifar": (3, 32, 32)}
NAMES = (
    "mlp",
    "lenet5",
    "cnn-kapc",
    "cnn-fedspu-cifar",
    "cnn-fedspu-emnist",
    "resnet8",
    "resnet18",
    "har-cnn",
)


def run_of(name="mlp", shape=(1, 8, 8), classes=10, **sections):
    model = {"name": name, "input_shape": list(shape), "num_classes": classes}
    content = {"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}}
    for key, section in sections.items():
        content[key] = {**content.get(key, {}), **section}
    return parse_run(content)


@pytest.fixture
def no_torch(monkeypatch):
    """As on a machine where it is not installed."""
    for name in [*sys.modules]:
        if name.split(".")[0] == "torch" or name.startswith(
            ("fleetune.coordinator.export", "fleetune.coordinator.spec.spec_from_torch")
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fleetune.protocols.model.architectures", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_first_weights_without_torch_are_torchs_to_the_last_bit(name, seed):
    shape, key = SHAPES.get(name, (1, 28, 28)), run_key(seed).child("weights")
    spec, weights = draw(name, shape, 10, key)
    recipe = recipe_of(spec, build(name, shape, 10))
    np.testing.assert_array_equal(draw_weights(recipe, spec, key), weights)


def test_weights_that_are_drawn_otherwise_have_no_recipe(tmp_path, monkeypatch):
    (tmp_path / "normal_model.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    layer = nn.Linear(64, classes)\n"
        "    nn.init.normal_(layer.weight)\n"
        "    return nn.Sequential(nn.Flatten(), layer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_bundle("normal_model:net", (1, 8, 8), 10, Key(1))
    assert made.recipe is None
    _, weights = draw("normal_model:net", (1, 8, 8), 10, Key(1))
    np.testing.assert_array_equal(made.weights, weights)
    path = tmp_path / "normal.bundle"
    path.write_bytes(made.encoded())
    np.testing.assert_array_equal(prepare(run_of(f"bundle:{path}")).weights, weights)


@pytest.mark.parametrize(("name", "shape", "classes"), MODELS)
def test_what_is_shipped_is_what_would_be_made(name, shape, classes):
    """If this fails: python -m fleetune.tools.ship_bundles"""
    made = make_bundle(name, shape, classes, run_key(0).child("weights"))
    shipped = read_bundle(bundle_path(name, shape, classes).read_bytes())
    assert made.encoded() == shipped.encoded()  # not the file: another zstd packs it otherwise


def test_a_shipped_model_is_prepared_as_torch_would(monkeypatch):
    settings = run_of(run={"seed": 3})
    shipped = prepare(settings)
    monkeypatch.setattr(models, "shipped_bundle", lambda *_: None)
    built = prepare(settings)
    assert shipped.spec == built.spec == describe("mlp", build("mlp", (1, 8, 8), 10), (1, 8, 8), 10)
    np.testing.assert_array_equal(shipped.weights, built.weights)
    assert shipped.flops_per_sample == built.flops_per_sample
    assert shipped.activation_bytes_per_sample == built.activation_bytes_per_sample


def test_a_coordinator_without_torch_runs_what_was_exported_elsewhere(tmp_path, no_torch):
    path = tmp_path / "linear.bundle"
    path.write_bytes(bundle().encoded())
    settings = run_of(f"bundle:{path}", (2,), 3)
    found = models.find_model(settings)
    assert found.spec.name == "hand:made"
    assert found.bundle is not None
    assert models.find_model(run_of()).spec.name == "mlp"
    with pytest.raises(FleetuneError, match="'cnn-kapc' is built by torch, which is not installed here"):
        models.find_model(run_of("cnn-kapc"))


def test_the_runs_samples_and_classes_are_in_its_bundle():
    names = [f"digit {n}" for n in range(10)]
    found = models.find_model(run_of(data={"mean": 0.5, "std": 0.25, "class_names": names})).bundle
    assert (found.mean, found.std, found.class_names) == (0.5, 0.25, tuple(names))
    assert read_bundle(found.encoded()).class_names == tuple(names)
    assert shipped_bundle("mlp", (1, 8, 8), 10).class_names == ()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (run_of("bundle:missing.bundle"), "cannot read bundle missing.bundle: no such file"),
        (run_of("bundle:pyproject.toml"), "pyproject.toml is no bundle, or damaged"),
        (run_of(data={"class_names": ["a"]}), "1 names; the model has 10 classes"),
        (run_of("cnn-kapc", data={"class_names": ["a"]}), "1 names; the model has 10 classes"),
    ],
)
def test_mistakes_are_named(settings, match):
    with pytest.raises(FleetuneError, match=match):
        models.find_model(settings)


def test_a_bundle_for_another_input_is_named(tmp_path):
    path = tmp_path / "linear.bundle"
    path.write_bytes(bundle().encoded())
    with pytest.raises(FleetuneError, match=r"the bundle is for input \(2,\) and 3 classes"):
        models.find_model(run_of(f"bundle:{path}"))


def test_export_writes_a_bundle_and_its_graphs(tmp_path):
    options = ["export", "mlp", "--input", "1x8x8", "--classes", "10"]
    out, graphs = tmp_path / "mlp.bundle", tmp_path / "graphs"
    result = CliRunner().invoke(app, [*options, "--out", str(out), "--onnx", str(graphs)])
    assert result.exit_code == 0, result.output
    written = read_bundle(out.read_bytes())
    assert written.spec.name == "mlp"
    assert {path.stem for path in graphs.glob("*.onnx")} == set(written.graphs)
    assert "first weights are drawn without torch" in result.output


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["mlp"], "give the shape of a sample"),
        (["mlp", "--input", "8y8", "--classes", "3"], "--input 8y8: write the shape"),
        (["mpl", "--input", "1x8x8", "--classes", "3"], "did you mean 'mlp'"),
        (["no.toml"], "no.toml"),
    ],
)
def test_mistakes_of_export_are_one_line(options, match):
    result = CliRunner().invoke(app, ["export", *options])
    assert result.exit_code == 2
    assert match in result.output
    assert len(result.output.strip().splitlines()) == 1


def _settings(name="lenet5", shape=(3, 32, 32), **model):
    section = {"name": name, "input_shape": list(shape), "num_classes": 10, **model}
    return parse_run({"run": {"name": "r", "seed": 3}, "model": section, "method": {"name": "fedavg"}})


def test_kaiming_draws_convolutions_by_their_outputs_and_leaves_the_rest():
    plain, kaiming = (
        models.find_model(_settings("resnet8")),
        models.find_model(_settings("resnet8", init="kaiming")),
    )
    for tensor in plain.spec.tensors:
        before, after = (one.weights[one.spec.slices[tensor.name]] for one in (plain, kaiming))
        if len(tensor.shape) == 4:
            channels, _, height, width = tensor.shape
            assert after.var() == pytest.approx(2 / (channels * height * width), rel=0.1)
            assert abs(after.mean()) < 4 * after.std() / np.sqrt(after.size)
            assert not np.any(before == after)
        else:
            assert np.array_equal(before, after)


def test_kaiming_is_the_same_bits_with_a_bundle_and_by_torch():
    settings = _settings(init="kaiming")
    found = models.find_model(settings)
    assert found.bundle is not None
    by_torch = draw_convolutions(models._by_torch(settings).weights, found.spec, run_key(3).child("weights"))
    assert np.array_equal(found.weights, by_torch)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"init": "kaiming", "weights": "run:other"},
            "model.init: 'kaiming' draws weights and model.weights",
        ),
        ({"init": "kaiming", "name": "mlp"}, "model.init: 'mlp' has no convolutions"),
        ({"init": "xavier"}, r"model.init: invalid enum value 'xavier'"),
    ],
)
def test_an_init_that_says_nothing_is_refused(model, line):
    with pytest.raises(SettingError, match=line):
        models.find_model(_settings(**model))


def test_kaiming_is_refused_where_a_bundle_brings_its_weights(tmp_path):
    made = replace(bundle(), recipe=None)
    (tmp_path / "b").write_bytes(made.encoded())
    settings = _settings(f"bundle:{tmp_path / 'b'}", (2,), num_classes=3, init="kaiming")
    with pytest.raises(SettingError, match=r"model.init: the bundle brings its own weights"):
        models.find_model(settings)
