"""Every run.toml in examples/ is one that a coordinator takes: all it does before it has a broker."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.helpers.places import ROOT
from tests.zoo.library_models import torchvision

from fleetune.coordinator.run.models import make_run_bundle
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import read_run, settings_of

EXAMPLES = ROOT / "examples"
FILES = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.toml"))
PACKAGES = {"models/backbone.toml": "timm", "models/text.toml": "transformers"}


@pytest.mark.parametrize("file", FILES, ids=map(str, FILES))
def test_a_coordinator_begins_the_run(file, tmp_path, monkeypatch):
    path = EXAMPLES / file
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    settings = read_run(path)
    weights, package = settings.model.weights, PACKAGES.get(str(file))
    if weights is not None and not Path(weights).exists():
        head = path.read_text().partition("[run]")[0]
        assert weights in head or "pretrain.py" in head, "its head says how they are made"
        pytest.skip(f"{weights} is not there; the head of {file} says how it is made")
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install -e '.[zoo]'")
    if package:
        torchvision()
    run = open_run(settings, tmp_path / settings.run.name, durable=False)
    run.store.close()
    model, spec = settings.model, run.enrolment.spec
    assert spec.input_shape == model.input_shape
    assert model.num_classes in (None, spec.num_classes)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["backbone", "text", "keywords", "sensors"])
def test_a_worked_model_exports_as_its_page_says(name, tmp_path, monkeypatch):
    """Every graph is compared with torch on the way."""
    package = PACKAGES.get(f"models/{name}.toml")
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install -e '.[zoo]'")
    if package:
        torchvision()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES / "models")
    settings = read_run(EXAMPLES / "models" / f"{name}.toml")
    if name == "backbone":
        import timm

        torch.save(timm.create_model("tf_mobilenetv3_small_075").state_dict(), "backbone.pt")
        enrolment = open_run(settings, tmp_path / "run", durable=False)
        enrolment.store.close()
    bundle = make_run_bundle(settings)
    assert (
        bundle.spec.num_parameters
        == {
            "backbone": 15_050,
            "text": 329_668,
            "keywords": 23_626,
            "sensors": 14_150,
        }[name]
    )


def test_an_autoencoder_has_as_many_outputs_as_inputs_without_being_told(tmp_path):
    autoencoder = {
        "run": {"name": "motors"},
        "task": {"kind": "reconstruction"},
        "model": {"name": "autoencoder", "input_shape": [1, 64]},
        "method": {"name": "fedavg"},
    }
    run = open_run(settings_of(autoencoder, {}), tmp_path / "motors", durable=False)
    run.store.close()
    assert run.enrolment.spec.num_classes == 64
    with pytest.raises(SettingError, match=r"input_shape and model\.num_classes are missing"):
        open_run(settings_of({**autoencoder, "task": {}}, {}), tmp_path / "classes", durable=False)
