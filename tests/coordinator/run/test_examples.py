"""Every run.toml in examples/ is one that a coordinator takes: all it does before it has a broker."""

from pathlib import Path

import pytest
from tests.helpers.places import ROOT

from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import read_run, settings_of

EXAMPLES = ROOT / "examples"
FILES = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.toml"))
MADE_BY = "pretrain.py"


@pytest.mark.parametrize("file", FILES, ids=map(str, FILES))
def test_a_coordinator_begins_the_run(file, tmp_path, monkeypatch):
    path = EXAMPLES / file
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    settings = read_run(path)
    weights = settings.model.weights
    if weights is not None and not Path(weights).exists():
        assert MADE_BY in path.read_text(), "its head says where they come from"
        pytest.skip(f"{weights} is made by {MADE_BY}, in minutes")
    run = open_run(settings, tmp_path / settings.run.name, durable=False)
    run.store.close()
    model, spec = settings.model, run.enrolment.spec
    assert spec.input_shape == model.input_shape
    assert model.num_classes in (None, spec.num_classes)


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
