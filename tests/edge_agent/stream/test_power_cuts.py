"""The power goes while samples are added: what was returned is there, and nothing is there by half."""

import shutil
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest

from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.deletion import SampleFilter
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import make_label, make_sample
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.store_values import TrainingRound

REQUIREMENTS = SampleRequirements(lambda *_: True)


def content(store):
    """Everything that a reader can see of it, and that it goes together."""
    connection = store._connection
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    numbers = [row for (row,) in connection.execute("SELECT number FROM sample ORDER BY number")]
    assert numbers == [row for (row,) in connection.execute("SELECT number FROM input ORDER BY number")]
    (counted,) = connection.execute("SELECT coalesce(sum(count), 0) FROM tally").fetchone()
    assert counted == len(numbers)
    parts, _ = snapshot.read(store, REQUIREMENTS, store.change)
    return store.change, {part: (x.tobytes(), y.tobytes()) for part, (x, y) in parts.items()}


def steps(store):
    """What is done, one durable step after another."""
    rng = np.random.default_rng(0)
    for turn in range(4):
        made = [
            make_sample(x, index % 2, f"{turn}-{index}") for index, x in enumerate(rng.normal(size=(20, 90)))
        ]
        yield lambda made=made: store.add(made)
        yield lambda turn=turn: store.label([(f"{turn}-3", make_label(1)), (f"{turn}-4", make_label(1))])
        yield lambda turn=turn: store.pin(TrainingRound("r", turn, 1))
        big = [make_sample(x, 0) for x in rng.normal(size=(500, 100))]
        yield lambda big=big: store.add(big)  # others have to go, or are held
        yield lambda turn=turn: store.mark_trained(TrainingRound("r", turn, 1))


def opened(path):
    return closing(SampleStore.open(path))


def copy(path, to):
    to.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith("-shm"):  # shared memory: no power cut leaves it
            shutil.copy(file, to / file.name)
    return to / path.name


@pytest.fixture
def course(tmp_path):
    """A store at work with its files as they were after each step, and what it held then."""
    path, states = tmp_path / "store" / "s.sqlite", []
    with opened(path) as store:
        store._connection.execute("PRAGMA wal_autocheckpoint = 300")  # so that some steps find a fresh log
        store._begin(RetentionLimits(keep_mb=1))
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (
            2,
        )  # FULL: each commit is synced
        for number, step in enumerate(steps(store)):
            step()
            states.append((content(store), copy(path, tmp_path / f"after-{number}")))
    return states


def test_after_each_step_all_of_it_is_on_disk(course):
    for wanted, path in course:
        with opened(path) as store:
            change, parts = content(store)
            assert (change - 1, parts) == wanted  # opening is a step too


def test_a_step_that_was_cut_short_was_never_begun(course, tmp_path):
    """Of its log, which is not synced yet, any part may be on the medium; of those before it, all."""
    rng, cuts = np.random.default_rng(1), 0
    for number, ((before, path), (_, following)) in enumerate(pairwise(course)):
        logs = [one.with_name(one.name + "-wal") for one in (path, following)]
        synced, log = (one.read_bytes() if one.exists() else b"" for one in logs)
        if path.read_bytes() != following.read_bytes() or not (synced and log.startswith(synced)):
            continue  # the log was begun anew
        for again in range(3):
            torn = copy(following, tmp_path / f"torn-{number}-{again}")
            kept = int(rng.integers(len(synced), len(log)))
            torn.with_name(torn.name + "-wal").write_bytes(log[:kept])
            with opened(torn) as store:
                change, parts = content(store)
            assert (change - 1, parts) == before
            cuts += 1
    assert cuts > 10


def test_a_sample_that_was_removed_is_in_no_file_and_no_snapshot(tmp_path):
    path = tmp_path / "store" / "s.sqlite"
    rng = np.random.default_rng(3)
    samples = [make_sample(x, 0, f"{index}") for index, x in enumerate(rng.normal(size=(40, 3000)))]
    secret = samples[7].data[:64]
    with opened(path) as store:
        store.add(samples)
        pin = store.pin(TrainingRound("r", 1, 1))
        store.label([("7", make_label(1))])  # the snapshot has the label of before
        before = copy(path, tmp_path / "before")
        assert any(secret in file.read_bytes() for file in before.parent.iterdir())
        assert store.delete(SampleFilter(("7", "none"))) == 1
        after = copy(path, tmp_path / "after")
        assert not any(secret in file.read_bytes() for file in path.parent.iterdir())
        assert store.pin(TrainingRound("r", 1, 1)) == type(pin)(
            pin.training_round, pin.change, complete=False
        )
        parts, _ = snapshot.read(store, REQUIREMENTS, pin.change)
        assert sum(len(x) for x, _ in parts.values()) == 39
        assert store._connection.execute("SELECT count(*) FROM label_before").fetchone() == (0,)
        assert store._connection.execute("SELECT count(*) FROM arrival").fetchone() == (0,)
        assert store.delete(SampleFilter(("7",))) == 0
        assert store.add([samples[7]]) == ["stored"]  # it may come again
        assert store.pin(TrainingRound("r", 2, 1)).complete
    with opened(after) as store:  # the power went when the removal had returned
        content(store)
        assert store.matching_names(SampleFilter(("7",))) == []


def test_a_removal_that_was_cut_short_is_whole_or_was_never_begun(tmp_path, monkeypatch):
    path, cuts = tmp_path / "store" / "s.sqlite", []
    with opened(path) as store:
        store.add(
            [make_sample(x, 0, f"{i}") for i, x in enumerate(np.random.default_rng(4).normal(size=(9, 500)))]
        )
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        step = store._begin_change

        def before_commit():
            cuts.append(copy(path, tmp_path / "cut-0"))
            return step()

        monkeypatch.setattr(store, "_begin_change", before_commit)
        store._connection.set_trace_callback(
            lambda words: (
                cuts.append(copy(path, tmp_path / f"cut-{len(cuts)}")) if "checkpoint" in words else None
            )
        )
        assert store.delete(SampleFilter(("1", "2"))) == 2
        store._connection.set_trace_callback(None)
        cuts.append(copy(path, tmp_path / "done"))
    left = []
    for cut in cuts:
        with opened(cut) as store:
            content(store)
            left.append(9 - len(store.matching_names(SampleFilter(tuple(map(str, range(9)))))))
    assert left == [0, 2, 2]
