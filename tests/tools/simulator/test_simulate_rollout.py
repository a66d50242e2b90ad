"""Roll-out groups, simulated: canaries first, a good version goes to all, a poisoned one to nobody else."""

import io
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from rich.console import Console
from tests.tools.simulator.test_simulate import settings
from tests.tools.simulator.test_simulate_adoption import NAMES, served

from fleetune.coordinator.extensions.releases import read_rollout
from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.reports.status import show_status
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods.fedavg import FedAvg
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.workers import device_trainer

POISONED = 3


def play(folder, rounds=9, method="fedavg", model=(), **adoption):
    wanted = settings(
        run={"name": "sim", "rounds": rounds, "final_evaluation": False},
        method={"name": method},
        model=dict(model),
        encoding={"up": "raw", "down": "raw"},  # tasks are read here without what devices hold
        data={"partition": {"kind": "iid", "samples": 100, "test_fraction": 0.2}},
        adoption={"enabled": True, "compare_alone": 0, "canary": 0.5, "watch": 2, "held_out": 0.5} | adoption,
    )
    run, summary = simulate(wanted, folder, workers=0, fresh=True)
    run.store.close()
    return run, summary


@pytest.fixture
def told(monkeypatch):
    """What each device was told of versions, and which it served after it: by round and device."""
    found = {}
    reply = device_trainer.DeviceTrainer.train

    def noted(self, job):
        answer = reply(self, job)
        kind = Assignment[self.method.task_type]
        task = codec.decode(job.payload, kind, self.enrolment.spec)
        model = read_deployed(
            starting_models.deployed_file(self.folder, job.name).read(), self.enrolment.spec
        )
        found[task.round, job.name] = task.release, None if model is None else model.record.round
        return answer

    monkeypatch.setattr(device_trainer.DeviceTrainer, "train", noted)
    return found


def rollout_of(run) -> Rollout:
    with stored_run(run.folder) as stored:
        return read_rollout(stored.store)


def test_a_version_goes_to_canaries_then_to_all_and_its_weights_to_each_once(tmp_path, told):
    run, _ = play(tmp_path / "sim")
    rollout = rollout_of(run)
    assert (rollout.approved, rollout.trial, rollout.num_stopped) == (7, 9, 0)
    canaries = {
        name for (number, name), (release, _) in told.items() if number == 2 and release.trial is not UNSET
    }
    assert len(canaries) == 3
    for name in NAMES:
        assert told[1, name] == (told[1, name][0], None)
        assert (told[2, name][1] == 1) == (told[3, name][1] == 1) == (name in canaries)
        assert told[4, name][1] in (1, 3)  # version 1 is out, 3 on trial with others
        sent = [
            version.number
            for number in range(1, 10)
            for version in (told[number, name][0].approved, told[number, name][0].trial)
            if version is not UNSET and version.weights is not UNSET
        ]
        assert len(sent) == len(set(sent))
        assert {1, 3, 5} <= set(sent)  # 7 is out after the last round


def test_a_poisoned_version_is_stopped_and_canaries_go_back(tmp_path, told, monkeypatch):
    aggregate, clean = FedAvg.aggregate, []

    def poisoned(self, state, updates, combine):
        """One round's sum goes wrong; the next one goes on from what it should have been."""
        clean.append(aggregate(self, state, updates, combine))
        if len(clean) == POISONED:
            return replace(clean[-1], weights=-10 * clean[-1].weights)
        return clean[-2] if len(clean) == POISONED + 1 else clean[-1]

    monkeypatch.setattr(FedAvg, "aggregate", poisoned)
    monkeypatch.setattr(
        "fleetune.edge_agent.extensions.adoption.comparison._why_not_changed", lambda *_, **__: ""
    )
    run, summary = play(tmp_path / "sim")
    rollout = rollout_of(run)
    (stopped,) = rollout.stopped
    assert (stopped.version, stopped.round) == (POISONED, 5)
    assert 2 * stopped.worse > stopped.reporting > 0
    bad = {(number, name) for (number, name), (_, version) in told.items() if version == POISONED}
    canaries = {name for _, name in bad}
    assert len(canaries) == 3  # whose gate lets everything in, here
    assert {number for number, _ in bad} == {4, 5}
    for name in canaries:
        assert told[6, name][1] in (1, 5)
    assert rollout.approved == 7  # what comes later is good again, and goes out
    assert {one.record.round for one in served(run).values()} <= {5, 7}
    assert (summary.rollout.stopped, summary.rollout.why) == (1, (stopped.words,))
    shown = io.StringIO()
    show_status(run.folder, Console(file=shown, width=160))
    assert (
        f"versions  version 7 is out; 9 on trial since round 9, 0 of 3 canaries reported; {stopped.words}"
        in shown.getvalue()
    )


def test_a_run_that_goes_on_from_another_keeps_what_devices_served_there_until_a_version_is_out(
    tmp_path, monkeypatch
):
    """What a service does with a new version of a model: all that the new run makes of it is bad."""
    first, _ = play(tmp_path / "first", rounds=4, canary=0.0, compare_alone=1)
    before = {name: one.weights.tobytes() for name, one in served(first).items()}
    aggregate = FedAvg.aggregate

    def poisoned(self, state, updates, combine):
        merged = aggregate(self, state, updates, combine)
        return replace(merged, weights=-3 * merged.weights)

    monkeypatch.setattr(FedAvg, "aggregate", poisoned)
    monkeypatch.setattr(
        "fleetune.edge_agent.extensions.adoption.comparison._why_not_changed", lambda *_, **__: ""
    )
    run, summary = play(tmp_path / "second", rounds=4, model={"weights": "run:first"})
    assert (summary.rollout.approved, summary.rollout.stopped) == (0, 1)
    models = served(run)
    trial = {name for name, one in models.items() if one.record.run == run.enrolment.run}
    assert {models[name].record.round for name in trial} <= {3}
    assert len(trial) == 3
    assert all(models[name].weights.tobytes() == before[name] for name in set(NAMES) - trial)


def test_a_canary_tells_what_the_gate_would_find(tmp_path):
    run, _ = play(tmp_path / "sim", rounds=4)
    with stored_run(run.folder) as stored:
        records = stored.store.records()
    found = [reply.measures.release.found for one in records[1:3] for reply in one.devices.values()]
    told = [one for one in found if one is not UNSET]
    assert len(told) == 6
    assert all((one.new, one.old, one.by_samples) == (1, 0, 40) for one in told)
    assert np.mean([one.gain for one in told]) > 0


def test_what_makes_no_sense_is_refused_in_one_line(tmp_path):
    with pytest.raises(SettingError, match="canary: fedper has no shared model that devices serve"):
        play(tmp_path / "sim", method="fedper")
    with pytest.raises(SettingError, match="canary needs enabled = true"):
        play(tmp_path / "sim", enabled=False)
    with pytest.raises(SettingError, match='adoption: watch = "soon": '):
        play(tmp_path / "sim", watch="soon")


def test_nothing_of_it_travels_where_it_is_off(tmp_path):
    run, _ = play(tmp_path / "sim", rounds=2, canary=0.0)
    assert b"canary" not in run.payload
    assert b"release" not in msgspec.json.encode(run.settings.adoption)
    assert rollout_of(run) is None
    data = starting_models.state_file(run.folder / "devices", NAMES[0]).read()
    assert "releases" not in read_state(data, run.method).slots
