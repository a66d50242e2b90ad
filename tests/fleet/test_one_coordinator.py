"""A fleet has one coordinator: the second is refused by name, before it writes anything."""

import re
import signal

import pytest
from tests.helpers.fleet_processes import Fleet, run_toml
from tests.protocols.wire.test_transport import KINDS

from fleetune.coordinator.serving.coordinator_conflict import ConflictDetector, CoordinatorPresence
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.messages import MAX_CONTROL_BYTES, encode
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.memory import MemoryBroker

TOPIC = topics.coordinators("f")
WORDS = (
    r"fleet f already has a coordinator: run {} \(since [-0-9]+ [:0-9]+\) at \S+, process \d+; stop it, or"
)


@pytest.fixture
def broker():
    return MemoryBroker()


@pytest.fixture
def begin(broker):
    """A coordinator that asks; its transport, to be dropped and connected again, as `line`."""

    def made(run, since, *, silence_s=0.0):
        lookout = ConflictDetector("f", run, since, silence_s, timer=lambda: 0.0)

        def make_transport(events):
            lookout.line = broker.client([TOPIC], events)
            return lookout.line

        lookout.ask(make_transport)
        return lookout

    return made


def test_the_second_hears_of_the_first_and_the_first_goes_on(begin):
    first = begin("one", 100.0)
    first.wait()
    second = begin("two", 50.0)  # also if its clock is behind
    with pytest.raises(SettingError, match=WORDS.format("one")):
        second.wait()
    first.check()


def test_on_a_broker_of_its_own_the_first_serves_without_asking(begin, broker):
    first = ConflictDetector("f", "one", 100.0, timer=lambda: 0.0)
    first.take(lambda events: broker.client([TOPIC], events))
    with pytest.raises(SettingError, match=WORDS.format("one")):
        begin("two", 50.0, silence_s=1.0).wait()
    first.check()
    first.close()
    begin("two", 150.0).wait()


def test_whoever_is_silent_is_in_nobodys_way(begin, broker):
    first = begin("one", 1.0)
    broker.route(TOPIC, encode(first._here), retain=True)  # stale
    first.line.drop()
    begin("one", 2.0).wait()


@pytest.mark.parametrize("times", [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_of_two_that_start_at_once_one_stays(begin, times):
    both = [begin("one", times[0], silence_s=1.0), begin("two", times[1], silence_s=1.0)]
    refused = [lookout for lookout in both if lookout._rival]
    assert len(refused) == 1
    if times[0] != times[1]:
        assert refused[0].since == 2.0
    with pytest.raises(SettingError, match="already has a coordinator"):
        refused[0].wait()


def test_one_that_was_cut_off_and_comes_back_settles_it_with_the_other(begin):
    first = begin("one", 1.0)
    first.line.drop()
    second, told = begin("two", 2.0), []
    second.wait()
    second.on_rival(lambda: told.append("second"))
    first.on_rival(lambda: told.append("first"))
    first.line.connect()
    assert told == ["second"]
    with pytest.raises(SettingError, match=WORDS.format("one")):
        second.check()
    second.on_rival(lambda: told.append("late"))
    assert told == ["second", "late"]


def test_while_the_broker_is_out_of_reach_nothing_is_known(begin):
    lookout = begin("one", 1.0, silence_s=1.0)
    lookout.line.drop()
    lookout.wait()
    assert not lookout._serving


def test_what_is_no_coordinators_word_stops_nobody(begin, broker):
    lookout = begin("one", 100.0)
    good = encode(CoordinatorPresence("n", "two", "h", 1, 1.0, True))
    for bad in (
        b"",
        b"null",
        b"[" * 10_000,
        good.replace(b'"two"', b'"../two"'),
        good.replace(b"1.0", b"1e300"),
        good.replace(b"Here", b"Left"),
        good + b" " * MAX_CONTROL_BYTES,
        b"\xff" + good,
    ):
        assert bad != good
        broker.route(TOPIC, bad, retain=False)
        lookout.check()
    lookout.put(Received(TOPIC, good, retained=True))
    lookout.check()
    broker.route(TOPIC, good, retain=False)
    with pytest.raises(SettingError):
        lookout.check()


def test_a_device_has_no_such_name_and_its_words_are_no_devices():
    with pytest.raises(SettingError):
        topics.check_name(TOPIC.split("/")[3], "device")


@pytest.fixture(params=KINDS)
def fleet(request, tmp_path):
    with Fleet(tmp_path, run_toml(name="f"), which=request.param) as made:
        yield made


def start_another(fleet):
    other = fleet.folder / "other.toml"
    other.write_text(run_toml(name="other"))
    command = [
        "fleetune.coordinator.cli",
        "serve",
        str(other),
        "--runs",
        str(fleet.folder / "runs"),
        "--fleet",
        "f",
    ]
    return fleet._start("other", [*command, "--broker", fleet.address(fleet.broker.port)])


def test_the_second_process_is_refused_and_the_first_can_be_killed_and_go_on(fleet):
    first = fleet.start_coordinator()
    first.wait_for("run f-.* begins")
    other = start_another(fleet)
    assert other.wait() == 2
    (line,) = other.text().splitlines()
    assert re.match("edge-coordinator: " + WORDS.format("f"), line)
    assert [path.name for path in (fleet.folder / "runs").iterdir()] == ["f"]
    first.kill()
    again = fleet.start_coordinator()
    again.wait_for("run f-.* goes on")
    assert again.stop() == 0
    assert not first.lines("another client") + again.lines("already has|another client")


def test_one_that_hung_and_wakes_up_stops_whoever_took_its_place(tmp_path):
    with Fleet(tmp_path, run_toml(name="f")) as fleet:
        first = fleet.start_coordinator()
        first.wait_for("run f-.* begins")
        first.send(signal.SIGSTOP)
        other = start_another(fleet)
        other.wait_for("run other-.* begins")
        first.send(signal.SIGCONT)
        assert other.wait() == 2
        assert len(other.lines(WORDS.format("f"))) == 1
        assert first.running
        assert first.stop() == 0
