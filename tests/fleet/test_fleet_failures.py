"""Processes of a fleet are killed and restarted; the run ends as if nothing had happened."""

import queue
import signal
import sqlite3
from contextlib import closing

import pytest
from tests.helpers.fleet_processes import PATIENCE_S, Fleet, assert_equal, expected, run_toml, wait_until
from tests.helpers.slow_proxy import SlowProxy

from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.methods import from_section
from fleetune.protocols.wire import messages, topics
from fleetune.protocols.wire.payloads import read_enrolment
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

pytestmark = pytest.mark.fleet

LONG = run_toml(epochs=250)  # rounds long enough to be struck in the middle

LARGE = {
    "source": "tests.helpers.fleet_processes:images",
    "shape": "[1, 28, 28]",
    "method": "fedavg",
    "rounds": 1,
}
SLOW_BPS = 400_000  # 4 s for an update of the large model


@pytest.fixture
def wanted(tmp_path_factory):
    return expected(LONG, tmp_path_factory.mktemp("simulated"))


def test_a_killed_coordinator_goes_on_in_mid_round(tmp_path, wanted):
    with Fleet(tmp_path, LONG) as fleet:
        fleet.start()
        fleet.coordinator.wait_for("round 1/3")
        fleet.agents["device-0"].wait_for("round 2: training")
        fleet.coordinator.kill()
        fleet.start_coordinator().wait_for("goes on")
        strike_when_two_have_replied(fleet, "round 3")
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)
        forget_that_it_is_finished(fleet)
        assert fleet.start_coordinator().wait() == 0
        assert fleet.coordinator.lines("finished: all rounds are done")
        assert_equal(fleet.outcome(), wanted)


def forget_that_it_is_finished(fleet):
    """As after a kill between the last reply and the report."""
    with closing(sqlite3.connect(fleet.folder / "runs" / fleet.name / "state.sqlite")) as state, state:
        assert state.execute("DELETE FROM value WHERE name = 'finished'").rowcount == 1


def strike_when_two_have_replied(fleet, round_):
    slow = fleet.agents["device-2"]
    slow.wait_for(f"{round_}: training")
    slow.send(signal.SIGSTOP)
    for device in ("device-0", "device-1"):
        fleet.agents[device].wait_for(f"{round_}: update delivered")
    fleet.coordinator.kill()
    slow.send(signal.SIGCONT)
    fleet.start_coordinator()


@pytest.mark.nightly
def test_a_killed_agent_comes_back_with_its_model_and_what_its_optimiser_remembers(
    tmp_path, tmp_path_factory
):
    """Whatever [training] may say: AdamW kept on the device, a schedule, clipping, augmentation."""
    toml = run_toml(epochs=100).replace(
        "learning_rate = 0.02",
        'learning_rate = 0.002\noptimiser = "adamw"\noptimiser_state = "device"\nweight_decay = 0.01\n'
        'schedule = "cosine"\nwarmup_rounds = 1\nclip_norm = 1.0\naugment = ["crop", "flip"]',
    )
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.agents["device-1"].wait_for("round 2: training")
        fleet.agents["device-1"].kill()
        fleet.start_agent("device-1")
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)
        for device in fleet.shares:
            assert optimiser_steps(fleet, device) > 0


def optimiser_steps(fleet, device):
    """Of the entry that took most, by the state that the device keeps."""
    store = AgentStore(fleet.folder / "state" / fleet.name / device)
    [run] = store.runs()
    enrolment = read_enrolment(store.enrolment(run).read())
    method = from_section(enrolment.method, enrolment.spec)
    (state,) = read_state(store.session(run).read(), method).slots["optimiser"]
    return state.vectors[2].max()


def test_an_agent_killed_in_mid_upload_sends_only_the_rest(tmp_path, tmp_path_factory):
    toml = run_toml(**LARGE, devices=2, start_with=2)
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    whole = wanted.rounds[0][3]["device-0"][1]
    with Fleet(tmp_path, toml) as fleet, SlowProxy(fleet.broker.port, SLOW_BPS) as proxy:
        fleet.start_coordinator()
        fleet.start_agent("device-1")
        agent = fleet.start_agent("device-0", port=proxy.port)
        incoming = fleet.folder / "runs" / fleet.name / "incoming" / "device-0"
        wait_until(lambda: bytes_in(incoming) > whole / 3, "a third of the update is there")
        agent.kill()
        arrived, crossed = bytes_in(incoming), proxy.up_bytes
        assert whole / 3 < arrived < whole
        proxy.uplink_bps = None
        agent = fleet.start_agent("device-0", port=proxy.port)
        agent.wait_for("round 1: update delivered")
        again = proxy.up_bytes - crossed
        fleet.wait_finished()
        assert again < whole - arrived + 8000
        assert_equal(fleet.outcome(), wanted)


