"""A run's clock: clocks that are set, boards that start in 1970, and the time between two coordinators."""

from contextlib import closing

import pytest
from tests.fleet.test_semi_asynchronous import Desk, settings

from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.rounds.events import DeviceReady
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_clock import RunClock
from fleetune.protocols.method.choice import DeviceReport


class Clocks:
    """The board's two clocks."""

    def __init__(self, wall=1_000_000.0, steady=50.0):
        self.wall, self.steady = wall, steady

    def pass_by(self, seconds, jump=0.0):
        self.wall, self.steady = self.wall + seconds + jump, self.steady + seconds

    def clock(self, latest=None):
        return RunClock(latest, wall=lambda: self.wall, steady=lambda: self.steady)


@pytest.mark.parametrize("jump", [-1e6, -3600.0, 0.0, 3600.0, 1e9])
def test_a_clock_that_is_set_takes_no_time(jump):
    clocks = Clocks()
    clock = clocks.clock()
    assert clock() == 1_000_000
    clocks.pass_by(7, jump)
    assert clock() == 1_000_007


def test_it_goes_on_between_two_coordinators_and_never_back():
    clocks = Clocks()
    latest = clocks.clock()()
    clocks.pass_by(60)
    assert clocks.clock(latest)() == 1_000_060
    rebooted = Clocks(wall=0.0, steady=1.0)  # a board without a battery for its clock
    clock = rebooted.clock(latest)
    assert clock() == 1_000_000
    rebooted.pass_by(2, jump=1_700_000_000)  # it hears the time
    assert clock() == 1_000_002


class Rebooting(Desk):
    """Killed before every event, on a board that believes it is ever earlier."""

    def be_killed(self):
        self.run.store.close()
        self.run = open_run(self.settings, self.folder, durable=False)
        wall = self.now - 10.0
        self.now = RunClock.of(self.run.store, wall=lambda: wall, steady=lambda: 3.0)()
        self.take(self.run.controller.resume(self.now))
        for device in self.DEVICES:
            self.take(self.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), self.now))


def test_no_round_of_a_run_takes_less_than_no_time(tmp_path):
    desk = Rebooting(tmp_path, settings(start_with=4, deadline_s=1000.0), restart=True).play()
    with closing(desk.run.store):
        records, summary = desk.run.controller.records(), summary_of(desk.run, simulated=False)
    times = [at for record in records for at in (record.opened_s, record.closed_s)]
    assert len(times) > 4
    assert times == sorted(times)
    assert summary.seconds.wall >= times[-1] >= 0
