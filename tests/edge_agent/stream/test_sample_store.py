"""The store of samples: bounds, labels that come later, snapshots, and that nobody changes sides."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.intakes.library_call import Intake
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import make_label, make_sample
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.store_schema import FORMAT, LOG_BYTES
from fleetune.edge_agent.stream.store_values import TrainingRound
from fleetune.protocols.errors import StoreError, StoreVersion

REQUIREMENTS = SampleRequirements(
    lambda _, shape: shape == (4,), accepts=lambda y: y < 3, test_fraction=0.3, validation_fraction=0.2
)
MB = 1_000_000


def inputs(count, seed=0, shape=(4,)):
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


def samples(count, seed=0, label=lambda index: index % 3, shape=(4,)):
    return [
        make_sample(x, label(index), f"{seed}-{index}") for index, x in enumerate(inputs(count, seed, shape))
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "samples.sqlite"


@pytest.fixture
def store(path):
    found = SampleStore.open(path)
    yield found
    found.close()


def read(store, wanted=REQUIREMENTS, change=None):
    parts, _ = snapshot.read(store, wanted, store.change if change is None else change)
    return {part: [(tuple(one.tolist()), int(label)) for one, label in zip(*arrays, strict=True)]
            for part, arrays in parts.items()}  # fmt: skip


def counts(store, wanted=REQUIREMENTS, change=None):
    return snapshot.read(store, wanted, store.change if change is None else change)[1]


def test_what_is_added_is_read_back_after_a_restart_in_its_order(path):
    store = SampleStore.open(path)
    given_x = inputs(50)
    assert store.add(samples(50)) == ["stored"] * 50
    assert store.add(samples(50)) == ["known"] * 50
    before = read(store)
    store.close()
    store = SampleStore.open(path)
    assert read(store) == before
    found = {x: y for part in before.values() for x, y in part}
    assert found == {tuple(x.tolist()): index % 3 for index, x in enumerate(given_x)}
    parts, counted = snapshot.read(store, REQUIREMENTS, store.change)
    order = [tuple(x.tolist()) for x in given_x]
    for x, y in parts.values():
        assert x.dtype == np.float32
        assert y.dtype == np.int64
        places = [order.index(tuple(one.tolist())) for one in x]
        assert places == sorted(places)
    assert (sum(counted.parts.values()), counted.unlabelled, counted.unfit) == (50, 0, 0)
    assert counted.new == counted.parts["train"]
    store.close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_sample_changes_sides_whatever_comes_goes_or_is_labelled(tmp_path_factory, data):
    store = SampleStore.open(tmp_path_factory.mktemp("store") / "s.sqlite")
    pool, sides = inputs(40), {}
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            which = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=12))
            label = data.draw(st.sampled_from([None, 0, 1, 2]))
            store.add([make_sample(pool[one], label, str(one)) for one in which])
            if data.draw(st.booleans()):
                store.label([(str(which[0]), make_label(data.draw(st.integers(0, 2))))])
            if data.draw(st.booleans()):  # all gone: what comes again is what it was
                store._connection.execute("DELETE FROM sample")
            for part, found in read_all(store):
                for x in found:
                    assert sides.setdefault(x, part) == part
    finally:
        store.close()


def count_of(store, what):
    return store._connection.execute(f"SELECT count(*) FROM {what}").fetchone()[0]


def read_all(store):
    """The inputs of each part, labelled or not."""
    parts, _ = snapshot.read(store, replace(REQUIREMENTS, labels="optional"), store.change)
    return [(part, [one.tobytes() for one in x]) for part, (x, _) in parts.items()]


def test_a_larger_fraction_takes_samples_over_and_gives_none_back(store):
    store.add(samples(200))
    small, large = (
        {x for x, _ in read(store, replace(REQUIREMENTS, test_fraction=fraction))["test"]}
        for fraction in (0.2, 0.4)
    )
    assert small < large


def refused(store):
    store.save_counts()
    return dict(store._connection.execute("SELECT kind, count FROM refusal"))


def test_labels_may_come_later_and_change(store):
    store.add([make_sample(x, None, f"s{index}") for index, x in enumerate(inputs(20))])
    assert counts(store, REQUIREMENTS).unlabelled == 20
    assert sum(len(found) for _, found in read_all(store)) == 20
    sides = {x: part for part, found in read_all(store) for x in found}
    assert store.label([(f"s{index}", make_label(1)) for index in range(20)]) == ["labelled"] * 20
    assert store.label([("s0", make_label(1)), ("s1", make_label(2)), ("nobody", make_label(0))]) == [
        "known",
        "labelled",
        "refused",
    ]
    assert refused(store) == {"unknown": 1}
    assert {x: part for part, found in read_all(store) for x in found} == sides
    counted = counts(store, REQUIREMENTS)
    assert (sum(counted.parts.values()), counted.unlabelled) == (20, 0)


def test_numbers_as_labels_and_shapes_that_do_not_fit(store):
    store.add([make_sample(x, [0.5, float(index)]) for index, x in enumerate(inputs(10))])
    store.add([make_sample(x, 1) for x in inputs(4, 1, (5,))])
    wanted = replace(REQUIREMENTS, labels="numbers", accepts=lambda y: y.size == 2)
    parts, counted = snapshot.read(store, wanted, store.change)
    assert sum(len(y) for _, y in parts.values()) == 10
    assert all(y.shape[1:] == (2,) and y.dtype == np.float32 for _, y in parts.values())
    assert counted.unfit == 4
    assert counts(store, REQUIREMENTS).unfit == 14
    assert sum(counts(store, replace(wanted, accepts=lambda _: True)).parts.values()) == 10


def test_bytes_stay_bytes_and_are_scaled_beside_floats(store):
    store.add([make_sample(np.full(4, 255, np.uint8) - index, 1) for index in range(6)])
    parts, _ = snapshot.read(
        store, replace(REQUIREMENTS, test_fraction=0.0, validation_fraction=0), store.change
    )
    assert parts["train"][0].dtype == np.uint8
    store.add([make_sample(np.full(4, 0.5, np.float32), 1)])
    parts, _ = snapshot.read(
        store, replace(REQUIREMENTS, test_fraction=0.0, validation_fraction=0), store.change
    )
    assert parts["train"][0].dtype == np.float32
    assert parts["train"][0].max() == 1.0
    assert len(parts["train"][0]) == 7


@pytest.mark.parametrize(
    ("bounds", "numbers"),
    [
        (RetentionLimits(keep_mb=1), 300),
        (RetentionLimits(keep_mb=1, keep="newest"), 3000),
        (RetentionLimits(keep_mb=1, keep_balanced=True), 1152),
        (RetentionLimits(keep_mb=1, keep="newest", keep_balanced=True, keep_unlabelled=0.1), 4),
    ],
)
def test_the_file_stays_within_the_owners_bounds(path, bounds, numbers):
    store = SampleStore.open(path, bounds)
    for seed in range(4):
        many = 3 * MB // 4 // (4 * numbers + 600)
        batch = samples(many, seed, lambda index: None if index % 4 == 0 else index % 3, (numbers,))
        store.pin(TrainingRound("r", seed, 1))
        store.add(batch)
        tally = store._connection.execute("SELECT held, sum(num_bytes) FROM tally GROUP BY held").fetchall()
        assert dict(tally).get(0, 0) <= bounds.live_bytes
        assert dict(tally).get(1, 0) <= bounds.held_bytes
    used = store._connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
    assert used.fetchone()[0] < 1.25 * bounds.keep_mb * MB
    counted = store._connection.execute(
        "SELECT (SELECT count(*) FROM sample), (SELECT count(*) FROM input), (SELECT sum(count) FROM tally)"
    ).fetchone()
    assert len(set(counted)) == 1
    store.close()
    assert path.stat().st_size < 1.25 * bounds.keep_mb * MB


def test_a_reservoir_is_the_same_in_whatever_order_samples_come(tmp_path):
    batch, kept = samples(4000, shape=(100,)), []
    for name, order in ("a", batch), ("b", batch[::-1]):
        store = SampleStore.open(tmp_path / name, RetentionLimits(keep_mb=1))
        for start in range(0, 4000, 500):
            store.add(order[start : start + 500])
        kept.append({digest for (digest,) in store._connection.execute("SELECT digest FROM sample")})
        store.close()
    assert kept[0] == kept[1]
    assert 500 < len(kept[0]) < 1500
    early = sum(sample.digest in kept[0] for sample in batch[:2000]) / len(kept[0])
    assert 0.4 < early < 0.6


def test_a_label_that_is_a_whole_float_is_a_class_where_classes_are_wanted(tmp_path):
    store = SampleStore.open(tmp_path / "s.sqlite")
    wanted = SampleRequirements(lambda *_: True, "classes", lambda y: int(y) < 3)
    store.require(wanted)
    samples = [
        make_sample(np.full(2, number), label) for number, label in enumerate((1.0, 2.0, 0.5, -1.0, 7.0))
    ]
    assert store.add(samples) == ["stored", "stored", "refused", "refused", "refused"]
    parts, counted = snapshot.read(store, wanted, store.change)
    labels = np.concatenate([y for _, y in parts.values()])
    assert (labels.dtype, sorted(labels.tolist()), counted.unfit) == (np.int64, [1, 2], 0)
    assert sum(snapshot.count_training_samples(store, replace(wanted, test_fraction=0.0))) == 4
    store.close()


def test_the_newest_stay_and_the_classes_are_balanced_where_that_is_asked(tmp_path):
    store = SampleStore.open(tmp_path / "newest", RetentionLimits(keep_mb=1, keep="newest"))
    batch = samples(3000, shape=(100,))
    store.add(batch)
    kept = [digest for (digest,) in store._connection.execute("SELECT digest FROM sample ORDER BY number")]
    assert kept == [sample.digest for sample in batch[-len(kept) :]]
    store.close()
    store = SampleStore.open(tmp_path / "balanced", RetentionLimits(keep_mb=1, keep_balanced=True))
    store.add(samples(3000, shape=(100,), label=lambda index: 0 if index % 10 else 1))
    counts = dict(store._connection.execute("SELECT class, count FROM tally WHERE held = 0"))
    assert counts[1] == 300
    assert counts[0] > 300
    store.close()


def test_a_round_has_the_same_samples_however_often_it_is_asked_for(path):
    store, turn = SampleStore.open(path), TrainingRound("r", 1, 1)
    store.add(samples(60))
    change = store.pin(turn).change
    before = read(store, change=change)
    store.add(samples(40, seed=1))
    store.label([("0-3", make_label(2)), ("0-4", make_label(2))])
    store.label([("0-3", make_label(1))])
    assert read(store, change=change) == before
    assert read(store) != before
    store.close()
    store = SampleStore.open(path, RetentionLimits(keep_mb=1))  # killed, and started again with less room
    store.add(samples(1500, seed=2, shape=(50,)))
    assert store.pin(turn).change == change
    assert store.pin(turn).complete
    assert read(store, change=change) == before
    assert counts(store, REQUIREMENTS, change).new == len(before["train"])
    store.mark_trained(turn)
    following = store.pin(TrainingRound("r", 2, 1))
    assert following.change > change
    assert counts(store, REQUIREMENTS).new > 0
    store.mark_trained(TrainingRound("r", 2, 1))
    assert counts(store, REQUIREMENTS).new == 0
    assert store._connection.execute("SELECT count(*) FROM sample WHERE dropped IS NOT NULL").fetchone() == (
        0,
    )
    assert count_of(store, "label_before") == 0
    store.close()


def test_a_sample_that_only_a_round_under_way_still_holds_takes_no_label(path):
    """It is not kept any more, and whoever labels it is told so."""
    store = SampleStore.open(path, RetentionLimits(keep_mb=1, keep="newest"))
    store.add(samples(60, shape=(50,)))
    store.pin(TrainingRound("r", 1, 1))
    store.add(samples(3000, seed=1, shape=(50,)))
    query = "SELECT name FROM sample WHERE dropped IS NOT NULL LIMIT 1"
    (name,) = store._connection.execute(query).fetchone()
    assert store.label([(name, make_label(2))]) == ["refused"]
    assert refused(store)["unknown"] == 1
    store.close()


def test_a_snapshot_that_finds_no_room_is_let_go_and_says_so(path):
    store, turn = SampleStore.open(path, RetentionLimits(keep_mb=1, keep="newest")), TrainingRound("r", 1, 1)
    store.add(samples(1000, shape=(100,)))
    assert store.pin(turn).complete
    store.add(samples(1000, seed=1, shape=(100,)))
    assert not store.pin(turn).complete
    assert store._connection.execute("SELECT count(*) FROM sample WHERE dropped IS NOT NULL").fetchone() == (
        0,
    )
    store.close()


class Wall:
    now = 1e9

    def __call__(self):
        return self.now


def test_old_samples_go_and_a_clock_that_jumps_takes_none(path, caplog):
    wall = Wall()
    store = SampleStore.open(path, RetentionLimits(keep_days=3), wall=wall)
    store.add(samples(5))
    wall.now += 1e9  # a board that found the time
    store.add(samples(5, seed=1))
    assert sum(counts(store, REQUIREMENTS).parts.values()) == 10
    wall.now -= 2e9
    store.save_counts()
    assert sum(counts(store, REQUIREMENTS).parts.values()) == 10
    for _ in range(4):
        wall.now += 0.7 * 86_400
        store.save_counts()
    assert sum(counts(store, REQUIREMENTS).parts.values()) == 5
    store.save_counts()
    (count,) = store._connection.execute("SELECT count FROM refusal WHERE kind = 'clock'").fetchone()
    assert count == 2
    assert len([record for record in caplog.records if "clock" in record.message]) == 1
    store.close()


def test_what_does_not_fit_the_run_is_refused_and_counted_with_one_line(store, caplog):
    store.require(REQUIREMENTS)
    assert store.add(samples(3, shape=(5,))) == ["refused"] * 3
    assert store.add(samples(3, label=lambda _: 7)) == ["refused"] * 3
    assert store.add(samples(3)) == ["stored"] * 3
    intake = Intake(store)
    assert intake.add([1.0, float("nan")]) == "refused"
    assert intake.add([1.0, 2.0, 3.0, 4.0], -1) == "refused"
    assert intake.add("words") == "refused"
    assert intake.add([]) == "refused"
    assert intake.add_many([([[1.0], [1.0, 2.0]], 0, None), (inputs(1, 5)[0], 1, "good")]) == [
        "refused",
        "stored",
    ]
    assert intake.label("good", float("inf")) == "refused"
    assert intake.label("good", 2) == "labelled"
    store.save_counts()
    counts = dict(store._connection.execute("SELECT kind, count FROM refusal"))
    assert counts == {"shape": 3, "class": 3, "not-finite": 1, "label": 2, "not-numbers": 2, "empty": 1}
    assert len(caplog.records) == len(counts)


@pytest.mark.parametrize("other", [FORMAT.number - 1, 99])
def test_a_store_of_another_format_is_refused_and_left_unchanged(path, other):
    SampleStore.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {other}")
    before = path.read_bytes()
    with pytest.raises(StoreVersion, match=f"has format {other}; this program reads format {FORMAT.number}"):
        SampleStore.open(path)
    assert path.read_bytes() == before


def test_a_damaged_store_is_one_line(path):
    SampleStore.open(path).close()
    path.write_bytes(b"what somebody else wrote" * 1000)
    with pytest.raises(StoreError, match="file is damaged: restore it, or remove it") as problem:
        SampleStore.open(path)
    assert "\n" not in str(problem.value)


def test_a_file_that_is_damaged_while_the_agent_runs_is_one_line_at_every_look(path):
    store = SampleStore.open(path)
    store.add(samples(200, shape=(40,)))
    store.close()
    with path.open("r+b") as file:
        file.write(b"x" * path.stat().st_size)
    store = SampleStore(sqlite3.connect(path, isolation_level=None), path)
    looks = [lambda: store.change, lambda: store.drift, lambda: store.reference_losses, store.save_counts]
    looks += [lambda: store.pin(TrainingRound("r", 1, 1)), lambda: counts(store, REQUIREMENTS, 1)]
    for look in [*looks, lambda: store.file_progress("a"), lambda: store.add(samples(1))]:
        with pytest.raises(StoreError, match="file is damaged"):
            look()
    store._connection.close()


def test_a_full_disk_is_one_line_and_nothing_that_was_stored_is_lost(path):
    store = SampleStore.open(path)
    store.add(samples(20))
    before = read(store)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="no stored sample is lost"):
        store.add(samples(500, seed=1, shape=(400,)))
    assert read(store) == before
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert store.add(samples(1, seed=1)) == ["stored"]
    store.close()
    assert LOG_BYTES < 10 * MB


def test_several_may_make_the_same_store_at_once(tmp_path):
    for turn in range(30):
        gate, problems = threading.Barrier(6), []

        def opens(path=tmp_path / str(turn) / "samples.sqlite", gate=gate, problems=problems):
            gate.wait()
            try:
                SampleStore.open(path).close()
            except StoreError as problem:
                problems.append(problem)

        threads = [threading.Thread(target=opens) for _ in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert problems == []


ADDING = """
import sys
import numpy as np
from fleetune.edge_agent.stream import Intake
rng = np.random.default_rng(int(sys.argv[2]))
with Intake.open("f", "d", sys.argv[1]) as intake:
    for number in range(10**6):
        x = rng.normal(size=4).astype(np.float32)
        assert intake.add(x, number % 3, f"{sys.argv[2]}-{number}") == "stored"
        print(number, flush=True)
"""


def test_processes_that_are_killed_lose_nothing_that_was_returned(tmp_path):
    """Two at once, killed while they write."""
    acknowledged = {}
    command = [sys.executable, "-c", ADDING, str(tmp_path)]
    children = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in (0, 1)]
    for child in children:
        assert any(int(line) >= 20 for line in child.stdout)
    for seed, child in enumerate(children):
        child.kill()
        acknowledged[seed] = max([20, *(int(line) for line in child.stdout if line.endswith("\n"))])
        child.wait()
        child.stdout.close()
    store = SampleStore.open(tmp_path / "f" / "d" / "samples.sqlite")
    names = {name for (name,) in store._connection.execute("SELECT name FROM sample")}
    assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()
    for seed, last in acknowledged.items():
        assert {f"{seed}-{number}" for number in range(last + 1)} <= names
    assert len(names) <= sum(last + 2 for last in acknowledged.values())  # one more each was not returned yet
