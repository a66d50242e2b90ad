"""Two devices of one name: which agent holds it, and how long the other one waits."""

import pytest
from tests.helpers.talk import AgentTalk, Coordinating, run_settings
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.queries import queries
from fleetune.coordinator.serving import duplicate_names
from fleetune.coordinator.serving.duplicate_names import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RETURN_S,
    DuplicateNames,
)
from fleetune.protocols.wire import messages as wire


class Script:
    """Agents of one name that connect, on a clock that the test moves."""

    def __init__(self):
        self.names, self.now = DuplicateNames(), 0.0

    def connect(self, *instances, every_s=1.0):
        """What each is told."""
        told = []
        for instance in instances:
            self.now += every_s
            told.append(self.names.connected("d", instance, self.now))
        return told

    @property
    def shared(self):
        return self.names.shared("d")


def test_restarts_are_accepted_at_once_however_many():
    script = Script()
    assert script.connect(*"abcdefghijklmnopqrstuvwxyz") == [0.0] * 26
    assert script.connect("z", "z") == [0.0, 0.0], "and so is a connection that broke"
    assert not script.shared


def test_an_agent_that_comes_back_shows_that_there_are_two_and_the_first_keeps_the_name():
    script = Script()
    assert script.connect("a", "b", "a") == [0.0, 0.0, 0.0]
    assert script.shared
    assert script.connect("b", "a") == [FIRST_WAIT_S, 0.0]


def test_the_second_waits_twice_as_long_each_time_up_to_five_minutes():
    script = Script()
    script.connect("a", "b", "a")
    waits = [script.connect("b", "a")[0] for _ in range(7)]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert LONGEST_WAIT_S == 300.0


def test_the_second_takes_the_name_when_the_first_has_ended():
    script = Script()
    script.connect("a", "b", "a")
    assert script.connect("b") == [FIRST_WAIT_S]
    script.now += FIRST_WAIT_S
    assert script.connect("b") == [0.0], "a did not connect again after b had thrown it out"
    assert not script.shared
    assert script.connect("a") == [0.0], "until it does"
    assert script.shared
    assert script.connect("b") == [2 * FIRST_WAIT_S]


def test_an_agent_that_comes_back_late_is_a_restart():
    script = Script()
    script.connect("a", "b")
    script.now += RETURN_S
    assert script.connect("a") == [0.0]
    assert not script.shared


@pytest.mark.parametrize("order", ["abcabc", "abcacb", "abcbac"])
def test_of_three_devices_the_first_keeps_the_name(order):
    script = Script()
    script.connect(*order)
    assert script.names.connected("d", "a", script.now) == 0.0
    assert all(script.names.connected("d", one, script.now) > 0 for one in "bc")


def test_a_name_that_only_one_agent_uses_any_more_is_told_once():
    script = Script()
    script.connect("a", "b", "a", "b", "a")
    assert script.names.look(script.now + LONGEST_WAIT_S) == []
    later = script.now + duplicate_names.FORGET_S + 1
    assert script.names.look(later) == ["d"]
    assert script.names.look(later) == []


def test_what_is_remembered_of_a_name_is_bounded():
    script = Script()
    script.connect(*map(str, range(10_000)), every_s=0.001)
    assert len(script.names._names["d"].claims) <= duplicate_names.MAX_CLAIMS + 1
    script.names.forget("d")
    assert script.names._names == {}


@pytest.fixture
def talk(tmp_path):
    made = Coordinating.of(tmp_path / "run", run_settings())
    yield made
    made.close()


def come(talk, instance):
    """An agent connects and is ready; what it was told first."""
    talk.take("a")
    talk.hear("a", wire.Presence(True, instance), "state")
    told = [wire.read_to_device(data) for topic, data in talk.take("a") if topic.endswith("/down")]
    for offer in told:
        if isinstance(offer, wire.Offer):
            talk.hear("a", wire.Ack(offer.transfer, offer.num_bytes))
    return told


def test_the_second_device_is_told_and_nothing_of_it_counts(talk, caplog):
    talk.greet("a", num_samples=10)
    come(talk, "b")
    come(talk, "x")
    assert caplog.text.count("two devices use the id a") == 1
    state = talk.run.controller.engine_state
    talk.greet("a", num_samples=10)  # the first one again
    assert state.members["a"].ready
    turn = talk.run.controller.awaited_attempt("a")
    assert come(talk, "b") == [wire.NameTaken("b", FIRST_WAIT_S)]
    talk.hear("a", wire.Decline(talk.id, *turn, "from the second device"))
    talk.hear("a", b"x" * 100, "update")
    assert talk.run.controller.awaited_attempt("a") == turn
    assert state.members["a"].ready, "the first one keeps its place"
    assert state.counters.get("declined", 0) == 0
    assert talk.run.controller.ledger.refusals["second-device"] == 2


def test_the_will_of_an_agent_that_lost_the_name_says_nothing_of_the_one_that_has_it(talk):
    talk.greet("a", num_samples=10)
    come(talk, "b")
    talk.hear("a", wire.Presence(False, "x"), "state")
    assert talk.server.parts.sessions["a"].online
    talk.hear("a", wire.Presence(False, "b"), "state")
    assert not talk.server.parts.sessions["a"].online


def test_status_names_the_device_until_only_one_is_left(talk):
    talk.greet("a", num_samples=10)
    come(talk, "b")
    come(talk, "x")
    (line,) = queries.status(talk.run.folder).troubles
    assert "two devices use the id a" in line
    assert "--device" in line
    assert line in CliRunner().invoke(app, ["status", str(talk.run.folder), "--json"]).stdout
    talk.server.parts.look(1e6)
    assert queries.status(talk.run.folder).troubles == ()


def test_an_agent_that_is_told_so_leaves_and_comes_back(tmp_path, caplog):
    talk = AgentTalk(tmp_path)
    try:
        calls, agent = [], talk.agent
        agent._connection._transport.close = lambda *_: calls.append("close")
        agent._connection._transport.connect = lambda: calls.append("connect")
        talk.hear(wire.NameTaken("another", 20.0))
        assert calls == []
        talk.hear(wire.NameTaken(agent._connection.instance, 20.0))
        assert calls == ["close"]
        (line,) = caplog.messages
        assert all(named in line for named in ("another device uses the id a", "20 s", "--device"))
        agent._connection.tick(19.0)
        assert calls == ["close"]
        agent._connection.tick(20.0)
        agent._connection.tick(21.0)
        assert calls == ["close", "connect"]
    finally:
        talk.close()
