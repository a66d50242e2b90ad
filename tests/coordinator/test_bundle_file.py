"""Bundles that `edge-coordinator export` writes of a run whose model starts from a file."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.errors import raises
from torch import nn

from fleetune.coordinator.bundle_file import write_bundle
from fleetune.coordinator.run.models import find_model
from fleetune.coordinator.run.starting_weights import start_of
from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.settings.run_toml import parse_run


class Attention(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.att = nn.Linear(8, 8), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(8, classes)

    def forward(self, x):
        parts = torch.relu(self.body(x)).reshape(-1, 2, 4)
        return self.out(self.att(parts, parts, parts)[0].flatten(1))


def net(_, classes):
    return Attention(classes)


def settings(**model):
    model = {"name": f"{__name__}:net", "input_shape": [8], "num_classes": 3, **model}
    return parse_run({"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}})


@pytest.mark.parametrize("trainable", [[], ["out"]], ids=["whole", "head"])
def test_a_bundle_holds_the_weights_that_the_run_file_names(tmp_path, trainable):
    module = Attention(3)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    asked = settings(weights=str(tmp_path / "w.pt"), trainable=trainable)
    written = write_bundle(asked, tmp_path / "b", None)
    run = settings(name=f"bundle:{written.path}")
    start = start_of(run, find_model(run), tmp_path)
    named = {
        **start.frozen,
        **{tensor.name: view for tensor, view in written.bundle.spec.views(start.weights)},
    }
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(named[name], value.numpy())
    with raises(ModelError, "nothing.pt"):
        write_bundle(replace(asked, model=replace(asked.model, weights="nothing.pt")), tmp_path / "c", None)
    assert not (tmp_path / "c").exists()


def test_an_adapter_on_a_layer_that_is_never_called_is_refused():
    """MultiheadAttention reads the weight of its output layer, so an adapter there would do nothing."""
    with raises(SettingError, "model.adapters.of", "att.out_proj"):
        find_model(settings(trainable=["out"], adapters={"rank": 2, "of": ["att.out_proj"]}))
