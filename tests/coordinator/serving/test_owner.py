"""What a run is told that does not come over the network: orders in a file, and clocks that were set."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.events import ClockSet, Paused
from fleetune.coordinator.serving.event_queue import Stop
from fleetune.coordinator.serving.owner import LOOK_EVERY_S, Owner, order, take_up
from fleetune.coordinator.store.orders import ORDERS, Orders, read_orders, write_orders
from fleetune.protocols.errors import StoreError
from fleetune.protocols.settings.schedule import ScheduleSection


class Looks:
    """An owner of a run in `folder`, asked twice a second; the run takes to heart what it is told."""

    def __init__(self, folder):
        self.state, self.ahead_s, self.now = EngineState(), 0.0, 0.0
        run = SimpleNamespace(
            folder=folder,
            settings=SimpleNamespace(schedule=ScheduleSection(at="02:00")),
            controller=SimpleNamespace(engine_state=self.state),
        )
        self.owner = Owner(run, lambda: self.ahead_s)

    def told(self):
        self.now += LOOK_EVERY_S
        events = self.owner.look(self.now)
        for event in events:
            match event:
                case ClockSet(ahead_s):
                    self.state.change(ahead_s=ahead_s)
                case Paused(paused):
                    self.state.change(paused=paused)
        return events


@pytest.fixture
def looks(tmp_path):
    return Looks(tmp_path)


def test_without_orders_and_with_a_steady_clock_nothing_is_told(looks):
    looks.ahead_s = 0.9  # a clock that is off by less was not set
    assert looks.told() == []
    assert looks.owner.look(looks.now + 0.1) == [], "not before half a second"


def test_orders_are_told_once_each(looks, tmp_path):
    order(tmp_path, paused=True)
    assert looks.told() == [Paused(True)]
    assert looks.told() == []
    order(tmp_path, paused=False)
    assert looks.told() == [Paused(False)]
    order(tmp_path, stopped=True)
    assert looks.told() == [Stop()]


def test_an_order_from_before_a_restart_stands(looks, tmp_path):
    order(tmp_path, paused=True)
    looks.told()
    again = Looks(tmp_path)
    assert again.told() == [Paused(True)]


def test_a_run_that_was_paused_before_and_resumed_meanwhile_goes_on(looks):
    looks.state.change(paused=True)
    assert looks.told() == [Paused(False)]


def test_a_clock_that_is_set_is_told_and_said(looks, caplog):
    looks.ahead_s = 3600.0
    assert looks.told() == [ClockSet(3600.0)]
    assert "the time of day moved by +3600 s" in caplog.text
    assert looks.told() == []
    looks.ahead_s = -86_400.0
    assert looks.told() == [ClockSet(-86_400.0)]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"paused": "yes"}', b"\xff"])
def test_a_damaged_order_is_a_line_and_what_was_ordered_before_stands(looks, tmp_path, data, caplog):
    order(tmp_path, paused=True)
    looks.told()
    (tmp_path / ORDERS).write_bytes(data)
    assert looks.told() == []
    assert looks.told() == []
    assert caplog.text.count("is damaged") == 1
    with pytest.raises(StoreError, match="remove it, then no order stands"):
        read_orders(tmp_path)


def test_whoever_serves_a_run_withdraws_the_order_to_stop_it_and_no_other(tmp_path):
    write_orders(tmp_path, Orders(paused=True, stopped=True))
    take_up(tmp_path)
    assert read_orders(tmp_path) == replace(Orders(), paused=True)


def test_what_follows_from_an_order_is_said(tmp_path):
    assert order(tmp_path, paused=True).endswith(
        "no new round opens until it is resumed; no coordinator is at it"
    )
    assert order(tmp_path, paused=False).endswith("rounds open when they are due; no coordinator is at it")
    assert order(tmp_path, stopped=True).endswith(": stopped")
