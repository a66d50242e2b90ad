"""What `fleetune` makes public: there, typed, documented, and nothing heavy before it is used."""

import ast
import json
import subprocess
import sys

import pytest
from tests.helpers.places import ROOT

import fleetune

SOURCE = ROOT / "src" / "fleetune" / "__init__.py"
HEAVY = (
    "numpy",
    "torch",
    "msgspec",
    "onnxruntime",
    "zstandard",
    "typer",
    "rich",
    "paho",
    "matplotlib",
    "pandas",
)
NOT_ON_A_DEVICE = ("torch", "scipy", "matplotlib", "sklearn", "amqtt", "safetensors")


def imported_by(statement, modules):
    """Those of `modules` that a new process has after `statement`."""
    script = f"{statement}; import sys, json; print(json.dumps([m for m in {modules} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", fleetune.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(fleetune, name)
    assert found is not None
    assert name == "__version__" or name in fleetune.__doc__
    assert name in dir(fleetune)
    if isinstance(found, type):
        assert found.__doc__


def test_a_name_that_is_not_public_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'fleetune' has no attribute 'Simulate'"):
        fleetune.Simulate  # noqa: B018


def test_type_checkers_are_told_the_same_names_from_the_same_places():
    (checking,) = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    told = {}
    for node in checking.body:
        assert isinstance(node, ast.ImportFrom)
        told.update({one.asname: (node.module, one.name) for one in node.names})
    assert sorted(told) == sorted(fleetune.__all__)
    assert told == fleetune._PLACES


def test_importing_it_is_light():
    assert imported_by("import fleetune", HEAVY) == []
    assert imported_by("import fleetune; fleetune.Key", HEAVY) != []


def test_what_a_method_needs_takes_nothing_that_an_agent_lacks():
    names = "ModelAveraging, SubModels, PersonalTargets, Patch, Entries, Key, estimate_bytes"
    assert imported_by(f"from fleetune import {names}", NOT_ON_A_DEVICE) == []


def test_an_agent_in_somebodys_program_takes_little():
    heavy = ("torch", "onnxruntime", "typer", "rich", "matplotlib", "scipy", "sklearn", "safetensors")
    assert imported_by("from fleetune import Agent", heavy) == []
    assert imported_by("from fleetune.edge_agent import Agent", heavy) == []


def test_a_run_is_simulated_from_python(tmp_path):
    settings = fleetune.read_run(ROOT / "tools" / "demo.toml", ["run.rounds=1"])
    result = fleetune.simulate(settings, tmp_path)
    folder = tmp_path / settings.run.name
    assert result.summary.accuracy.personal_mean > 0.1
    assert fleetune.read_summary(folder) == result.summary == fleetune.read_result(folder).summary
    with pytest.raises(fleetune.errors.StoreError, match="no-run holds no summary of a run"):
        fleetune.read_summary(tmp_path / "no-run")
    assert (folder / "report.html").is_file()
    with pytest.raises(fleetune.FleetuneError, match=r"holds a run with other settings: run.seed was 0"):
        fleetune.simulate(settings, tmp_path, set={"run.seed": 1})
