"""Coordinator, agents and broker as processes of their own: the same run.toml over MQTT and simulated."""

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.helpers.fleet_processes import Fleet, assert_equal, expected, run_toml
from tests.protocols.wire.test_transport import KINDS

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.coordinator.store.run_folder import clear
from fleetune.edge_agent.state.state_folder import agent_files, wipe
from fleetune.edge_agent.training.trainers import trains_smaller
from fleetune.protocols.model.smaller import has_smaller
from fleetune.protocols.randomness import Key
from fleetune.protocols.version import VERSION

pytestmark = pytest.mark.fleet


@pytest.mark.parametrize("which", KINDS)
def test_fedspu_over_mqtt_is_its_simulation(tmp_path, tmp_path_factory, which):
    toml = run_toml()
    with Fleet(tmp_path, toml, which) as fleet:
        fleet.start()
        fleet.wait_finished()
        found, summary = fleet.outcome(), fleet.summary()
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    assert_equal(found, wanted)
    assert len(found.rounds) == 4
    assert len({reply[0] for reply in found.rounds[1][3].values()}) == 3  # three boards, three ratios
    assert summary["refused"] == {}
    assert summary["agents"] == {f"fleetune {VERSION}": len(summary["by_device"])}
    assert summary["bytes"]["up"] == sum(traffic[1] for traffic in wanted.traffic.values())
    all_of_it_is_known_as_ours(fleet)
    all_of_it_is_its_owners_alone(fleet)


def all_of_it_is_its_owners_alone(fleet):
    """But for reports in the run's folder, which are as the umask says."""
    run = fleet.folder / "runs" / fleet.name
    found = [run, run.parent, *run.rglob("*"), *(fleet.folder / "state").rglob("*")]
    reports = {"summary.json", "rounds.jsonl", "report.html"}
    open_to_others = {one.name for one in found if one.stat().st_mode & 0o077 and one.suffix != ".png"}
    assert open_to_others <= reports


def test_agents_with_onnx_runtime_over_mqtt_are_its_simulation(tmp_path, tmp_path_factory):
    toml = run_toml(name="onnx", model="lenet5")
    toml += 'trainer = "onnx"\n'
    with Fleet(tmp_path, toml) as fleet:
        fleet.start(trainer="onnx")
        fleet.wait_finished()
        found = fleet.outcome()
    assert_equal(found, expected(toml, tmp_path_factory.mktemp("simulated")))


def test_smaller_networks_over_mqtt_are_their_simulation(tmp_path, tmp_path_factory):
    """FedMP's devices choose their neurons in the first round, and train these alone from then on."""
    toml = run_toml(name="smaller", method="fedmp", model="cnn-kapc")
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.wait_finished()
        found = fleet.outcome()
    spec, _ = draw("cnn-kapc", (1, 8, 8), 10, Key(1))
    assert has_smaller(spec)
    assert trains_smaller("torch", spec)
    assert_equal(found, expected(toml, tmp_path_factory.mktemp("simulated")))


def test_shallow_steps_over_mqtt_are_their_simulation(tmp_path, tmp_path_factory):
    every = run_toml(name="shallow", model="lenet5")
    toml = every.replace('name = "fedspu"', 'name = "fedspu"\nshallow_steps = true')
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.wait_finished()
        found = fleet.outcome()
    assert_equal(found, expected(toml, tmp_path_factory.mktemp("simulated")))
    others = expected(every, tmp_path_factory.mktemp("every-step"))
    assert not np.array_equal(found.shared, others.shared)


def all_of_it_is_known_as_ours(fleet):
    """Whatever a fleet leaves behind is on the lists of what may be removed."""
    state, run = fleet.folder / "state", fleet.folder / "runs" / fleet.name
    wipe(state, agent_files(state))
    assert not state.exists()
    clear(run)
    assert list(run.iterdir()) == []


def test_fedavg_twice_with_agents_that_stay(tmp_path, tmp_path_factory):
    toml = run_toml(method="fedavg")
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    with Fleet(tmp_path, toml) as fleet:
        fleet.start(options=())
        assert fleet.coordinator.wait() == 0
        assert_equal(fleet.outcome(), wanted)
        first = fleet.served()
        assert all(record.final_evaluation for record in first.values())
        assert fleet.start_coordinator("--fresh").wait() == 0
        assert_equal(fleet.outcome(), wanted)
        for device, standing in fleet.served().items():  # the same models again: of equals the newer
            assert standing.run != first[device].run
            assert standing.accuracy == first[device].accuracy == wanted.rounds[-1][3][device][2].kept
        for agent in fleet.agents.values():
            assert len(agent.lines("joined run")) == 2
            assert not agent.lines("WARNING|ERROR")
            assert agent.stop() == 0


def test_devices_whose_data_does_not_fit_decline_and_the_others_go_on(tmp_path, tmp_path_factory):
    toml = run_toml(devices=2, start_with=2, quorum=2)
    x = np.zeros((20, 1, 8, 8), np.float32)
    np.savez(tmp_path / "labels.npz", x=x, y=np.arange(20))
    np.savez(tmp_path / "shape.npz", x=x[:, :, :5], y=np.arange(20) % 10)
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        for name, reason in [
            ("labels", "label 10; the model has 0..9"),
            ("shape", r"samples have shape \(1, 5, 8\); expected \(1, 8, 8\)"),
        ]:
            fleet.start_agent(f"wrong-{name}", data=f"npz:{tmp_path / name}.npz")
            fleet.coordinator.wait_for(f"wrong-{name} declines the run: .*{reason}")
            fleet.agents[f"wrong-{name}"].wait_for(f"declined: .*{reason}")
        absent = fleet.start_agent("absent", data=f"npz:{tmp_path / 'missing.npz'}")
        assert absent.wait() == 2  # it need not wait for a run to know
        assert absent.lines("edge-agent: .*there is no .*missing.npz")
        del fleet.agents["absent"]
        for device in fleet.shares:
            fleet.start_agent(device)
        fleet.wait_finished()
        found, summary = fleet.outcome(), fleet.summary()
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    assert found.rounds == wanted.rounds
    assert found.shared == wanted.shared
    assert summary["refused"]["engine-refused"] == 2


def test_an_idle_agent_costs_next_to_nothing(tmp_path):
    with Fleet(tmp_path, run_toml()) as fleet:
        agent = fleet.start_agent("device-0")
        agent.wait_for("connected")
        assert fleet.start_agent("device-0").wait() == 2  # one state, one agent
        assert fleet.agents["device-0"].lines("edge-agent: another agent uses .*: stop it")
        time.sleep(0.5)
        process = psutil.Process(agent.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(10)
        assert sum(process.cpu_times()[:2]) - before < 0.2
        assert "torch" not in Path(f"/proc/{agent.pid}/maps").read_text()
        assert process.memory_info().rss < 100e6
        print(f"idle: {process.memory_info().rss / 1e6:.0f} MB")
