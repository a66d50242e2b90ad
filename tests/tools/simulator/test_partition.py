"""Dealing a data set: sizes, disjointness, class mixes, and the same deal for the same key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import Partition
from fleetune.tools.simulator.partition import assign_rows, split_rows

KEY = Key.of("test", "partition")
DISJOINT = ("iid", "dirichlet", "alpha-rho", "group")
KINDS = (*DISJOINT, "mix", "primary")


def partition(y, group, settings, num_devices, key):
    """Each device's training and test rows."""
    assigned = assign_rows(y, group, settings, num_devices, key)
    return [split_rows(rows, y, settings, device, key) for device, rows in enumerate(assigned)]


def labels(per_class=200, classes=10):
    return KEY.generator().permutation(np.repeat(np.arange(classes), per_class))


def class_counts(y, splits):
    """Samples (training and test) of each device and class, shape (devices, classes)."""
    num_classes = int(y.max()) + 1
    return np.array([np.bincount(y[np.concatenate(split)], minlength=num_classes) for split in splits])


def joined(splits):
    return [np.concatenate(split) for split in splits]


def shares_of(y, num_devices, group=None, key=KEY, **settings):
    return joined(partition(y, group, Partition(**settings), num_devices, key))


@given(
    kind=st.sampled_from(KINDS),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    rho=st.sampled_from([0.05, 0.5, 1.0]),
    num_devices=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=6),
    test_fraction=st.sampled_from([0.05, 0.3, 0.9]),
    seed=st.integers(0, 1000),
)
def test_every_kind_keeps_the_common_rules(*, kind, alpha, rho, num_devices, sizes, test_fraction, seed):
    y = np.repeat(np.arange(len(sizes)), sizes)
    y = np.concatenate([y, np.arange(24) % len(sizes)])
    settings = Partition(kind=kind, alpha=alpha, rho=rho, test_fraction=test_fraction)
    group = np.arange(len(y)) % 12
    splits = partition(y, group, settings, num_devices, Key(seed))
    again = partition(y, group, settings, num_devices, Key(seed))
    assert len(splits) == num_devices
    for (train, test), (train_again, test_again) in zip(splits, again, strict=True):
        rows = np.concatenate([train, test])
        assert train.size >= 1
        assert test.size == np.clip(round(test_fraction * rows.size), 1, rows.size - 1)
        assert np.unique(rows).size == rows.size
        assert rows.min() >= 0
        assert rows.max() < y.size
        assert np.array_equal(train, train_again)
        assert np.array_equal(test, test_again)
        for label in np.unique(y[rows]):
            wanted = test.size / rows.size * (y[rows] == label).sum()
            assert abs((y[test] == label).sum() - wanted) < 1
    if kind in DISJOINT:
        assert sorted(np.concatenate(joined(splits))) == list(range(y.size))


@pytest.mark.parametrize("kind", KINDS)
def test_another_key_deals_otherwise(kind):
    y, group = labels(), np.arange(2000) % 20
    first, second = (shares_of(y, 5, group, key, kind=kind) for key in (KEY, KEY.child("other")))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_bounds_a_share(kind):
    y, group = labels(), np.arange(2000) % 5
    sizes = [rows.size for rows in shares_of(y, 5, group, kind=kind, alpha=0.1, samples=60)]
    assert max(sizes) <= 60
    if kind in ("iid", "mix", "primary", "group"):
        assert sizes == [60] * 5


def test_iid_shares_are_alike():
    y = labels()
    counts = class_counts(y, partition(y, None, Partition(), 4, KEY))
    assert counts.sum(1).tolist() == [500] * 4
    assert np.all(np.abs(counts - 50) < 30)


def test_alpha_decides_how_uneven_dirichlet_is():
    y = labels()

    def spread(alpha, kind):
        counts = class_counts(y, partition(y, None, Partition(kind=kind, alpha=alpha), 10, KEY))
        return (counts / counts.sum(1, keepdims=True)).max(1).mean()

    for kind in ("dirichlet", "mix"):
        assert spread(0.05, kind) > 0.5 > spread(1.0, kind) > 0.13 > spread(1000.0, kind)


def test_dirichlet_deals_a_class_in_the_drawn_proportions():
    """The first class's proportions, drawn again from the same stream, by hand."""
    y = np.zeros(1000, np.int64)
    counts = class_counts(y, partition(y, None, Partition(kind="dirichlet", alpha=1.0), 4, KEY))[:, 0]
    rng = KEY.child("shares").generator()
    rng.permutation(1000)
    assert np.all(np.abs(counts - 1000 * rng.dirichlet(np.ones(4))) <= 1)


