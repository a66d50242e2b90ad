"""Median, trimmed mean and Krum against definitions that are written down anew, entry by entry."""

import math

import numpy as np
import pytest
from tests.conftest import tiny_spec

from fleetune.coordinator.combine import update_rows
from fleetune.coordinator.combine.krum import nearest
from fleetune.coordinator.combine.rules import RULES, RoundInputs
from fleetune.protocols.errors import StoreError
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

SPEC = tiny_spec()
SIZE = SPEC.num_parameters
BEFORE = np.linspace(-1, 1, SPEC.size, dtype=np.float32)


def trimmed(values, share=0.2):
    cut = min(math.ceil(share * len(values) - 1e-9), (len(values) - 1) // 2)
    return np.mean(sorted(values)[cut : len(values) - cut])


DEFINITIONS = {"median": np.median, "trimmed-mean": trimmed}


def patches(count, masked, seed=0):
    rng = np.random.default_rng(seed)
    for number in range(count):
        values = rng.standard_normal(SPEC.size).astype(np.float32)
        if masked and number % 3:
            mask = rng.random(SIZE) < 0.4
            yield Patch(Entries(mask), values[:SIZE][mask])
        else:
            yield Patch(Everything(), values[:SIZE])


def combined(rule, given, weights=None, folder=None, base=BEFORE):
    combination = RULES[rule].make(SPEC, RoundInputs(base, 0.2, folder))
    for patch, weight in zip(given, weights or [10] * 1000, strict=False):
        combination.add(patch, weight)
    return combination.over(BEFORE)


@pytest.mark.parametrize("count", [1, 2, 5, 10, 11])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rule", DEFINITIONS)
def test_each_entry_is_combined_over_the_devices_that_sent_it(rule, masked, count):
    given = list(patches(count, masked))
    found = combined(rule, given)
    for entry in range(SPEC.size):
        sent = [patch.apply(BEFORE, SPEC)[entry] for patch in given if patch.selection.mask(SPEC)[entry]]
        wanted = DEFINITIONS[rule](np.array(sent, np.float64)) if sent else BEFORE[entry]
        assert found[entry] == np.float32(wanted)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_and_files_change_no_bit(rule, masked, tmp_path, monkeypatch):
    given = list(patches(7, masked))
    at_once = combined(rule, given)
    monkeypatch.setattr(update_rows, "MOST_BYTES", 7 * 4 * 8)  # blocks of 8 entries
    monkeypatch.setattr(update_rows, "MOST_IN_MEMORY", 64)
    in_blocks = combined(rule, given, folder=tmp_path)
    assert at_once.tobytes() == in_blocks.tobytes() or rule == "krum"
    np.testing.assert_allclose(in_blocks, at_once)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("masked", [False, True])
def test_a_block_of_all_updates_is_bounded_and_blocks_cover_each_entry_once(masked, monkeypatch):
    monkeypatch.setattr(update_rows, "MOST_BYTES", 9 * 4 * 8)
    rows = update_rows.UpdateRows(SPEC)
    for patch in patches(9, masked):
        rows.add(patch)
    blocks = list(rows.blocks(absent=np.nan))
    rows.close()
    assert len(blocks) > 2
    assert all(block.values.nbytes <= update_rows.MOST_BYTES for block in blocks)
    assert [entry for block in blocks for entry in range(SIZE)[block.part]] == list(range(SIZE))


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    given = list(patches(2, masked=False))
    monkeypatch.setattr(update_rows.SpooledTemporaryFile, "write", full)
    with pytest.raises(StoreError, match="No space left on device"):
        combined("median", given, folder=tmp_path)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
def test_an_update_of_weight_0_does_not_count(rule):
    given = list(patches(6, masked=False))
    assert combined(rule, given, [0, *[10] * 5]).tobytes() == combined(rule, given[1:]).tobytes()
    assert combined(rule, given[:1], [0]).tobytes() == BEFORE.tobytes()


def test_krum_keeps_the_updates_that_are_near_each_other_and_weighs_them():
    rng = np.random.default_rng(1)
    near = [BEFORE + 0.1 * rng.standard_normal(SPEC.size).astype(np.float32) for _ in range(8)]
    far = [BEFORE + 5, BEFORE - 5]
    given = [Patch(Everything(), values[:SIZE].astype(np.float32)) for values in [far[0], *near, far[1]]]
    weights = list(range(1, 11))
    mean = CoveredMean(SPEC)
    for patch, weight in zip(given[1:9], weights[1:9], strict=True):
        mean.add(patch, weight)
    np.testing.assert_array_equal(combined("krum", given, weights), mean.over(BEFORE))


def test_the_scores_of_krum_are_those_of_the_paper():
    places = np.array([0.0, 1.0, 2.0, 4.0, 100.0])
    distances = (places[:, None] - places[None, :]) ** 2
    # n - f - 2 = 2 nearest others: 1 + 4, 1 + 1, 1 + 4, 4 + 9, 96² + 98²; equal scores: the first
    assert nearest(distances, 1).tolist() == [True, True, True, True, False]
    assert nearest(distances, 2).tolist() == [True, True, True, False, False]
