"""Simulated devices that train with ONNX Runtime, or with whatever is quicker: `fleet.trainer`."""

from contextlib import closing

import numpy as np
import pytest
from tests.tools.simulator.test_checkpoint import Said, Stop, figures, stop
from tests.tools.simulator.test_simulate import BASE, settings

from fleetune.edge_agent.training import trainers
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.workers import torch_questions, trainer_choice

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
    monkeypatch.setattr(trainer_choice, "_shares", {})


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


@pytest.mark.parametrize(("share", "kind"), [(0.5, "onnx"), (1.5, "torch")])
def test_the_quicker_one_is_kept_when_the_run_goes_on(share, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_choice, "_share_of_torch", lambda *_: share)
    said = Said()
    with pytest.raises(Stop):
        play(tmp_path / "b", asked("fastest"), on_round=stop, observers=[said])
    name = "torch" if kind == "torch" else "ONNX Runtime"
    told = f"{name} trains: ONNX Runtime takes {share:.2f} of the processor time that torch takes"
    assert said.lines == [f"{told} for a training step"]
    monkeypatch.setattr(trainer_choice, "_share_of_torch", lambda *_: 2 - share)
    run, found = play(tmp_path / "b", asked("fastest"))
    assert run.settings.fleet.trainer == kind
    assert found == play(tmp_path / "c", asked(kind))[1]
    with pytest.raises(SettingError, match=r"fleet\.trainer"):
        play(tmp_path / "b", asked("onnx" if kind == "torch" else "torch"))


@pytest.mark.parametrize("method", ["moon", "pfedsd"])
def test_it_is_measured_where_torch_is_not_said(method, tmp_path, monkeypatch):
    """Also methods whose loss has terms of other models."""
    made = []
    monkeypatch.setattr(OnnxBackend, "step", counted(OnnxBackend.step, made))
    run, _ = play(tmp_path, asked("fastest", **TWO, method={"name": method}))
    assert made, "ONNX Runtime was tried"
    assert run.settings.fleet.trainer in ("torch", "onnx")


def counted(whole, calls):
    def step(*arguments, **named):
        calls.append(None)
        return whole(*arguments, **named)

    return step


def test_runs_that_are_alike_share_a_bundle_and_a_measurement(tmp_path, monkeypatch):
    made, measured = [], []
    monkeypatch.setattr(trainer_choice, "is_at_hand", lambda _: False)
    make, measure = trainer_choice.make_run_bundle, trainer_choice._share_of_torch
    monkeypatch.setattr(trainer_choice, "make_run_bundle", lambda asked: made.append(1) or make(asked))
    monkeypatch.setattr(trainer_choice, "_share_of_torch", lambda *all_: measured.append(1) or measure(*all_))
    kinds = set()
    for method in ("fedavg", "fedspu"):
        run, _ = play(tmp_path / method, asked("fastest", **TWO, method={"name": method}))
        kinds.add(run.settings.fleet.trainer)
    assert (len(made), len(measured), len(kinds)) == (1, 1, 1)
    play(tmp_path / "other", asked("onnx", run={"name": "sim", "rounds": 1, "seed": 7}))
    assert len(made) == 2


def test_where_there_is_no_onnx_runtime_it_is_one_line_or_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_choice, "installed", lambda: ("torch",))
    with pytest.raises(
        SettingError, match=r"fleet\.trainer: ONNX Runtime is not installed here: pip install"
    ):
        play(tmp_path / "a", asked("onnx"))
    assert not (tmp_path / "a").exists()
    said = Said()
    run, _ = play(tmp_path / "b", asked("fastest", **TWO), observers=[said])
    assert run.settings.fleet.trainer == "torch"
    assert "torch trains: fleet.trainer: ONNX Runtime is not installed" in said.lines[0]


def test_where_there_is_no_torch_it_is_one_line_or_onnx_runtime(tmp_path, monkeypatch):
    for module in (trainer_choice, torch_questions):
        monkeypatch.setattr(module, "installed", lambda: ("onnx",))
    with pytest.raises(SettingError, match=r'torch is not installed here: pip install .*trainer = "onnx"'):
        play(tmp_path / "a", asked("torch"))
    assert not (tmp_path / "a").exists()
    said = Said()
    run, _ = play(tmp_path / "b", asked("fastest", **TWO), observers=[said])
    assert run.settings.fleet.trainer == "onnx"
    assert said.lines == ["ONNX Runtime trains: torch is not installed here"]


def test_a_model_that_has_no_bundle_is_one_line(tmp_path, monkeypatch):
    def fails(_):
        raise trainers.ModelError("model mine: aten::strange cannot be exported")

    monkeypatch.setattr(trainer_choice, "is_at_hand", lambda _: False)
    monkeypatch.setattr(trainer_choice, "make_run_bundle", fails)
    with pytest.raises(SettingError, match=r'strange cannot be exported; trainer = "torch" simulates it'):
        play(tmp_path / "a", asked("onnx"))


def test_where_onnx_runtime_cannot_train_the_model_torch_does(tmp_path, monkeypatch):
    def too_old(kind, *arguments, **named):
        if kind == "onnx":
            raise ModelError("this ONNX Runtime reads no operator of version 22")
        return trainers.make_backend(kind, *arguments, **named)

    monkeypatch.setattr(trainer_choice, "make_backend", too_old)
    said = Said()
    run, _ = play(tmp_path, asked("fastest", **TWO), observers=[said])
    assert run.settings.fleet.trainer == "torch"
    assert said.lines[0] == "torch trains: this ONNX Runtime reads no operator of version 22"


def in_bfloat16(*, fleet=None, **sections):
    return settings(**sections, fleet=BASE["fleet"] | {"precision": "bfloat16"} | (fleet or {}))


@pytest.mark.parametrize("method", ["fedspu", "moon", "fjord", "kapc-bls"])
def test_in_bfloat16_it_learns_what_it_learns_but_for_rounding(method, tmp_path):
    said, sections = Said(), {**TWO, "method": {"name": method}}
    _, ours = play(tmp_path / "a", in_bfloat16(**sections), observers=[said])
    _, theirs = play(tmp_path / "b", asked("torch", **sections))
    assert "training steps compute in bfloat16, which take" in said.lines[0]
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


@pytest.mark.parametrize("trainer", ["onnx", "fastest"])
def test_bfloat16_is_torchs(trainer, tmp_path):
    with pytest.raises(SettingError, match=rf'fleet\.precision = "bfloat16": torch trains .*"{trainer}"'):
        play(tmp_path / "a", in_bfloat16(fleet={"trainer": trainer}))
    assert not (tmp_path / "a").exists()


def test_a_model_that_cannot_train_in_bfloat16_is_one_line(tmp_path, monkeypatch):
    def strange(kind, *arguments, **named):
        if named["precision"] == "bfloat16":
            raise ModelError("model mlp cannot train on a batch of 16: expected Float")
        return trainers.make_backend(kind, *arguments, **named)

    monkeypatch.setattr(trainer_choice, "make_backend", strange)
    with pytest.raises(SettingError, match=r"precision.*: not with model mlp: .* expected Float; leave it"):
        play(tmp_path / "a", in_bfloat16())


def test_where_the_trial_diverges_the_run_itself_says_so(tmp_path):
    said = Said()
    with pytest.raises(FleetuneError, match="diverged"):
        play(
            tmp_path / "a",
            in_bfloat16(training=BASE["training"] | {"learning_rate": 1e9}),
            observers=[said],
        )
    assert said.lines[0] == "training steps compute in bfloat16"
