"""The end of a run: connected devices are told before the broker goes, others when they come back."""

import queue

import pytest
from tests.helpers.talk import FLEET, AgentTalk, Coordinating, run_settings

from fleetune.coordinator.queries import queries
from fleetune.coordinator.serving.bundle_server import BundleMade
from fleetune.coordinator.serving.finish_announcement import FinishAnnouncement
from fleetune.coordinator.serving.requested_files import NO_TRAINER_S
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import Connected, Received
from fleetune.protocols.wire.transport.memory import MemoryBroker

FINISH = wire.Finish("f-1", "all rounds are done")


class Events:
    """What arrives, each a second after the one before; `now` is the clock."""

    def __init__(self, *events):
        self.now, self._events = 0.0, list(events)

    def get(self, timeout):
        if not self._events:
            self.now += timeout
            raise queue.Empty
        self.now += 1.0
        return self._events.pop(0)


def on(device, channel):
    return topics.topic(FLEET, device, channel)


def left(device, run="f-1"):
    return Received(on(device, "up"), wire.encode(wire.Left(run)))


def there(device, online=True):
    return Received(on(device, "state"), wire.encode(wire.Presence(online, "x")))


class Wire:
    """A transport that keeps what it is given: device, and whether the broker keeps it."""

    def __init__(self):
        self.said = []

    def publish(self, topic, data, *, retain=False, qos=0):
        assert wire.read_to_device(data) == FINISH
        self.said.append((topics.parse(topic).device, retain))


def ended(*events, waiting=(), absent=(), until=10.0):
    line, clock = Wire(), Events(*events)
    FinishAnnouncement(line, FLEET, FINISH, set(waiting), absent).say(clock, until, lambda: clock.now)
    return line.said, clock.now


def test_it_ends_as_soon_as_all_know():
    assert ended(left("a"), left("b"), waiting="ab", until=1e9)[1] == 2.0
    assert ended(until=1e9) == ([], 0.0)


def test_devices_that_do_not_answer_find_it_later_and_the_wait_is_bounded():
    said, now = ended(left("a"), left("b", "another"), waiting="ab", absent="c")
    assert now == 10.0
    assert sorted(said[2:]) == [("b", True), ("c", True)]


def test_a_device_that_connects_meanwhile_is_told_and_waited_for():
    said, now = ended(there("b"), left("a"), left("b"), waiting="a", absent="b", until=1e9)
    assert said == [("a", False), ("b", False)]
    assert now == 3.0


def test_a_device_that_goes_without_an_answer_is_not_waited_for():
    said, now = ended(there("a", online=False), waiting="a", until=1e9)
    assert (said, now) == ([("a", False), ("a", True)], 1.0)


def test_a_broker_that_was_away_hears_it_again():
    said, _ = ended(Connected(), left("a"), waiting="a", until=1e9)
    assert said == [("a", False), ("a", False)]


@pytest.fixture
def talk(tmp_path):
    made = Coordinating.of(tmp_path / "run", run_settings())
    yield made
    made.close()


def test_devices_that_are_connected_without_taking_part_are_told_too(talk):
    talk.greet("a", num_samples=10)
    talk.hear("late", wire.Presence(True, "y"), "state")
    assert talk.server.parts.joining.present == {"a", "late"}
    talk.hear("a", wire.Presence(False, "x"), "state")
    assert talk.server.parts.joining.present == {"late"}
    assert talk.server.parts.joining.absent == {"a"}


@pytest.mark.parametrize("run", ["earlier", "this"])
def test_what_the_broker_kept_is_removed_when_its_device_has_read_it(talk, run):
    talk.greet("a", num_samples=10)
    talk.take("a")
    talk.hear("a", wire.Left(talk.id if run == "this" else run))
    assert talk.take("a")[0] == (on("a", "down"), b"")


def test_an_agent_reads_a_kept_message_when_it_comes_and_its_removal_says_nothing(tmp_path, caplog):
    broker, talk = MemoryBroker(), AgentTalk(tmp_path)
    try:
        broker.route(on("a", "down"), wire.encode(FINISH), retain=True)
        line = broker.client(topics.device_subscriptions(FLEET, "a"), talk.agent.events)
        line.connect()
        broker.route(on("a", "down"), b"", retain=True)
        while not talk.agent.events.empty():
            talk.agent._handle(talk.agent.events.get())
        assert wire.read_from_device(talk.said[-1][1]) == wire.Left("f-1")
        assert not caplog.records
    finally:
        talk.close()


LACKING = BundleMade(None, "model 'net' cannot be exported: block uses aten.sort")


def declined(talk, *devices):
    for device in devices:
        talk.greet(device, num_samples=10)
        talk.hear(device, wire.Decline(talk.id, 0, 0, "no bundle"))


def look(talk, at):
    talk.server.parts.look(at)


def test_a_run_that_no_device_can_train_ends_after_a_while(talk, caplog):
    talk.server.parts.messages.handle(LACKING)
    declined(talk, "a", "b")
    look(talk, 1.0)
    look(talk, NO_TRAINER_S)
    assert talk.server.finished is None
    look(talk, 1.0 + NO_TRAINER_S)
    wanted = f"devices without torch cannot take part, no bundle can be made: {LACKING.problem}"
    assert talk.server.finished == f"no device can train: {wanted}"
    assert caplog.messages[0] == wanted
    assert queries.status(talk.run.folder).troubles == (wanted,)


@pytest.mark.parametrize("other", ["trains", "joins"])
def test_a_run_that_one_device_can_train_goes_on_without_a_bundle(talk, other):
    talk.server.parts.messages.handle(LACKING)
    declined(talk, "a")
    look(talk, 1.0)
    if other == "trains":
        talk.greet("b", num_samples=10)
    else:
        talk.hear("b", wire.Presence(True, "y"), "state")
    look(talk, 1e6)
    look(talk, 2e6)
    assert talk.server.finished is None
