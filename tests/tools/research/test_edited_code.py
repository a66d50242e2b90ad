"""Edited user code makes another run: it is played anew, with a line; `serve` refuses to go on with it."""

import logging

import pytest
from tests.helpers.hostile_world import World, stores_closed  # noqa: F401 - an autouse fixture

import fleetune
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.user_sources import changed, user_sources
from fleetune.protocols.user_code import user_module

METHOD = """from fleetune import ModelAveraging, SharedModel
from {helper} import FACTOR

class Scaled(ModelAveraging):
    def aggregate(self, state, updates, combine):
        return SharedModel(super().aggregate(state, updates, combine).weights * FACTOR)
"""
RUN = {
    "run": {"name": "r", "rounds": 2},
    "data": {"source": "digits"},
    "model": {"name": "mlp"},
    "training": {"epochs": 1},
    "fleet": {"devices": 3},
}


class Files:
    """A method that needs a helper beside it; names that no other test has imported."""

    def __init__(self, folder, name):
        self.folder, self.helper = folder, f"{name}_helper"
        self.method = f"{name}_method"
        (folder / f"{self.method}.py").write_text(METHOD.format(helper=self.helper))
        self.scale("1")

    def scale(self, factor):
        (self.folder / f"{self.helper}.py").write_text(f"import numpy as np\nFACTOR = np.float32({factor})\n")

    def run(self, **changes):
        return {**RUN, "method": {"name": f"{self.method}:Scaled"}, **changes}


@pytest.fixture
def files(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    return Files(tmp_path, request.node.name.rpartition("test_")[2][:20])


def test_simulate_plays_a_run_with_an_edited_helper_anew(files, caplog):
    first = fleetune.simulate(files.run(), report=False)
    with caplog.at_level(logging.WARNING):
        assert fleetune.simulate(files.run(), report=False).summary == first.summary
        assert not caplog.records
        files.scale("0.5")
        again = fleetune.simulate(files.run(), report=False)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"was begun with other code ({files.helper}.py is edited): it begins anew")
    assert again.summary.accuracy != first.summary.accuracy
    made = again.summary.provenance
    assert set(made.sources) == {f"{files.method}.py", f"{files.helper}.py"}
    assert made.versions.keys() >= {"fleetune", "python", "numpy", "torch"}
    assert made.host.cores
    assert made.processor_s > 0
    files.scale("1")
    assert fleetune.simulate(files.run(), report=False).summary.accuracy == first.summary.accuracy


def test_compare_plays_only_runs_with_edited_code_again(files, caplog):
    own = f"{files.method}:Scaled"

    def compared(seeds):
        rounds = []
        found = fleetune.compare(files.run(), ["fedavg", own], seeds=seeds, on_round=rounds.append)
        return found.frame.set_index(["method", "seed"])["accuracy_personal_mean"], len(rounds)

    first, _ = compared(1)
    files.scale("0.5")
    with caplog.at_level(logging.WARNING):
        both, num_rounds = compared(2)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"1 of 4 finished runs are run again: {files.helper}.py is edited"
    assert num_rounds == 3 * 2
    assert both["fedavg", 0] == first["fedavg", 0]
    assert both[own, 0] != first[own, 0]


def test_a_search_does_not_rank_by_trials_of_edited_code(files, tmp_path):
    pytest.importorskip("optuna")

    settings = _settings(files)

    def searched():
        found = fleetune.sweep(settings, ["training.epochs=1,2"], runs=tmp_path, search=1)
        return [run.summary.accuracy for run in found.comparison.runs]

    first = searched()
    files.scale("0.5")
    assert searched() != first


def _settings(files):
    from fleetune.protocols.settings.run_toml import settings_of

    return settings_of(files.run(), {})


def test_serve_refuses_to_go_on_with_edited_code(files, weights, tmp_path):
    folder = tmp_path / "world"
    world = World(folder, f"{files.method}:Scaled", {}, weights)
    world.join()
    while world.state.rounds_done < 1:
        world.step()
    world.run.store.close()
    files.scale("0.5")
    with pytest.raises(SettingError) as problem:
        open_run(world.settings, folder, durable=False)
    assert str(problem.value) == (
        f"{folder} was begun with other code: {files.helper}.py is edited; put that back to go on with the "
        "run, or set another run.name (--fresh deletes the run)"
    )
    files.scale("1")
    world.restart()
    assert world.play().state.rounds_done == 4


def test_sources_are_those_of_the_folder_and_of_packages_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "own/__init__.py": "",
        "own/nets.py": "from . import parts\nfrom .deep.inner import X\nimport numpy, fleetune\n",
        "own/parts.py": "import beside_own\n",
        "own/deep/__init__.py": "",
        "own/deep/inner.py": "X = 1\ndef late():\n    from ..other import Y\n",
        "own/other.py": "this is no Python",
        "own/unused.py": "",
        "beside_own.py": "import own.nets  # a circle",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    named = {
        "model": {"name": "own.nets:net"},
        "data": {"source": "csv:a.csv"},
        "compare": {"x": "own.unused:f"},
    }
    expected = {"own/__init__.py", "own/nets.py", "own/parts.py", "own/other.py", "beside_own.py"}
    found = user_sources(named)
    assert set(found) == expected | {"own/deep/__init__.py", "own/deep/inner.py"}
    assert user_sources({"method": "fleetune.protocols.methods.fedavg:FedAvg", "task": "json:loads"}) == {}
    (tmp_path / "own/parts.py").unlink()
    (tmp_path / "own/other.py").write_text("now = 1")
    assert changed(found, user_sources(named)) == (
        "beside_own.py is gone, own/other.py is edited, own/parts.py is gone"
    )


def test_a_module_that_was_imported_before_it_was_edited_is_imported_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "edited_later.py"
    file.write_text("VALUE = 1\n")
    named = {"model": "edited_later:VALUE"}
    user_sources(named)
    kept = user_module("edited_later")
    user_sources(named)
    assert user_module("edited_later") is kept
    file.write_text("VALUE = 22\n")
    user_sources(named)
    assert user_module("edited_later").VALUE == 22
