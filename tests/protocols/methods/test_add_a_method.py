"""docs/add-a-method.md keeps its word: its method runs as it is printed there."""

import re

import pytest
from tests.helpers.errors import raises
from tests.helpers.places import ROOT
from tests.protocols.methods.test_method_contract import Run
from tests.tools.simulator.test_simulate import play

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY
from fleetune.tools.docs.run_toml_reference import run_toml_reference

DOCUMENT = ROOT / "docs" / "add-a-method.md"
NAME = "mymethods:TopChanges"


@pytest.fixture(autouse=True)
def printed_method(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)
    (tmp_path / "mymethods.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mymethods", raising=False)


def test_it_trains_and_sends_a_tenth(tmp_path):
    plain = {"encoding": {"up": "raw", "down": "raw"}}
    _, ours, _ = play(tmp_path, "a", method={"name": NAME}, **plain)
    _, whole, _ = play(tmp_path, "b", method={"name": "fedavg"}, **plain)
    assert ours.bytes.up < 0.2 * whole.bytes.up
    assert ours.accuracy.personal_mean > 0.1
    assert ours.diagnostics_by_name["sent"].value == pytest.approx(0.1, abs=0.01)


def test_it_keeps_the_contract(weights):
    calm, shaken = Run(NAME, {"keep": 0.3}, weights), Run(NAME, {"keep": 0.3}, weights)
    for number in (1, 2):
        calm.round(number, replying=("d0", "d3"))
        shaken.through_disk()
        shaken.round(number, replying=("d0", "d3"), order=("d3", "d2", "d1", "d0"))
    assert calm.content() == shaken.content()


def test_one_line_in_the_registry_makes_it_one_of_fleetunes_own(weights, monkeypatch):
    monkeypatch.setitem(REGISTRY, "top-changes", NAME)
    by_name, by_place = Run("top-changes", {"keep": 0.3}, weights), Run(NAME, {"keep": 0.3}, weights)
    for run in (by_name, by_place):
        run.round(1, replying=("d0", "d3"))
    assert by_name.content() == by_place.content()
    assert "### top-changes" in run_toml_reference()
    with raises(SettingError, remedy="'top-changes'"):
        Run("top-change", {}, weights)


def test_a_wrong_setting_is_one_line(weights):
    with raises(SettingError, "method.keep", "`float` <= 1"):
        Run(NAME, {"keep": 2}, weights)
