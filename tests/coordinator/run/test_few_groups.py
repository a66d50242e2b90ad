"""Runs whose method sends some neurons: what they send of a GRU, and a warning where it is all of a model."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from tests.conftest import tiny_spec
from tests.helpers.linear_bundle import bundle
from tests.tools.simulator.test_simulate import settings
from torch import nn

from fleetune.coordinator.queries import queries
from fleetune.coordinator.run.few_groups import few_groups_line
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.methods import REGISTRY, selects_neurons
from fleetune.protocols.model.spec import ModelSpec, Span
from fleetune.tools.simulator.runner import simulate

MODULE = "few_groups_models"


class Gru(nn.Module):
    """Reads the rows of a digit, one after the other."""

    def __init__(self, classes):
        super().__init__()
        self.rnn, self.fc = nn.GRU(8, 24, batch_first=True), nn.Linear(24, classes)

    def forward(self, x):
        return self.fc(self.rnn(x.squeeze(1))[0][:, -1])


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType(MODULE)
    module.gru = lambda shape, classes: Gru(classes)
    module.flat = lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    monkeypatch.setitem(sys.modules, MODULE, module)


def of(model, method):
    shape = {"input_shape": [1, 8, 8], "num_classes": 10}
    return settings(
        run={"name": method, "rounds": 2},
        model={"name": f"{MODULE}:{model}", **shape},
        method={"name": method},
        fleet={"devices": 3, "ratios": [0.5], "boards": {}},
    )


def test_fedspu_sends_the_units_of_a_gru_that_it_draws(tmp_path, caplog):
    """At p = 0.5 a quarter of the recurrent weight, half of the first and last layer: a third of all."""
    sent = {}
    for method in ("fedspu", "fedavg"):
        run, summary = simulate(of("gru", method), tmp_path / method, workers=0, fresh=True)
        run.store.close()
        sent[method] = summary.bytes.up, summary.bytes.down
    for some, everything in zip(sent["fedspu"], sent["fedavg"], strict=True):
        assert 0.3 * everything < some < 0.45 * everything
    assert not caplog.text


@pytest.mark.parametrize(("model", "method", "warns"), [("flat", "fedspu", True), ("flat", "fedavg", False)])
def test_a_run_that_can_leave_out_little_says_so_once(tmp_path, caplog, model, method, warns):
    run = open_run(of(model, method), tmp_path / "run", durable=False)
    run.store.close()
    lines = [f"only 0% of the parameters of model {MODULE}:flat belong to neurons that fedspu can leave out"]
    assert [one.message.partition(",")[0] for one in caplog.records] == lines * warns
    assert [one.partition(",")[0] for one in queries.status(tmp_path / "run").troubles] == lines * warns
    open_run(of(model, method), tmp_path / "run", durable=False).store.close()  # it continues
    assert len(caplog.records) == warns


def test_methods_that_select_neurons():
    assert {name for name in REGISTRY if selects_neurons({"name": name})} == {
        *("fedspu", "fjord", "fedmp", "hermes", "prunefl", "cd2-pfed"),
    }
    empty = ModelSpec("m", (), (), (4,), 2)
    assert few_groups_line({"name": "no such method"}, empty) is None


def test_a_bundle_takes_the_groups_of_the_run():
    """A run that began with a version that found other groups continues with its own."""
    made, first = bundle(), bundle().spec.tensors[0]
    axes = ((Span(0, 0, first.shape[0]),), *((),) * (len(first.shape) - 1))
    tensors = (replace(first, axes=axes), *made.spec.tensors[1:])
    older = replace(made.spec, tensors=tensors, groups=first.shape[:1])
    with pytest.raises(PacketForeign):
        made.check_is_of(older)
    sent = made.for_devices(older)
    sent.check_is_of(older)
    assert sent.graphs is made.graphs
    assert made.for_devices(made.spec) == made
    with pytest.raises(PacketForeign):
        made.for_devices(tiny_spec()).check_is_of(tiny_spec())
