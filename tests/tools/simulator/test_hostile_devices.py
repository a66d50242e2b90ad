"""Whatever a device says or loses, each exchange of a simulation has an end, and the simulation too."""

import re

import numpy as np
import pytest
from tests.helpers.hostile_fleet import FORGERS, LOST, OLDER, SILENT_S, HostileFleet
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_simulate import play

from fleetune.coordinator.tasks.assignment import Tasks
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.edge_agent.run.session import Session
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.methods import REGISTRY as METHODS
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator import progress_guard
from fleetune.tools.simulator.event_queue import EngineWakes
from fleetune.tools.simulator.progress_guard import ProgressGuard
from fleetune.tools.simulator.simulated_device import SimulatedDevice

KINDS = (*FORGERS, LOST, OLDER)
SIX = ("random", "too large", "not finite", "stale base", "wrong round", "silent")
SMALL = {"fleet": {"devices": 3, "boards": {}}, "round": {"quorum": 3}, "encoding": {"up": "raw"}}
FEW = 2  # times that a device is sent one task: as a difference, and all of it
HOSTILE = tuple(f"device-{number:02}" for number in range(4))


def every_kind(job):
    """From round 3 on, device 1 does something else in each round, at the first attempt."""
    place = job.key.round - 3
    if job.name != "device-1" or job.key.attempt != 1 or job.key.final_evaluation:
        return None
    return KINDS[place] if 0 <= place < len(KINDS) else None


def every_reason(tmp_path, monkeypatch, method):
    fleet = HostileFleet(monkeypatch, every_kind)
    rounds = len(KINDS) + 3
    _, summary, weights = play(
        tmp_path, run={"name": "sim", "rounds": rounds}, method={"name": method}, **SMALL
    )
    assert summary.rounds == rounds
    assert np.isfinite(weights).all()
    assert set(fleet.forged) == set(KINDS)
    return fleet, summary


@pytest.mark.parametrize("method", sooner(sorted(METHODS), kept=("fedavg", "fedspu", "fedpurin")))
def test_after_any_reason_to_refuse_a_reply_the_next_task_can_be_read(tmp_path, monkeypatch, method):
    fleet, summary = every_reason(tmp_path, monkeypatch, method)
    assert fleet.most_of_a_task <= FEW
    again = {task for task, times in fleet.tasks.items() if times > 1}
    assert again <= {("device-1", KINDS.index(kind) + 3, 1) for kind in (LOST, OLDER)}, "nothing else is lost"
    assert summary.refused.get("abandoned-too-few", 0) <= len(FORGERS)


@pytest.mark.parametrize("method", ["fedavg", "fedspu"])
def test_a_coordinator_that_is_wrong_about_a_device_sends_it_the_whole_task_once(
    tmp_path, monkeypatch, method
):
    monkeypatch.setattr(Tasks, "perhaps_taken", lambda *_: None)
    fleet, summary = every_reason(tmp_path, monkeypatch, method)
    assert fleet.most_of_a_task == FEW
    assert sum(times > 1 for times in fleet.tasks.values()) > 2
    assert summary.refused["abandoned-too-few"] > 0


def test_a_storm_of_tasks_ends_the_simulation_with_its_last_events(tmp_path, monkeypatch):
    """The coordinator is wrong about its devices, and they do not say that they cannot read their tasks."""
    monkeypatch.setattr(Tasks, "perhaps_taken", lambda *_: None)
    monkeypatch.setattr(Session, "_asks_whole", property(lambda _: False, lambda *_: None), raising=False)
    monkeypatch.setattr(RoundPlanner, "why_unread", lambda *_: None)
    fleet = HostileFleet(monkeypatch, every_kind)
    with pytest.raises(FleetuneError) as caught:
        play(tmp_path, run={"name": "sim", "rounds": 8}, method={"name": "fedavg"}, **SMALL)
    first, *events = str(caught.value).splitlines()
    assert "makes no progress: device-1 was sent its task 22 times in round 4, attempt 2" in first
    assert len(events) == 10
    assert all(re.fullmatch(r"  \d+\.\d{6} s \w+ device-\d", event) for event in events)
    assert fleet.most_of_a_task == progress_guard.MOST_BOUNCES + 1


def test_time_that_stands_still_ends_a_simulation_and_a_large_fleet_does_not():
    healthy = ProgressGuard(100_000, always_connected=True)
    for turn in ((1, 1), (1, 2), (2, 1)):
        for _ in range(6 * 100_000):  # all that may happen at one moment in one attempt
            healthy.note_event(0.0, turn, EngineWakes(0.0))
    watch = ProgressGuard(3, always_connected=True)
    for _ in range(1060):
        watch.note_event(5.0, (7, 1), EngineWakes(5.0))
    with pytest.raises(FleetuneError, match="1061 events happened and virtual time stands still in round 7"):
        watch.note_event(5.0, (7, 1), EngineWakes(5.0))


