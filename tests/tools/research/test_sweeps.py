"""`fleetune.sweep`: the same as the command, with data frames."""

import numpy as np
import pytest
from tests.tools.research.test_research import SECTIONS

import fleetune
from fleetune import tools
from fleetune.protocols.errors import SettingError

OVER = {"training.learning_rate": [0.02, 0.3], "fleet.ratios": [[0.4], [1.0]]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools.compare.report, "can_paint", lambda: False)
        folder = tmp_path_factory.mktemp("runs")
        yield fleetune.sweep(SECTIONS, OVER, seeds=2, runs=folder, set={"run.rounds": 2})


def test_its_frames_have_the_settings_as_columns(swept):
    assert isinstance(swept, fleetune.SweepResult)
    assert len(swept.frame) == 8
    assert set(swept.frame["training.learning_rate"]) == {0.02, 0.3}
    assert set(swept.frame["fleet.ratios"]) == {"[0.4]", "[1.0]"}
    assert set(swept.frame["seed"]) == {3, 4}
    means = swept.means["accuracy_personal_mean"]
    assert list(means["count"]) == [2] * 4
    assert means["mean"].is_monotonic_decreasing
    assert len(swept.rounds) == 8 * 2
    assert "4 combinations, 8 runs" in repr(swept)


def test_the_best_can_be_set_in_another_run(swept):
    first = swept.means.index[0]
    assert swept.best["training.learning_rate"] == first[0]
    alone = fleetune.simulate(
        SECTIONS,
        swept.folder.parent,
        set={"run.name": "alone", "run.rounds": 2, **swept.best},
        report=False,
    )
    whole = swept.frame[swept.frame["seed"] == 3].iloc[0]
    assert alone.summary.accuracy.personal_mean == pytest.approx(whole["accuracy_personal_mean"])


def test_values_may_be_numpy_s(tmp_path, monkeypatch):
    monkeypatch.setattr(tools.compare.report, "can_paint", lambda: False)
    over = {"training.learning_rate": np.logspace(-2, -1, 2), "training.epochs": np.arange(1, 2)}
    found = fleetune.sweep(SECTIONS, over, runs=tmp_path, set={"run.rounds": 1})
    assert set(found.frame["training.learning_rate"]) == {0.01, 0.1}
    assert list(found.best.values())[1] == 1


def test_a_mistake_is_in_the_caller_s_words(tmp_path):
    with pytest.raises(SettingError, match=r"^over run.seed: use --seeds"):
        fleetune.sweep(SECTIONS, {"run.seed": [1, 2]}, runs=tmp_path)
    with pytest.raises(SettingError, match=r"^over: name at least one"):
        fleetune.sweep(SECTIONS, {}, runs=tmp_path)
