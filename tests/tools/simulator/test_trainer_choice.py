"""The trainer of simulated devices, `fleet.trainer`, and its precision."""

from contextlib import closing

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.tools.simulator.test_checkpoint import Said, Stop, figures, stop
from tests.tools.simulator.test_simulate import BASE, settings

from fleetune.edge_agent.training import trainers
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.workers import trainer_choice

TWO = {"run": {"name": "sim", "rounds": 2}}


def asked(trainer, **sections):
    return settings(**sections, fleet=BASE["fleet"] | {"trainer": trainer})


def play(folder, wanted, workers=0, **how):
    run, summary = simulate(wanted, folder, workers=workers, fresh=False, **how)
    with closing(run.store):
        return run, figures(run, summary)


def test_it_learns_what_torch_learns_but_for_rounding(tmp_path):
    (run, (theirs, *_)), (_, (ours, *_)) = (play(tmp_path / name, asked(name)) for name in ("torch", "onnx"))
    assert run.settings.fleet.trainer == "torch"
    assert ours.accuracy.after_mean == pytest.approx(theirs.accuracy.after_mean, abs=0.02)
    weights = [np.frombuffer(play_again(tmp_path, name), np.float32) for name in ("torch", "onnx")]
    assert 0 < np.abs(weights[0] - weights[1]).max() < 1e-4


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(trainer_choice, "_bundles", {})


def play_again(tmp_path, name):
    """The shared model's bytes; the same run once more gives the same."""
    _, first = play(tmp_path / "first" / name, asked(name, **TWO))
    _, again = play(tmp_path / "again" / name, asked(name, **TWO))
    assert first == again
    return first[2]


def test_workers_and_a_stop_change_nothing(tmp_path):
    _, unbroken = play(tmp_path / "a", asked("onnx"))
    with pytest.raises(Stop):
        play(tmp_path / "b", asked("onnx"), on_round=stop)
    assert play(tmp_path / "b", asked("onnx"), workers=2)[1] == unbroken


def test_runs_that_are_alike_share_a_bundle(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(trainer_choice, "is_at_hand", lambda _: False)
    make = trainer_choice.make_run_bundle
    monkeypatch.setattr(trainer_choice, "make_run_bundle", lambda asked: made.append(1) or make(asked))
    for method in ("fedavg", "fedspu"):
        play(tmp_path / method, asked("onnx", **TWO, method={"name": method}))
    assert len(made) == 1
    play(tmp_path / "other", asked("onnx", run={"name": "sim", "rounds": 1, "seed": 7}))
    assert len(made) == 2


@pytest.mark.parametrize(("missing", "there"), [("torch", "onnx"), ("onnx", "torch")])
def test_a_trainer_that_is_not_installed_is_one_line(missing, there, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_choice, "installed", lambda: (there,))
    with raises(SettingError, "fleet.trainer", missing, remedy=("pip install", f'"{there}"')):
        play(tmp_path / "a", asked(missing))
    assert not (tmp_path / "a").exists()


def test_a_model_without_a_bundle_is_one_line(tmp_path, monkeypatch):
    def fails(_):
        raise trainers.ModelError("model mine: aten::strange cannot be exported")

    monkeypatch.setattr(trainer_choice, "is_at_hand", lambda _: False)
    monkeypatch.setattr(trainer_choice, "make_run_bundle", fails)
    with raises(SettingError, "fleet.trainer", "aten::strange", remedy='"torch"'):
        play(tmp_path / "a", asked("onnx"))


def in_bfloat16(*, fleet=None, **sections):
    return settings(**sections, fleet=BASE["fleet"] | {"precision": "bfloat16"} | (fleet or {}))


@pytest.mark.parametrize("method", ["fedspu", "moon", "fjord", "kapc-bls"])
def test_in_bfloat16_it_learns_what_it_learns_but_for_rounding(method, tmp_path):
    said, sections = Said(), {**TWO, "method": {"name": method}}
    _, ours = play(tmp_path / "a", in_bfloat16(**sections), observers=[said])
    _, theirs = play(tmp_path / "b", asked("torch", **sections))
    assert "bfloat16" in said.lines[0]
    assert ours[0].bytes.down_dense == theirs[0].bytes.down_dense
    apart = np.subtract(*(np.frombuffer(found[2], np.float32) for found in (ours, theirs)))
    assert 1e-5 < np.abs(apart).max() < 1e-2


def test_in_bfloat16_it_comes_as_far(tmp_path):
    sections = {
        "run": {"name": "sim", "rounds": 25},
        "method": {"name": "fedavg"},
        "training": BASE["training"] | {"epochs": 3, "learning_rate": 0.1},
    }
    _, (ours, *_) = play(tmp_path / "a", in_bfloat16(**sections, fleet={"ratios": [1.0]}))
    _, (theirs, *_) = play(tmp_path / "b", settings(**sections, fleet=BASE["fleet"] | {"ratios": [1.0]}))
    assert theirs.accuracy.after_mean > 0.85
    assert ours.accuracy.after_mean == pytest.approx(theirs.accuracy.after_mean, abs=0.02)


def test_in_bfloat16_workers_and_a_stop_change_nothing(tmp_path):
    _, unbroken = play(tmp_path / "a", in_bfloat16())
    with pytest.raises(Stop):
        play(tmp_path / "b", in_bfloat16(), on_round=stop)
    with pytest.raises(SettingError, match=r"fleet\.precision"):
        play(tmp_path / "b", asked("torch"))
    assert play(tmp_path / "b", in_bfloat16(), workers=2)[1] == unbroken


def test_bfloat16_is_torchs(tmp_path):
    with raises(SettingError, "fleet.precision", "bfloat16", '"torch"'):
        play(tmp_path / "a", in_bfloat16(fleet={"trainer": "onnx"}))
    assert not (tmp_path / "a").exists()


def test_in_bfloat16_a_diverging_run_ends_with_one_line(tmp_path):
    with raises(FleetuneError, "training diverged", "training.learning_rate"):
        play(tmp_path / "a", in_bfloat16(training=BASE["training"] | {"learning_rate": 1e9}))