def test_a_device_that_was_away_may_be_sent_its_task_again():
    watch = ProgressGuard(1, always_connected=True)
    for _ in range(10 * progress_guard.MOST_BOUNCES):
        watch.note_sent("a", (1, 1))
        watch.note_reconnected("a")


def hostile_run(tmp_path, monkeypatch, kind, quorum=1, **sections):
    """20 devices, 4 of them hostile from round 3 on: the run's summary, or the line that ended it."""
    fleet = HostileFleet(monkeypatch, lambda job: kind if _is_hostile(job.name, job.key) else None)
    if kind == "silent":
        honest = SimulatedDevice.train_s
        key = TransferKey("task", "sim")
        monkeypatch.setattr(
            SimulatedDevice,
            "train_s",
            lambda self, budget, turn: (
                SILENT_S if _is_hostile(self.name, key, turn[0]) else honest(self, budget, turn)
            ),
        )
    chosen = {
        "run": {"name": "sim", "rounds": 5},
        "method": {"name": "fedavg"},
        "fleet": {"devices": 20, "boards": {}},
        "encoding": {"up": "raw"},
        "round": {"quorum": quorum},
        **sections,
    }
    try:
        return fleet, play(tmp_path, **chosen)[1]
    except SettingError as problem:
        return fleet, str(problem)


def _is_hostile(name, key, number=None):
    return name in HOSTILE and (number or key.round) >= 3 and not key.final_evaluation


@pytest.mark.parametrize("kind", sooner(SIX, kept=3))
def test_a_fleet_with_four_hostile_devices_of_twenty_ends_by_itself(tmp_path, monkeypatch, kind):
    fleet, summary = hostile_run(tmp_path, monkeypatch, kind, quorum=16)
    assert summary.rounds == 5
    assert fleet.most_of_a_task == 1
    refused = {} if kind in ("random", "silent") else {"engine-declined": 4 * 3}
    assert {name: summary.refused.get(name) for name in refused} == refused


@pytest.mark.parametrize("kind", ["too large", "stale base"])
def test_a_round_that_needs_a_hostile_device_is_given_up_in_one_line(tmp_path, monkeypatch, kind):
    fleet, line = hostile_run(tmp_path, monkeypatch, kind, quorum=17)
    assert re.fullmatch(r"round 3 was tried 5 times, and updates are refused \(device-0\d: .*", line)
    assert fleet.most_of_a_task == 1


def test_a_round_that_needs_a_silent_device_is_given_up_in_one_line(tmp_path, monkeypatch):
    fleet, line = hostile_run(tmp_path, monkeypatch, "silent", quorum=17)
    assert re.fullmatch(
        r"round 3 was tried 20 times, and too few devices answered by its deadline \(not device-0\d.*\);"
        r" raise round.deadline_s, or lower round.quorum",
        line,
    )
    assert fleet.most_of_a_task == 1


@pytest.mark.nightly
@pytest.mark.parametrize("down", ["lossless", "int4", "lowrank"])
@pytest.mark.parametrize("mode", [{}, {"mode": "buffer", "buffer": 8}, {"mode": "window", "window_s": 5.0}])
@pytest.mark.parametrize("kind", ["too large", "wrong round", "damaged", OLDER])
def test_no_mode_and_no_encoding_of_tasks_lets_a_fleet_bounce(tmp_path, monkeypatch, kind, mode, down):
    fleet, ended = hostile_run(
        tmp_path, monkeypatch, kind, encoding={"up": "raw", "down": down}, round={"quorum": 5, **mode}
    )
    assert getattr(ended, "rounds", ended) == 5
    assert fleet.forged[kind] > 0
    assert fleet.most_of_a_task <= FEW


@pytest.mark.nightly
@pytest.mark.parametrize("participants", [None, 8])
@pytest.mark.parametrize("kind", SIX)
def test_fashion_mnist_with_hostile_devices_ends_by_itself(
    tmp_path, monkeypatch, data_folder, kind, participants
):
    if not (data_folder / "fashion-mnist").is_dir():
        pytest.skip(f"no fashion-mnist in {data_folder}")
    partition = {"kind": "dirichlet", "alpha": 0.5, "samples": 100}
    asked = {} if participants is None else {"participants": participants}
    fleet, ended = hostile_run(
        tmp_path,
        monkeypatch,
        kind,
        run={"name": "sim", "rounds": 12},
        model={"name": "lenet5", "input_shape": [1, 28, 28], "num_classes": 10},
        data={"source": f"idx:{data_folder}/fashion-mnist", "std": 0.5, "partition": partition},
        training={"epochs": 1, "batch_size": 10, "learning_rate": 0.02},
        round={"quorum": participants or 16, **asked},
    )
    assert getattr(ended, "rounds", ended) == 12
    assert fleet.most_of_a_task == 1
