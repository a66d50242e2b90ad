"""CSV files: rows, windows of a series in blocks of time, texts as ids; and mistakes in one line."""

import tracemalloc

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.helpers.nightly import sooner

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.edge_agent.datasets.csv_columns import token_ids
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.training.device_data import check_fits, for_vocabulary, split
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.simulation import Partition
from fleetune.tools.simulator.marked_samples import splits_of

ROWS = "house,kwh,temp,ok\n" + "".join(f"{'ab'[i // 60]},{i}.5,{-i},{i % 2}\n" for i in range(120))
TEXTS = '3,"Oil, again","Prices rise"\n1,Vote,"People vote, and vote"\n'


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return lambda options: load(f"csv:{path}?{options}")


def test_rows_are_samples(table):
    found = table("label=ok&group=house")
    assert found.x.shape == (120, 2)
    assert found.x[3].tolist() == [3.5, -3]
    assert (found.y.dtype, found.y[:3].tolist()) == (np.int64, [0, 1, 0])
    assert found.group[[0, 60]].tolist() == ["a", "b"]
    numbers = table("label=kwh,temp&columns=ok")
    assert numbers.x.shape == (120, 1)
    assert numbers.y[2].tolist() == [2.5, -2]
    assert table("columns=kwh").y.shape == (120, 0)
    assert table("label=house&classes=b,a&columns=kwh").y[[0, 60]].tolist() == [1, 0]
    assert table("label=kwh&columns=temp&test=ok").test.sum() == 60


def test_windows_are_of_one_group_and_their_horizon_comes_next(table):
    found = table("label=kwh&columns=kwh,temp&group=house&window=4&horizon=2&step=3&block=20")
    assert found.x.shape == (30, 2, 4)  # five in each of six blocks
    assert found.x[0].tolist() == [[0.5, 1.5, 2.5, 3.5], [0, -1, -2, -3]]
    assert found.y[0].tolist() == [4.5, 5.5]
    assert found.y[1].tolist() == [7.5, 8.5]
    assert np.bincount(found.block).tolist() == [5] * 6
    assert found.group.tolist() == ["a"] * 15 + ["b"] * 15
    last = table("label=ok&columns=kwh&window=4&block=20")
    assert last.y[:2].tolist() == [1, 0]  # of the windows' last rows
    assert table("columns=kwh&window=4").y.shape[1:] == (0,)


def rows_seen(x):
    return set(np.unique(x[:, 0]).tolist())


def test_windows_that_overlap_never_stand_on_two_sides(table):
    found = table("label=kwh&columns=kwh&window=4&horizon=2&block=12")
    data = split(found, 0.4, 0.3)
    parts = [
        rows_seen(x) | set(np.unique(y).tolist()) for x, y in map(data.part, ("train", "validation", "test"))
    ]
    assert all(parts)
    assert not (parts[0] & parts[1]) | (parts[0] & parts[2]) | (parts[1] & parts[2])
    assert sum(map(len, parts)) == 120
    for train, test in splits_of(found, Partition(test_fraction=0.4), 2, Key(1)):
        assert not set(found.block[train]) & set(found.block[test])


def test_a_series_that_grows_changes_no_sides(table, tmp_path):
    options = "label=kwh&columns=kwh&window=4&horizon=2&block=12"
    before = split(table(options), 0.4, 0.0)
    (tmp_path / "rows.csv").write_text(ROWS + "b,500,1,1\n" * 8)
    after = split(table(options), 0.4, 0.0)
    for part in ("train", "test"):
        old, new = rows_seen(before.part(part)[0]), rows_seen(after.part(part)[0])
        assert old <= new


def test_one_block_cannot_be_tested_and_trained_on(table):
    found = table("label=kwh&columns=kwh&window=4&horizon=2&block=120")
    with raises(DataError, "rows.csv"):
        split(found, 0.4, 0.0)
    with raises(SettingError, "csv:"):
        splits_of(found, Partition(), 1, Key(1))


