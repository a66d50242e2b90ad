"""Devices that may no longer connect are disconnected repeatedly, until they are gone; and other bounds."""

from fleetune.coordinator.broker.broker_log import PROBE_BURST_BYTES, Flooding, LogParser
from fleetune.coordinator.broker.fleet_listeners import OTHER_FILES, max_connections
from fleetune.coordinator.broker.takeovers import REPEAT_FOR_S, SAY_AFTER_S, Takeovers


class Broker:
    """A broker that may be too busy; `asked` has the time and client id of each attempt."""

    def __init__(self):
        self.now, self.busy, self.asked = 0.0, True, []
        self.takeovers = Takeovers(self.take_over, lambda: self.now)

    def take_over(self, client_id):
        self.asked.append((self.now, client_id))
        return not self.busy

    def work_until(self, now):
        while self.now < now:
            self.takeovers.work()
            self.now += 0.5


def test_an_attempt_that_fails_is_repeated_and_the_device_is_not_gone(caplog):
    broker = Broker()
    broker.takeovers.add(["a"])
    broker.work_until(SAY_AFTER_S + 5)
    assert not broker.takeovers.is_gone("a")
    assert [one.message for one in caplog.records] == [
        "a may no longer connect, but the broker has not disconnected it yet; trying again"
    ]
    broker.busy = False
    broker.work_until(broker.now + 0.5)
    assert broker.takeovers.is_gone("a")


def test_a_device_that_was_connecting_is_disconnected_later():
    broker = Broker()
    broker.busy = False
    broker.takeovers.add(["a", "b"])
    broker.takeovers.drop(["b"])
    broker.work_until(3 * REPEAT_FOR_S)
    times = [now for now, client_id in broker.asked if client_id == "a"]
    assert {client_id for _, client_id in broker.asked} == {"a"}
    assert times[:3] == [0.0, 1.0, 3.0]
    assert REPEAT_FOR_S < times[-1] < REPEAT_FOR_S + 20


def test_the_coordinator_has_room_whatever_the_limit_of_open_files():
    assert max_connections(16_384) == max_connections(0) == (4000, 1000)
    assert sum(max_connections(1024)) <= 1024 - OTHER_FILES
    assert min(max_connections(10)) == 1


def test_a_device_that_sends_itself_much_is_found_in_the_log():
    parser = LogParser("f", (), clock=lambda: 0.0)
    line = "1: Received PUBLISH from a~probe (d0, q0, r0, m0, 'fleetune/v1/f/a~probe/probe', ... (%d bytes))"
    assert parser.read((line % PROBE_BURST_BYTES).encode()) is None
    assert parser.read((line % 1000).encode()) == Flooding("a~probe")
