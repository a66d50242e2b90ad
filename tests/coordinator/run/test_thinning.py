"""What an open run lets go of: how much stays, what is written before, and sums, which stay those of all."""

from contextlib import closing, nullcontext
from itertools import pairwise

import msgspec
import pytest

from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.run import thinning
from fleetune.coordinator.run.round_journal import ROUNDS, RoundJournal
from fleetune.coordinator.run.run_events import RoundClosed
from fleetune.coordinator.run.thinning import Thinning, stride
from fleetune.coordinator.store.run_folder import PAST
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.round_cost import RoundCost
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
    thin = Thinning(store, store.path.parent, WHOLE)
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
    for last in range(100, 2001, 100):
        close_rounds(store, last - 99, last, ledger)
        found = [one.number for one in store.records()]
        assert found[-WHOLE:] == list(range(last - WHOLE + 1, last + 1))
        most = max(most, len(found))
        gaps = {after - before for before, after in pairwise(found[:-WHOLE])}
        assert len(gaps) <= 1, "evenly spaced"
    assert most <= 2 * WHOLE + 2
    assert all(one.devices.keys() == {"a", "b"} for one in store.records())
    assert numbers((store.path.parent / PAST).read_bytes()) == list(range(1, 2000 - WHOLE + 1))
    assert ledger.past.rounds == 2000 - len(store.records())
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
    monkeypatch.setattr(thinning, "MOST_BYTES", 20_000)
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
        Thinning(store, store.path.parent).closed(many, Ledger())
    assert len(store.records()) <= 2 * thinning.LEAST_WHOLE


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