def test_texts_are_ids_of_a_hashed_vocabulary(tmp_path):
    path = tmp_path / "news.csv"
    path.write_text(TEXTS)
    found = load(f"csv:{path}?names=class,title,text&label=class&classes=1,2,3&text=title,text&words=6")
    assert found.x.shape == (2, 6)
    assert found.x[0].tolist() == token_ids("Oil, again Prices rise", 6, 8192)
    assert found.x[0, 4:].tolist() == [0, 0]
    assert found.x[1, [0, 2, 4]].tolist() == token_ids("vote", 1, 8192) * 2 + token_ids("vote", 1, 8192)
    assert found.y.tolist() == [2, 0]
    assert 0 < token_ids("vote", 1, 5)[0] < 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("label=watt", ["'watt'", "house, kwh, temp, ok"]),
        ("label=ok", ["row 2", "column house", "'a'", "columns="]),
        ("labels=ok", ["labels", "label, columns"]),
        ("label=ok&window=x", ["window"]),
        ("stride=3&window=4", ["stride is called step now"]),
        ("x=kwh&columns=temp", ["columns", "twice"]),
        ("columns=kwh&window=4&time=temp", ["window and time need gap", "gap=2s"]),
        ("columns=kwh&window=4&gap=soon", ["'soon'", "5m"]),
        ("columns=kwh&gap=2s", ["gap", "window"]),
        ("columns=kwh&missing=hold", ["missing=hold", "window", "missing=gap"]),
        ("columns=kwh&missing=zero", ["zero", "missing"]),
        ("columns=kwh&window=400", ["window 400 is longer than every file", "120 rows"]),
        ("columns=kwh&window=4&time=house&gap=2", ["row 2", "column house", "'a'", "time"]),
        ("horizon=3", ["horizon", "window", "label"]),
        ("window=3&test=ok", ["window", "test"]),
        ("columns=kwh&window=30&block=20", ["20", "block", "window"]),
        ("label=house&classes=a", ["row 62", "column house", "'b'", "classes"]),
        ("label=house,ok&classes=a,b", ["classes", "label="]),
        ("classes=a,b&columns=kwh", ["classes", "label="]),
        ("label=house&classes=a,b,a&columns=kwh", ["classes", "'a'"]),
        ("label=ok&columns=kwh&label=kwh", ["option label"]),
        ("label=ok&columns=kwh,ok", ["column ok", "label", "columns"]),
        ("label=ok&columns=kwh,ok&window=4", ["column ok", "label", "columns"]),
        ("label=house&classes=a,b&text=house", ["column house", "label", "text"]),
        ("columns=kwh,ok&test=ok", ["column ok", "test", "columns"]),
        ("columns=kwh,temp,kwh", ["columns", "'kwh'"]),
        ("text=house&columns=kwh", ["text", "columns"]),
        ("names=a,b,a,d&columns=b", ["1", "3", "'a'"]),
        ("group=house&columns=kwh&label=", None),
    ],
)
def test_a_mistake_is_one_line(table, options, words):
    if words is None:
        assert table(options).y.shape == (120, 0)
        return
    with raises(DataError, "rows.csv", *words):
        table(options)


def test_a_row_of_another_length_and_a_file_that_is_none(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with raises(DataError, "a.csv", "row 3", "2"):
        load(f"csv:{tmp_path}/a.csv")
    (tmp_path / "b.csv").write_text("a,b\n")
    with raises(DataError, "b.csv"):
        load(f"csv:{tmp_path}/b.csv")
    (tmp_path / "c.csv.gz").write_bytes(b"nothing")
    with raises(DataError, "c.csv.gz"):
        load(f"csv:{tmp_path}/c.csv.gz")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n\n3,nan\n", ["row 4", "column b", "'nan'"]),
        ("a,b\n1,2\n3,1e39\n", ["row 3", "column b", "'1e39'"]),
        ("a,b\n1,2\n3,\n", ["row 3", "column b", "''"]),
        (f"a,b\n1,2\n3,{'x' * 9000}\n", ["row 3", "column b", f"'{'x' * 50}'"]),
        ("a,b,a\n1,2,3\n", ["1", "3", "'a'"]),
        (f"a,b\n1,2\n3,{'x' * 200_000}\n", ["row 2", "131072"]),
    ],
)
def test_a_fault_in_a_file_names_row_and_column(tmp_path, content, words):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    for options in ("columns=a,b", "columns=a&label=b"):
        with raises(DataError, "rows.csv", *words) as caught:
            load(f"csv:{path}?{options}")
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "pair",
    [
        ("16777216", "16777217"),
        ("1700000001", "1700000002.0"),
        ("-16777217", "-16777216"),
        ("9007199254740993", "9007199254740992"),  # also one float64
        ("12345678901234567890", "12345678901234567891"),
    ],
)
def test_two_whole_numbers_that_become_one_float32_are_refused(tmp_path, pair):
    path = tmp_path / "rows.csv"
    filling = "".join(f"{i},{i}\n" for i in range(20_000))  # they meet across chunks of rows
    path.write_text(f"id,x\n{pair[0]},1\n{filling}{pair[1]},2\n")
    for options in ("label=x", "columns=x&label=id"):
        with raises(DataError, "row 20003", "column id", *pair):
            load(f"csv:{path}?{options}")
    assert load(f"csv:{path}?columns=x").x.shape == (20_002, 1)


