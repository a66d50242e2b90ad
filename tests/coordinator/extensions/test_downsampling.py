"""What an open run lets go of: how much stays, what is written before, and sums, which stay those of all."""

import gc
import tracemalloc
from contextlib import closing, nullcontext
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace
from tests.conftest import PullToTarget
from tests.helpers.played_run import SPEC, enrolment, settings

from fleetune.coordinator.extensions import downsampling
from fleetune.coordinator.extensions.downsampling import Downsampling, stride
from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import DeviceReady, Tick
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.round_journal import ROUNDS, RoundJournal
from fleetune.coordinator.run.run_events import RoundClosed
from fleetune.coordinator.store.run_folder import PAST
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.session import Session
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.schedule import ScheduleSection
from fleetune.protocols.wire.payloads import Measures

WHOLE = 20


def record(number):
    actual = RoundCost(train_s=0.5, upload_s=0.25, joules=2.0)
    reply = DeviceRound(1.0, 10, 20, Measures(5, 5), actual)
    return RoundRecord(
        number, 1, False, 60.0 * number, 60.0 * number + 1, ("a", "b"), {"a": reply, "b": reply}
    )


@pytest.fixture
def store(tmp_path):
    with closing(RunStore.open(tmp_path / "state.sqlite", durable=False)) as made:
        yield made


def close_rounds(store, first, last, ledger, *, crash=False):
    """Close these rounds as a run does; with `crash` the last step is not committed."""
    thin = Downsampling(store, store.path.parent, WHOLE)
    for number in range(first, last + 1):
        one, crashes = record(number), crash and number == last
        with pytest.raises(ZeroDivisionError) if crashes else nullcontext(), store.step():
            store.put_device_rounds(number, 1, one.devices)
            store.add_record(one)
            thin.closed(one, ledger)
            assert 1 / (not crashes)


def numbers(data):
    return [msgspec.json.decode(line)["number"] for line in data.splitlines()]


def test_the_newest_stay_whole_of_the_others_an_even_choice_and_the_file_has_all(store):
    ledger, most = Ledger(), 0
    for last in range(50, 601, 50):
        close_rounds(store, last - 49, last, ledger)
        found = [one.number for one in store.records()]
        assert found[-WHOLE:] == list(range(last - WHOLE + 1, last + 1))
        most = max(most, len(found))
        gaps = {after - before for before, after in pairwise(found[:-WHOLE])}
        assert len(gaps) <= 1, "evenly spaced"
    assert most <= 2 * WHOLE + 2
    assert all(one.devices.keys() == {"a", "b"} for one in store.records())
    assert numbers((store.path.parent / PAST).read_bytes()) == list(range(1, 600 - WHOLE + 1))
    assert ledger.past.rounds == 600 - len(store.records())
    assert ledger.past.joules == pytest.approx(4.0 * ledger.past.rounds)
    assert ledger.past.train_s == pytest.approx(1.0 * ledger.past.rounds)
    assert ledger.past.download_s is None, "nobody told it"


def test_a_crash_between_file_and_store_writes_no_line_twice(store):
    ledger = Ledger()
    close_rounds(store, 1, 60, ledger)
    close_rounds(store, 61, 100, ledger, crash=True)
    held = [one.number for one in store.records()]
    assert held[-1] == 99
    close_rounds(store, 100, 140, ledger)
    assert numbers((store.path.parent / PAST).read_bytes()) == list(range(1, 121))


def test_the_file_is_turned_over_when_it_is_long(store, monkeypatch):
    monkeypatch.setattr(downsampling, "MOST_BYTES", 20_000)
    close_rounds(store, 1, 500, Ledger())
    folder = store.path.parent
    older, newer = (numbers((folder / name).read_bytes()) for name in (f"{PAST}.1", PAST))
    assert [*older, *newer] == list(range(older[0], 481)), "no gap between the two"
    assert all((folder / name).stat().st_size <= 20_000 for name in (f"{PAST}.1", PAST))


def test_a_full_disk_keeps_what_it_cannot_write_and_the_run_goes_on(store, caplog):
    (store.path.parent / PAST).mkdir()
    close_rounds(store, 1, 100, Ledger())
    assert len(store.records()) == 100
    assert "old rounds stay" in caplog.text
    (store.path.parent / PAST).rmdir()
    close_rounds(store, 101, 102, Ledger())
    assert len(store.records()) <= 2 * WHOLE + 2


