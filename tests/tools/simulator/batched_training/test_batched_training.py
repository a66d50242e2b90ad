"""Simulated devices that train at once: `fleet.at_once`."""

import numpy as np
import pytest
from tests.helpers import card
from tests.tools.simulator.test_checkpoint import GROWING, Said, Stop, stop
from tests.tools.simulator.test_simulate import BASE, settings
from tests.tools.simulator.test_trainer_choice import play

from fleetune.protocols.errors import ModelError, SettingError
from fleetune.tools.simulator.batched_training.stacked_networks import StackedNetworks
from fleetune.tools.simulator.workers import device_trainer

METHODS = ["fedspu", "moon", "fjord", "kapc-bls", "ditto", "pfedsd"]


def at_once(most=3, *, fleet=None, **sections):
    return settings(**sections, fleet=BASE["fleet"] | {"at_once": most} | (fleet or {}))


def weights_of(found):
    return np.frombuffer(found[2], np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_they_learn_what_they_learn_alone_but_for_rounding(method, tmp_path):
    said, sections = Said(), {"method": {"name": method}, "run": {"name": "sim", "rounds": 2}}
    (_, ours), (_, theirs) = (
        play(tmp_path / str(most), at_once(most, **sections), observers=[said]) for most in (3, 1)
    )
    assert said.lines == ["3 devices of each worker train at once"]
    assert ours[0].accuracy.after_mean == pytest.approx(theirs[0].accuracy.after_mean, abs=0.02)
    assert ours[0].bytes.down == theirs[0].bytes.down
    np.testing.assert_allclose(weights_of(ours), weights_of(theirs), atol=1e-4)


def test_they_really_train_at_once(tmp_path, monkeypatch):
    sizes, steps = [], StackedNetworks._step
    monkeypatch.setattr(
        StackedNetworks, "_step", lambda *given: (sizes.append(len(given[1])), steps(*given))[1]
    )
    play(tmp_path, at_once(4, run={"name": "sim", "rounds": 1}))
    assert set(sizes) == {2, 4}  # tried with two; and of six devices four, then the other two


def test_workers_and_a_stop_change_nothing(tmp_path):
    _, unbroken = play(tmp_path / "a", at_once())
    with pytest.raises(Stop):
        play(tmp_path / "b", at_once(), on_round=stop)
    assert play(tmp_path / "b", at_once(), workers=2)[1] == unbroken


@pytest.mark.parametrize("mode", [{"mode": "buffer", "buffer": 2}, {"deadline_s": 0.007, "quorum": 2}])
def test_where_devices_are_waited_for_one_by_one(mode, tmp_path):
    wanted = at_once(
        method={"name": "fedavg"}, round=mode, fleet={"spread": 1.0, "jitter": 1.0, "ratios": [1.0]}
    )
    assert play(tmp_path / "a", wanted)[1] == play(tmp_path / "b", wanted, workers=2)[1]


def test_on_cards(tmp_path):
    said = Said()
    there = at_once(run={"name": "sim", "rounds": 2}, fleet={"train_on": f"{card.NAME}:0"})
    _, found = play(tmp_path / "there", there, observers=[said])
    assert said.lines == [
        f"devices train on {card.NAME}:0 (of this test); 3 devices of each worker train at once"
    ]
    _, here = play(tmp_path / "here", at_once(run={"name": "sim", "rounds": 2}))
    np.testing.assert_allclose(weights_of(found), weights_of(here), atol=1e-6)


def test_a_fault_of_one_device_is_told_as_its_own(tmp_path, monkeypatch):
    reply = device_trainer.DeviceTrainer.train

    def one_fails(stage, job):
        if job.index == 1:
            raise ModelError("of device 1")
        return reply(stage, job)

    monkeypatch.setattr(device_trainer.DeviceTrainer, "train", one_fails)
    with pytest.raises(ModelError, match="of device 1"):
        play(tmp_path, at_once(6))


def test_frozen_parts_compute_along(tmp_path):
    sections = {"model": {"name": "mlp", "trainable": ["out"]}, "run": {"name": "sim", "rounds": 2}}
    (_, ours), (_, theirs) = (play(tmp_path / str(most), at_once(most, **sections)) for most in (3, 1))
    np.testing.assert_allclose(weights_of(ours), weights_of(theirs), atol=1e-5)


def test_another_number_is_another_run(tmp_path):
    with pytest.raises(Stop):
        play(tmp_path, at_once(3), on_round=stop)
    with pytest.raises(SettingError, match=r"fleet\.at_once"):
        play(tmp_path, at_once(4))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"fleet": {"trainer": "onnx"}}, 'trainer = "onnx" trains one device after the other'),
        (GROWING, "devices whose data grow train one after the other"),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(sections, words, tmp_path):
    with pytest.raises(SettingError, match=f"fleet.at_once = 3: {words}"):
        play(tmp_path / "run", at_once(**sections))
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_stack_is_named(tmp_path, monkeypatch):
    def cannot(*_):
        raise ModelError("a reason")

    monkeypatch.setattr(StackedNetworks, "check", cannot)
    with pytest.raises(SettingError, match=r"fleet\.at_once = 3: not with model mlp: a reason; leave it out"):
        play(tmp_path / "run", at_once())


def test_not_on_a_ray_cluster(tmp_path):
    with pytest.raises(SettingError, match=r"fleet\.at_once: on a Ray cluster"):
        play(tmp_path, at_once(), cluster="127.0.0.1:1")


def test_one_by_one_nothing_is_stacked(tmp_path, monkeypatch):
    monkeypatch.setattr(StackedNetworks, "__init__", lambda *_: pytest.fail("it was"))
    _, found = play(tmp_path, at_once(1))
    assert found
