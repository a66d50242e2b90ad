"""Who is trained and who is tested on: for ever on a device, and as users mark it in a simulation."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.errors import raises
from typer.testing import CliRunner

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.npz import from_arrays
from fleetune.edge_agent.datasets.train_test_split import select_below, split_draws
from fleetune.edge_agent.training.device_data import split
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.partitioned_data import PartitionedData, SampleCounts


def dataset(n=40, **rest):
    return Dataset(np.arange(n * 3, dtype=np.float32).reshape(n, 3), np.arange(n) % 4, **rest)


def rows(x):
    return sorted((x[:, 0] / 3).astype(int).tolist())


def test_a_sample_keeps_its_role_as_the_window_slides():
    """A device keeps the last 300 of a stream; whatever it trains on once is never tested on."""
    stream, seen = dataset(1200), {"train": set(), "validation": set(), "test": set()}
    for start in range(0, 901, 75):
        window = Dataset(stream.x[start : start + 300][::-1], stream.y[start : start + 300][::-1])
        data = split(window, 0.3, 0.1)
        for part, found in seen.items():
            found.update(rows(data.part(part)[0]))
    assert sum(map(len, seen.values())) == 1200
    assert len(set.union(*seen.values())) == 1200


def test_copies_of_a_sample_stay_together_and_larger_fractions_only_take():
    whole = dataset(400)
    twice = Dataset(np.concatenate([whole.x, whole.x]), np.concatenate([whole.y, whole.y]))
    data, less = split(twice, 0.3, 0.1), split(whole, 0.2, 0.1)
    assert not set(rows(data.x_train)) & set(rows(data.x_test))
    assert set(rows(less.x_test)) < set(rows(data.x_test))


def test_whatever_stores_a_sample_its_role_is_the_same():
    """Expected: by hand, `hashlib.blake2b((3).to_bytes(8, "little") + bytes([1, 2]), digest_size=16,
    person=b"fleetune-sample")`, each half as a little-endian integer over 2**64.
    """
    x, y = np.array([[1, 2], [7, 7]], np.uint8), np.array([3, 0])
    for_test, for_validation = split_draws(x, y)
    np.testing.assert_allclose(
        [for_test[0], for_validation[0]], [0.4616193440123508, 0.24382614429257332], rtol=1e-15
    )
    for same in (x[:, ::-1][:, ::-1], np.asfortranarray(x), x.reshape(2, 1, 2, 1)):
        np.testing.assert_array_equal(split_draws(same, y)[0], for_test)
    wide = x.astype(">f4")
    np.testing.assert_array_equal(split_draws(wide, y)[0], split_draws(x.astype(np.float32), y)[0])


@given(n=st.integers(2, 12), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_few_samples_have_both_sides_and_copies_together(n, fraction, seed):
    numbers = Key(seed).uniform(n)
    side = select_below(np.concatenate([numbers, numbers]), fraction)
    np.testing.assert_array_equal(side[:n], side[n:])
    assert 0 < side.sum() < 2 * n
    np.testing.assert_array_equal(np.sort(numbers)[: side[:n].sum()], np.sort(numbers[side[:n]]))


def test_a_sample_has_one_role():
    with raises(DataError, "mine", "test", "validation"):
        from_arrays("mine", {"x": np.eye(3), "y": [0, 1, 2], "test": [1, 0, 0], "validation": [1, 1, 0]})


# when an agent starts


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (None, ["there is no d.npz", "FLEETUNE_DATA"]),
        ({"x": np.full((9, 2), np.nan), "y": np.arange(9)}, ["NaN"]),
        ({"x": np.eye(9), "y": np.arange(9) - 1}, ["label -1"]),
        ({"x": np.ones((9, 2)), "y": np.zeros(9, int)}, ["9 training", "0 test"]),
        ({"images": np.eye(9)}, ["x_train", "images"]),
    ],
)
def test_data_that_cannot_be_used_stop_an_agent_before_it_joins(tmp_path, monkeypatch, arrays, named):
    monkeypatch.chdir(tmp_path)
    if arrays is not None:
        np.savez("d.npz", **arrays)
    monkeypatch.setattr("fleetune.edge_agent.agent.Agent", lambda *_, **__: pytest.fail("the agent starts"))
    start = ["run", "--fleet", "f", "--device", "d", "--broker", "127.0.0.1:1", "--data", "npz:d.npz"]
    result = CliRunner().invoke(app, start)
    assert result.exit_code == 2
    assert all(one in result.output for one in ["npz:d.npz", *named]), result.output
    assert len(result.output.strip().splitlines()) == 1


# in a simulation


SPEC = ModelSpec("model", (), (), (3,), 4)


def shares_of(data, devices, kind="dirichlet", validation_fraction=0.0, pool=1.0):
    settings = parse_run(
        {
            "run": {"name": "r"},
            "model": {"name": "mlp"},
            "method": {"name": "fedavg"},
            "data": {
                "partition": {"kind": kind, "alpha": 0.1, "pool": pool},
                "validation_fraction": validation_fraction,
            },
            "fleet": {"devices": devices},
        }
    )
    return PartitionedData.of_run(settings, CallerSamples(data))


def shares(data, devices=6, kind="dirichlet", validation_fraction=0.0):
    partitioned = shares_of(data, devices, kind, validation_fraction)
    return [partitioned.device_data(index, SPEC) for index in range(devices)]


def marked(n=400, every=5, **rest):
    return dataset(n, test=np.arange(n) % every == 0, **rest)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "alpha-rho", "mix", "primary", "group"])
@pytest.mark.parametrize("devices", [6, 20])
def test_what_users_mark_as_test_is_never_trained_on(kind, devices):
    data = marked(group=np.arange(400) // 20)
    for one in shares(data, devices, kind):
        assert all(row % 5 == 0 for row in rows(one.x_test))
        assert all(row % 5 for row in rows(one.x_train))
        assert one.size("test") >= 1
        assert one.size("train") >= 1


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "mix"])
@pytest.mark.parametrize("validation_fraction", [0.0, 0.3])
@pytest.mark.parametrize("marks", [(), ("test",), ("validation",), ("test", "validation")])
@pytest.mark.parametrize("benchmark", [False, True])
def test_the_sizes_of_shares_are_told_without_them(kind, validation_fraction, marks, benchmark):
    at = {"test": np.arange(400) % 5 == 0, "validation": np.arange(400) % 5 == 1}
    data = dataset(400, benchmark=benchmark, **{name: at[name] for name in marks})
    partitioned = shares_of(data, 20, kind, validation_fraction)
    assert partitioned.counts(SPEC) == [
        SampleCounts.of(partitioned.device_data(index, SPEC)) for index in range(20)
    ]


def test_sizes_find_what_is_wrong_with_a_share_and_heed_no_sample_that_nobody_has():
    def with_nan_in(row):
        data = dataset(400)
        data.x[row] = np.nan
        return shares_of(data, 6, pool=0.5)

    partitioned = shares_of(dataset(400), 6, pool=0.5)
    owned = np.concatenate([partitioned.rows(index) for index in range(6)])
    with raises(DataError, "NaN"):
        with_nan_in(owned[-1]).counts(SPEC)
    nobodys = np.setdiff1d(np.arange(400), owned)[0]
    assert with_nan_in(nobodys).counts(SPEC) == partitioned.counts(SPEC)


def test_a_marked_set_is_dealt_whole_and_once():
    partitioned = shares(marked(), 20)
    count = Counter(
        row for one in partitioned for part in ("train", "test") for row in rows(one.part(part)[0])
    )
    assert count == Counter(range(400))


def test_marked_validation_samples_stay_what_they_are():
    validation = np.arange(400) % 5 == 1
    for data in (marked(validation=validation), dataset(400, validation=validation)):
        for one in shares(data, 20, validation_fraction=0.3):
            assert all(row % 5 == 1 for row in rows(one.x_validation))
            assert all(row % 5 != 1 for row in rows(one.x_train) + rows(one.x_test))
            assert one.size("test") >= 1
            assert one.size("train") >= 1


def test_a_benchmarks_samples_are_pooled():
    """As in the papers: each device's own mix is split by class, whatever the original files say."""
    unmarked, pooled = shares(dataset(400)), shares(marked(benchmark=True))
    assert [rows(one.x_test) for one in pooled] == [rows(one.x_test) for one in unmarked]
    assert [rows(one.x_train) for one in pooled] == [rows(one.x_train) for one in unmarked]


def test_marks_that_cannot_be_kept_are_named():
    with raises(SettingError, "dirichlet", "data"):
        shares(marked(every=100), 6)
    lonely = dataset(400, test=np.arange(400) >= 200, group=np.arange(400) // 40)
    with raises(SettingError, "group", "device 0", remedy="fleet"):
        shares(lonely, 10, "group")