def test_an_upload_that_nobody_waits_for_any_more_is_given_up(tmp_path):
    toml = run_toml(**LARGE, selection="participants = 2\nover_selection = 1.5")
    with Fleet(tmp_path, toml) as fleet, SlowProxy(fleet.broker.port, SLOW_BPS) as proxy:
        fleet.start_coordinator()
        other = fleet.start_agent("device-1")
        fleet.start_agent("device-2")
        agent = fleet.start_agent("device-0", port=proxy.port)
        other.wait_for("round 1: training")
        other.send(signal.SIGSTOP)
        incoming = fleet.folder / "runs" / fleet.name / "incoming" / "device-0"
        wait_until(lambda: bytes_in(incoming) > 0, "the slow device sends its update")
        other.send(signal.SIGCONT)
        agent.wait_for("round 1: the coordinator refused the update: late")
        fleet.wait_finished()
        [first, final_evaluation] = fleet.outcome().rounds
    assert tuple(first[3]) == ("device-1", "device-2")
    assert tuple(final_evaluation[3]) == ("device-0", "device-1", "device-2")
    assert proxy.up_bytes < first[3]["device-1"][1]


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.glob("*.part"))


@pytest.mark.nightly
def test_rounds_close_at_their_deadline_without_an_agent_that_is_gone(tmp_path):
    toml = run_toml(epochs=100, deadline_s=8, rounds=2)
    with Fleet(tmp_path, toml) as fleet:
        fleet.start()
        fleet.agents["device-1"].wait_for("round 1: training")
        fleet.agents["device-1"].kill()
        fleet.wait_finished()
        found, summary = fleet.outcome(), fleet.summary()
    everybody, others = ("device-0", "device-1", "device-2"), ("device-0", "device-2")
    assert [record[:3] for record in found.rounds] == [(1, 1, everybody), (2, 1, others), (3, 1, others)]
    assert [tuple(record[3]) for record in found.rounds] == [others, others, others]
    assert summary["refused"] == {"engine-gone": 1}


def test_a_broker_that_is_gone_for_a_while_loses_nothing_and_doubles_nothing(tmp_path, wanted):
    with Fleet(tmp_path, LONG) as fleet:
        fleet.start()
        for agent in fleet.agents.values():
            agent.wait_for("round 2: training")
        fleet.broker.kill()
        for agent in fleet.agents.values():
            agent.wait_for("round 2: done")  # what they send now is lost
        fleet.coordinator.wait_for("no program listens there")
        fleet.restart_broker()
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)


@pytest.mark.nightly
def test_signals_end_processes_cleanly_and_they_come_back(tmp_path, wanted):
    with Fleet(tmp_path, LONG) as fleet:
        fleet.start()
        agent = fleet.agents["device-1"]
        agent.wait_for("round 1: training")
        assert agent.stop(signal.SIGTERM) == 0
        assert agent.lines("left: stopped by a signal")
        assert not agent.lines("round 1: done")
        wait_until_offline(fleet, "device-1")
        fleet.start_agent("device-1")
        for closed, how in (("round 1/3", signal.SIGTERM), ("round 2/3", signal.SIGINT)):
            fleet.coordinator.wait_for(closed)
            assert fleet.coordinator.stop(how) == 0
            assert fleet.coordinator.lines("stopped; the same command goes on with the run")
            fleet.start_coordinator()
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)


def wait_until_offline(fleet, device):
    """Return when the broker says so; a busy one may first repeat an earlier presence."""
    events = queue.SimpleQueue()
    topic = topics.topic(fleet.name, device, "state")
    where = Broker("127.0.0.1", fleet.broker.port)
    watcher = MqttTransport(where, "watcher", subscriptions=[topic], events=events)
    watcher.connect()
    try:
        while True:  # `get` raises when nothing comes
            event = events.get(timeout=PATIENCE_S)
            if isinstance(event, Received) and not messages.read_from_device(event.data).online:
                return
    finally:
        watcher.close()
