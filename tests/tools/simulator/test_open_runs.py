"""Simulated runs that go on: nights on the virtual clock, and what an open run needs to be told."""

import time
from contextlib import closing

import pytest
from tests.helpers.errors import raises
from tests.tools.simulator.test_simulate import settings

from fleetune.coordinator.run.enrolment import prepare
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY, with_defaults_of_run
from fleetune.tools.simulator.runner import simulate

SHAPE = {"input_shape": [1, 8, 8], "num_classes": 10}


def open_settings(**sections):
    return settings(run={"rounds": "open", **sections.pop("run", {})}, **sections)


def played(wanted, folder):
    """The run, its summary, and when its training rounds opened, in hours since it began."""
    run, summary = simulate(wanted, folder, workers=0, fresh=True)
    with closing(run.store):
        records = run.controller.records()
    return run, summary, [round(one.opened_s / 3600, 2) for one in records if not one.final_evaluation]


def test_thirty_nights_and_a_final_evaluation(tmp_path):
    wanted = open_settings(
        fleet={"devices": 4, "boards": {}, "days": 30, "starts_at": "12:00", "availability": 0.8},
        schedule={"every": "24h", "window": "02:00-05:00"},
        round={"deadline_s": 1800.0},
    )
    run, summary, nights = played(wanted, tmp_path / "sim")
    late_h = [at - (14.0 + 24 * night) for night, at in enumerate(nights)]
    assert set(late_h) <= {0.0, 0.5, 1.0, 1.5, 2.0, 2.5}, "at two; tried again while the window is open"
    assert late_h.count(0.0) > 20, "a device is there four times in five"
    assert summary.rounds == 30
    assert summary.accuracy.personal_mean is not None, "the final evaluation was played"
    assert run.controller.finished == "the simulated days are over"


def test_the_same_seed_plays_the_same_nights_whatever_zone_this_machine_is_in(tmp_path, monkeypatch):
    found = []
    for zone in ("UTC", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        wanted = open_settings(fleet={"days": 2}, schedule={"every": "24h", "window": "02:00-05:00"})
        run, _, nights = played(wanted, tmp_path / zone.replace("/", "-"))
        found.append((nights, run.controller.shared_model.tobytes()))
    monkeypatch.undo()
    time.tzset()
    assert found[0] == found[1]
    assert found[0][0] == [2.0, 26.0]


def test_an_open_run_is_told_when_its_simulation_ends(tmp_path):
    with pytest.raises(SettingError, match=r"fleet\.days"):
        simulate(open_settings(), tmp_path / "sim", workers=0, fresh=True)
    waits = open_settings(fleet={"days": 3}, schedule={"drift": True})
    with pytest.raises(SettingError, match="the data of simulated devices do not grow"):
        simulate(waits, tmp_path / "sim", workers=0, fresh=True)


@pytest.mark.parametrize(
    ("method", "key"), [("fedpurin", "beta"), ("fedcac", "beta"), ("cd2-pfed", "growth_rounds")]
)
def test_what_a_method_takes_from_the_number_of_rounds_an_open_run_says_itself(tmp_path, method, key):
    wanted = open_settings(model=SHAPE, method={"name": method})
    with raises(SettingError, f"method.{key}", "run.rounds", remedy=f"{key} = "):
        prepare(wanted, tmp_path)
    given = prepare(open_settings(model=SHAPE, method={"name": method, key: 7}), tmp_path)
    assert given.method[key] == 7


@pytest.mark.parametrize("method", sorted(REGISTRY.keys() - {"fedpurin", "fedcac", "cd2-pfed"}))
def test_all_other_methods_do_without(method):
    assert with_defaults_of_run({"name": method}, None) == with_defaults_of_run({"name": method}, 30)


def test_semi_asynchronous_rounds_have_a_window_and_no_other_schedule(tmp_path):
    mode = {"mode": "window", "window_s": 1800.0, "deadline_s": 3600.0}
    for schedule in ({"every": "24h", "window": "02:00-05:00"}, {"every": "1h"}):
        with pytest.raises(SettingError, match="only \\[schedule\\] window can be set with it"):
            simulate(settings(schedule=schedule, round=mode), tmp_path / "no", workers=0, fresh=True)
    _, _, nights = played(settings(schedule={"window": "01:00-05:00"}, round=mode), tmp_path / "yes")
    assert nights == [1.0] * 4