def test_large_numbers_that_stay_apart_or_are_measured_are_taken(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n16777216,1e20\n16777218,1.00000001e20\n16777216.0,16777216.5\n33554432,16777216\n")
    assert load(f"csv:{path}").x[:, 0].tolist() == [16777216, 16777218, 16777216, 33554432]


def one_long_cell():
    rows = [f"{i % 4},w{i % 977} tail more" for i in range(20_000)]
    rows[100] = "1," + "long word " * 2500
    return "label,text\n" + "\n".join(rows)


def one_long_group():
    return "a,house\n" + "".join(f"{i % 7},{'h' * 25_000 if i == 9 else i % 5}\n" for i in range(50_000))


@pytest.mark.parametrize(
    ("content", "options"),
    sooner(
        [
            (one_long_cell(), "label=label&text=text"),
            (one_long_group(), "group=house"),
            ("a,b\n" + "1,2\n" * 200_000, "label=b"),
            ("id,b\n" + "".join(f"{i * 4096 + 2**28},{i % 3}\n" for i in range(50_000)), "label=b"),
        ],
        kept=2,
    ),
    ids=["text", "group", "digits", "large"],
)
def test_reading_takes_6_mb_and_four_times_the_file_at_most(tmp_path, content, options):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    tracemalloc.start()
    try:
        load(f"csv:{path}?{options}")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 6e6 + 4 * path.stat().st_size


def test_text_embedding_with_both_trainers_and_without_what_is_no_word(tmp_path):
    path = tmp_path / "news.csv"
    path.write_text("".join(f"{i % 2},word{i % 3} {'good' if i % 2 else 'bad'} thing\n" for i in range(20)))
    found = load(f"csv:{path}?names=class,text&label=class&text=text&words=5")
    bundle = make_bundle("text-embedding", (5,), 2, Key(3))
    settings = TrainingSection(epochs=3, batch_size=4, learning_rate=1.0)
    results = []
    for backend in (TorchBackend.from_spec(bundle.spec), OnnxBackend(bundle)):
        data = for_vocabulary(check_fits(split(found, 0.3, 0.0), bundle.spec), backend.vocabulary)
        trainer = LocalTrainer(backend, data, settings)
        start = TorchBackend.from_spec(bundle.spec).weights.copy()
        results.append(trainer.fit(start, FitPlan(), Key(1)))
        assert backend.vocabulary == 8192
        assert trainer.accuracy(results[-1].weights, "train") == 1.0
        shorter, padded = found.x[:1, :3].astype(np.int64), found.x[:1].astype(np.int64)
        assert padded[0, 3:].tolist() == [0, 0]
        vectors = results[-1].weights[: 8192 * 16].reshape(8192, 16)
        start_vectors = start[: 8192 * 16].reshape(8192, 16)
        np.testing.assert_array_equal(vectors[0], start_vectors[0])
        out = results[-1].weights[8192 * 16 :]
        wanted = vectors[shorter[0]].mean(axis=0) @ out[:32].reshape(2, 16).T + out[32:]
        backend.load(results[-1].weights)
        np.testing.assert_allclose(backend.answer(padded, "logits")[0], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[1].weights, results[0].weights, rtol=1e-5, atol=1e-5)