def test_a_fleet_of_thousands_keeps_fewer_rounds(store):
    many = msgspec.structs.replace(
        record(100), devices={f"d{n}": record(1).devices["a"] for n in range(5000)}
    )
    for number in range(1, 100):
        store.add_record(record(number))
    with store.step():
        store.add_record(many)
        Downsampling(store, store.path.parent).closed(many, Ledger())
    assert len(store.records()) <= 2 * downsampling.LEAST_WHOLE


def test_rounds_jsonl_is_what_the_store_holds_and_no_longer(store):
    ledger = Ledger()
    close_rounds(store, 1, 5, ledger)
    journal = RoundJournal(store.path.parent, store.records, most_lines=30)
    for number in range(6, 400):
        close_rounds(store, number, number, ledger)
        journal.observe(RoundClosed(record(number)))
        found = numbers((store.path.parent / ROUNDS).read_bytes())
        assert found[-1] == number
        assert len(found) <= 2 * WHOLE + 2 + 30
        assert found == sorted(set(found))


def test_a_stride_leaves_at_most_so_many():
    for last in range(1, 5000, 7):
        step = stride(last, 100)
        assert last // step <= 100
        assert step == 1 or last // (step // 2) > 100


class Remembered:
    """Where a session keeps its state: in memory."""

    data, plain = None, False

    def read(self):
        return self.data

    def write(self, data):
        self.data = data


class OneDevice:
    """An open run in `folder` with a device that replies at once, a minute after the last round."""

    def __init__(self, folder):
        asked = settings("fedavg", "synchronous")
        asked = replace(
            asked,
            run=replace(asked.run, rounds="open"),
            round=RoundSection(),
            schedule=ScheduleSection(every="1m"),
        )
        self.run = open_run(asked, folder, durable=False, beginning=Beginning(enrolment(asked)))
        trainer = PullToTarget(SPEC, "a")
        self.session = Session(self.run.enrolment, "a", self.run.method, trainer, Remembered())
        self.now = 0.0
        self.take(self.run.controller.handle(DeviceReady(DeviceReport("a", num_samples=10)), self.now))

    def take(self, outcomes):
        for one in outcomes:
            if isinstance(one, OutgoingTask):
                task, turn = one.make(), RoundAttempt.of(one.transfer_key)
                self.run.controller.note_delivered("a", one.transfer_key, len(task))
                reply = self.session.reply(task, Budget())
                cost = RoundCost(train_s=1.0)
                self.take(self.run.controller.receive("a", turn, reply, cost, self.now))

    def play(self, rounds):
        """Until so many are closed; the bytes that Python holds then, and those of the store."""
        while self.run.controller.engine_state.rounds_done < rounds:
            self.now += 60.0
            self.take(self.run.controller.handle(Tick(), self.now))
        gc.collect()
        return tracemalloc.get_traced_memory()[0], self.run.store.path.stat().st_size


@pytest.mark.nightly
def test_hundreds_of_rounds_leave_memory_store_and_summary_as_large_as_they_are(tmp_path, monkeypatch):
    """10,000 were measured by hand, see docs/open-runs.md.

    Python's free lists take 40 kB over the first 300 rounds, and no more afterwards (3,000 were looked at).
    """
    monkeypatch.setattr(downsampling, "MOST_WHOLE", WHOLE)
    tracemalloc.start()
    try:
        one = OneDevice(tmp_path / "run")
        (held, stored), (held_later, stored_later) = one.play(300), one.play(450)
    finally:
        tracemalloc.stop()
    with closing(one.run.store):
        summary, kept = summary_of(one.run, simulated=True), one.run.controller.records()
    assert held_later - held < 30_000
    assert stored_later <= stored + 50_000
    assert len(kept) <= 2 * WHOLE + 2
    assert (summary.rounds, summary.downsampled) == (450, 450 - len(kept))
    assert summary.seconds.train == pytest.approx(450.0), "sums are those of all rounds"
    assert summary.bytes.up_dense == 450 * 4 * SPEC.num_parameters
    past = numbers((tmp_path / "run" / PAST).read_bytes())
    assert past == list(range(1, past[-1] + 1))
    assert {*past, *(record.number for record in kept)} == set(range(1, 451))
