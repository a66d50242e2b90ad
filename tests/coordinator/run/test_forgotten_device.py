"""A device that is removed from a stored run at any moment: no trace of it stays, and the run goes on."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from tests.helpers import played_run
from tests.helpers.played_run import PlayedRun

GONE = "bravo-7"
NAMES = {"a": "alfa", "b": GONE, "c": "charlie", "d": "delta"}
WAYS = [
    ("fedavg", "synchronous"),
    ("fedavg", "buffer"),
    ("fedspu", "synchronous", "int8", "lossless"),
    ("kapc", "synchronous", "raw", "lossless"),
    ("clusterfl", "synchronous"),
]


@pytest.fixture(autouse=True)
def _long_names(monkeypatch):
    """Names that no bytes hold by chance."""
    devices = {NAMES[short]: ratio for short, ratio in played_run.DEVICES.items()}
    monkeypatch.setattr(played_run, "DEVICES", devices)
    monkeypatch.setattr(played_run, "PACE", tuple(NAMES[short] for short in played_run.PACE))


def forget(folder, ways, device=GONE):
    """Remove a device from the run in this folder as the owner of its lock does."""
    played = PlayedRun(folder, *ways)
    with closing(played):
        played.run.controller.recall()
        removed = played.run.controller.forget(device)
        played.run.store.compact()
    return removed


def content(folder):
    with closing(sqlite3.connect(folder / "run" / "state.sqlite")) as file:
        return sorted(file.iterdump())


def traces(folder, device=GONE):
    return [
        path.name for path in folder.rglob("*") if path.is_file() and device.encode() in path.read_bytes()
    ]


def left_alone(played, at):
    """Continue without the forgotten device; return the number of the last event."""
    del played.sessions[GONE]
    remaining = {name: ratio for name, ratio in played_run.DEVICES.items() if name != GONE}
    played_run.DEVICES = remaining
    return played.play(at)


@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize("at", [6, *(pytest.param(at, marks=pytest.mark.nightly) for at in (1, 3, 11, 14))])
def test_a_run_goes_on_without_a_forgotten_device(tmp_path, ways, at):
    with closing(PlayedRun(tmp_path, *ways)) as played:
        at = played.play(0, at)
    removed = forget(tmp_path, ways)
    assert removed["member"] == 1
    assert traces(tmp_path / "run") == []
    assert forget(tmp_path, ways) == {}, "nothing is left to remove"
    with closing(PlayedRun(tmp_path, *ways)) as played:
        left_alone(played, at)
        assert played.run.controller.finished
        assert np.isfinite(played.run.controller.shared_model).all()
        for record in played.run.controller.records():
            assert GONE not in (*record.participants, *record.devices)
        last = played.run.controller.records()[-1]
        assert len(last.devices) >= 1
        assert f"'{GONE}'" not in repr(played.run.controller.method_state)
    assert traces(tmp_path / "run") == []


def test_a_step_that_is_lost_removes_nothing_and_is_repeated(tmp_path, monkeypatch):
    ways = WAYS[3]
    with closing(PlayedRun(tmp_path, *ways)) as played:
        at = played.play(0, 11)
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fleetune.coordinator.run.forgotten_device.forget_troubles_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forget(tmp_path, ways)
    assert content(tmp_path) == before
    assert forget(tmp_path, ways)["member"] == 1
    with closing(PlayedRun(tmp_path, *ways)) as played:
        left_alone(played, at)
        assert played.run.controller.finished


def test_a_finished_run_loses_its_device_too(tmp_path):
    ways = WAYS[0]
    with closing(PlayedRun(tmp_path, *ways)) as played:
        played.play()
        shared = played.run.controller.shared_model.tobytes()
        replies = sum(GONE in record.devices for record in played.run.controller.records())
    removed = forget(tmp_path, ways)
    assert removed["device_round"] == replies > 0
    assert traces(tmp_path / "run") == []
    with closing(PlayedRun(tmp_path, *ways)) as played:
        played.run.controller.recall()
        assert played.run.controller.shared_model.tobytes() == shared, "its part in the model stays"
        assert GONE not in played.run.controller.ledger.traffic


def test_who_never_was_there_leaves_everything_as_it_was(tmp_path):
    ways = WAYS[2]
    with closing(PlayedRun(tmp_path, *ways)) as played:
        played.play(0, 9)
    before = content(tmp_path)
    assert forget(tmp_path, ways, "echo") == {}
    assert content(tmp_path) == before