def test_poor_devices_get_rows_from_the_richest():
    y = np.zeros(40, np.int64)
    sizes = [rows.size for rows in shares_of(y, 20, kind="dirichlet", alpha=1e-3)]
    assert sizes == [2] * 20


def test_mix_has_the_same_mix_in_training_and_test():
    y = labels(1000)
    for train, test in partition(y, None, Partition(kind="mix", samples=600, test_fraction=1 / 6), 20, KEY):
        assert (train.size, test.size) == (500, 100)
        difference = np.bincount(y[train], minlength=10) / 5 - np.bincount(y[test], minlength=10)
        assert np.abs(difference).max() < 1.3


def test_mix_shares_samples_only_when_a_class_runs_out():
    y = labels(1000)
    few = np.concatenate(shares_of(y, 10, kind="mix", alpha=100.0, samples=500))
    assert np.unique(few).size == few.size
    many = shares_of(y, 30, kind="mix", alpha=100.0, samples=500)
    assert np.unique(np.concatenate(many)).size > 9000
    assert np.bincount(np.concatenate(many)).max() <= 3


def test_a_class_too_small_for_a_mix_leaves_the_rest_to_others():
    y = np.repeat([0, 1, 2], [5, 5, 90])
    for rows in shares_of(y, 4, kind="mix", alpha=0.1, samples=60):
        assert rows.size == np.unique(rows).size == 60


def test_alpha_rho_gives_each_class_to_its_holders_only():
    y = labels()
    counts = class_counts(y, partition(y, None, Partition(kind="alpha-rho", alpha=50.0, rho=0.3), 40, KEY))
    held = (counts > 0).mean()
    assert 0.2 < held < 0.4
    assert np.all(counts.sum(0) == 200)
    everyone = class_counts(y, partition(y, None, Partition(kind="alpha-rho", alpha=50.0, rho=1.0), 10, KEY))
    assert np.all(everyone > 0)


def test_alpha_rho_finds_holders_even_for_a_tiny_rho():
    y = labels(20)
    counts = class_counts(y, partition(y, None, Partition(kind="alpha-rho", rho=0.01), 3, KEY))
    assert np.all(counts.sum(0) == 20)
    assert np.all(counts.sum(1) >= 2)


def test_primary_has_the_papers_shares():
    y = labels(1000)
    counts = class_counts(y, partition(y, None, Partition(kind="primary", samples=200), 30, KEY))
    ordered = np.sort(counts, axis=1)[:, ::-1] / 200
    assert np.all((ordered[:, 0] >= 0.395) & (ordered[:, 0] <= 0.605))
    assert np.all((ordered[:, 1] >= 0.195) & (ordered[:, 1] <= 0.405))
    assert np.all(ordered[:, 2] - ordered[:, -1] <= 0.005 + 1e-9)
    assert len(set(counts.argmax(1))) > 4


def test_one_device_a_group_or_whole_groups():
    y, group = labels(), np.array(list("cab"))[np.arange(2000) % 3]
    one_each = shares_of(y, 3, group, kind="group")
    assert [set(group[rows]) for rows in one_each] == [{"a"}, {"b"}, {"c"}]
    joined_groups = [set(group[rows]) for rows in shares_of(y, 2, group, kind="group")]
    assert sorted(map(len, joined_groups)) == [1, 2]
    assert not joined_groups[0] & joined_groups[1]


@pytest.mark.parametrize(
    ("settings", "num_devices", "match"),
    [
        ({"kind": "shards"}, 2, r"data\.partition\.kind: 'shards' is unknown; known: iid, dirichlet"),
        ({"kind": "iid"}, 11, "11 devices with 2 samples each need 22, the source has 20"),
        ({"kind": "dirichlet"}, 11, "need 22"),
        ({"kind": "alpha-rho"}, 11, "need 22"),
        ({"kind": "iid", "samples": 11}, 2, "2 devices with 11 samples each need 22, the source has 20"),
        ({"kind": "mix", "samples": 21}, 2, "the source has 20"),
        ({"kind": "mix"}, 11, "need 22"),
        ({"kind": "primary"}, 2, "needs 3 classes or more, the source has 2"),
        ({"kind": "group"}, 2, "needs a source with a `group` column"),
    ],
)
def test_what_cannot_be_dealt_is_refused(settings, num_devices, match):
    with pytest.raises(SettingError, match=match):
        partition(np.arange(20) % 2, None, Partition(**settings), num_devices, KEY)


def test_groups_too_few_or_too_small():
    y, group = np.arange(5) % 2, np.array(["a", "a", "b", "c", "c"])
    with pytest.raises(SettingError, match="4 devices, but the source has only 3 groups"):
        partition(y, group, Partition(kind="group"), 4, KEY)
    with pytest.raises(SettingError, match="group b has 1 sample"):
        partition(y, group, Partition(kind="group"), 3, KEY)
