"""Watching what does not come over the network: requests in the control file, and clocks that were set."""

from types import SimpleNamespace

import pytest

from fleetune.coordinator.commands.commands import Forget, Pause, Resume, apply
from fleetune.coordinator.commands.commands import Stop as StopCommand
from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.events import ClockSet, Paused
from fleetune.coordinator.serving.control_watch import LOOK_EVERY_S, ControlWatch
from fleetune.coordinator.serving.event_queue import Reopen, Stop
from fleetune.coordinator.store.run_folder import CONTROL
from fleetune.protocols.errors import StoreError
from fleetune.protocols.settings.schedule import ScheduleSection


class Looks:
    """An owner of a run in `folder`, asked twice a second; the run takes to heart what it is told."""

    def __init__(self, folder):
        self.state, self.ahead_s, self.now = EngineState(), 0.0, 0.0
        run = SimpleNamespace(
            folder=folder,
            settings=SimpleNamespace(schedule=ScheduleSection(window="02:00-05:00")),
            controller=SimpleNamespace(engine_state=self.state),
        )
        self.owner = ControlWatch(run, lambda: self.ahead_s)

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
    apply(Pause(), tmp_path)
    assert looks.told() == [Paused(True)]
    assert looks.told() == []
    apply(Resume(), tmp_path)
    assert looks.told() == [Paused(False)]
    apply(StopCommand(), tmp_path)
    assert looks.told() == [Stop()]


def test_an_order_from_before_a_restart_stands(looks, tmp_path):
    apply(Pause(), tmp_path)
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
    apply(Pause(), tmp_path)
    looks.told()
    (tmp_path / CONTROL).write_bytes(data)
    assert looks.told() == []
    assert looks.told() == []
    assert caplog.text.count("is damaged") == 1
    with pytest.raises(StoreError, match="delete it to clear pending requests to pause"):
        read_control(tmp_path)


def test_a_request_to_forget_reopens_the_run_unless_it_failed_before(looks, tmp_path):
    apply(Forget("pi"), tmp_path)
    assert looks.told() == [Reopen()]
    looks.owner = ControlWatch(looks.owner._run, lambda: 0.0, frozenset({"pi"}))
    assert looks.told() == []
    apply(Forget("other"), tmp_path)
    assert looks.told() == [Reopen()]
    apply(StopCommand(), tmp_path)
    assert looks.told() == [Stop()], "the removal is for the next start"
