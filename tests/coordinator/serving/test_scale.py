"""What an event costs in a small and in a large fleet: counts of what is written and touched, never times."""

import pytest
from tests.fleet.test_semi_asynchronous import Desk, settings

from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady
from fleetune.coordinator.run.run_events import RoundClosed
from fleetune.coordinator.store.device_rows import read_engine, read_ledger
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost


class Crowd(Desk):
    """A `Desk` of many devices, all of them asked, with none of its events played yet."""

    def __init__(self, folder, size, **round_):
        self.DEVICES = tuple(f"d{index:03}" for index in range(size))
        super().__init__(folder, settings(rounds=1, start_with=size, **round_), restart=False)
        for device in self.DEVICES:
            self.take(self.run.controller.handle(DeviceReady(DeviceReport(device, num_samples=10)), self.now))

    def written(self, act):
        """Rows that the store was given while `act`, and 100s of bytes of what is written at every event."""
        rows = rows_of(self.run.store, act)
        return rows, sum(len(self.run.store.get(name)) for name in ("engine", "ledger")) // 100


def rows_of(store, act):
    before = store._connection.total_changes
    act()
    return store._connection.total_changes - before


@pytest.mark.parametrize("mode", [{}, {"mode": "window", "window_s": 100.0, "participants": 20}])
def test_an_event_writes_the_same_in_a_small_and_a_large_fleet(tmp_path, mode):
    written = {}
    for size in (50, 500):
        desk = Crowd(tmp_path / str(size), size, **mode)
        controller = desk.run.controller
        first, second, third = sorted(desk.tasks)[:3]
        data = desk.reply(first, desk.tasks[first])
        turn = controller.engine_state.round_attempt
        events = [
            lambda k=desk, d=first, p=data: k.receive(d, p, 1.0),
            lambda k=desk, d=first, p=data: k.receive(d, p, 1.0),
            lambda c=controller, d=first, t=turn: c.note_measured(d, t, RoundCost(upload_s=2.0)),
            lambda c=controller, d=second, t=turn: c.handle(Declined(d, *t, "busy"), 1.0),
            lambda c=controller, d=third: c.handle(DeviceGone(d), 1.0),
            lambda c=controller: c.handle(DeviceReady(DeviceReport("new")), 1.0),
        ]
        written[size] = [desk.written(event) for event in events]
        desk.run.store.close()
    assert written[50] == written[500]
    assert max(rows for rows, _ in written[50]) <= 10


def test_what_is_told_after_the_round_changes_one_row_of_its_record(tmp_path):
    desk = Crowd(tmp_path, 8)
    first, turn = desk.DEVICES[0], desk.run.controller.engine_state.round_attempt
    for device in desk.DEVICES:
        desk.take(desk.receive(device, desk.reply(device, desk.tasks[device]), 1.0))
    (before,) = desk.closed
    rows, _ = desk.written(lambda: desk.run.controller.note_measured(first, turn, RoundCost(upload_s=2.0)))
    assert rows == 1
    (record,) = desk.run.controller.records()
    assert record.devices.pop(first).actual.upload_s == 2.0
    assert before.devices.pop(first).actual.upload_s is None
    assert record == before
    desk.run.controller.note_measured(first, (1, 2), RoundCost(upload_s=3.0))
    assert desk.run.controller.records()[0].devices[first].actual.upload_s == 2.0
    desk.run.store.close()


def test_a_simulation_is_written_down_when_a_round_closes(tmp_path):
    """Nobody goes on with one, and what was aggregated can be looked at."""
    desk = Desk(tmp_path, settings(rounds=2, start_with=4), restart=False, in_process=True)
    store, controller = desk.run.store, desk.run.controller
    for device in desk.DEVICES:
        ready = DeviceReady(DeviceReport(device, num_samples=10))
        assert rows_of(store, lambda ready=ready: desk.take(controller.handle(ready, 0.0))) == 0
    payload = [desk.reply(device, desk.tasks[device]) for device in desk.DEVICES]
    for device, data in zip(desk.DEVICES[:-1], payload, strict=False):
        take = lambda d=device, p=data: desk.take(desk.receive(d, p, 1.0))  # noqa: E731
        assert rows_of(store, take) == 0, "the reply itself stays at hand"
    outcomes = desk.receive(desk.DEVICES[-1], payload[-1], 1.0)
    assert [RoundClosed(record) for record in controller.records()] == outcomes[:1]
    assert read_engine(store) == controller.engine_state
    assert read_ledger(store) == controller.ledger
    store.close()
