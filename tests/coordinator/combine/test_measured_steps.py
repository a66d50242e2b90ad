"""Clipping, and the figures of each update."""

import numpy as np
import pytest
from tests.conftest import tiny_spec

from fleetune.coordinator.combine.measured_steps import MeasuredSteps, Step, sampled_entries, typical_rms
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

SPEC = tiny_spec()
SIZE = SPEC.num_parameters
BASE = np.linspace(-1, 1, SPEC.size, dtype=np.float32)


def patch_of(step, mask=None):
    values = (BASE + step)[:SIZE].astype(np.float32)
    return Patch(Everything(), values) if mask is None else Patch(Entries(mask), values[mask])


def measured(patches, bound=None, weights=None):
    steps = MeasuredSteps(CoveredMean(SPEC), BASE, SPEC, len(patches), bound)
    for patch, weight in zip(patches, weights or [10] * len(patches), strict=True):
        steps.add(patch, weight)
    return steps.over(BASE), steps.steps


def mean(patches, weights):
    combination = CoveredMean(SPEC)
    for patch, weight in zip(patches, weights, strict=True):
        combination.add(patch, weight)
    return combination.over(BASE)


@pytest.fixture
def steps():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SPEC.size).astype(np.float32) * size for size in (0.1, 0.2, 0.3, 3.0)]


@pytest.fixture
def masks():
    rng = np.random.default_rng(1)
    return [rng.random(SIZE) < share for share in (0.2, 0.5, 0.9, 0.5)]


def test_without_a_bound_the_mean_has_the_same_bits(steps, masks):
    for given in ([patch_of(step) for step in steps], list(map(patch_of, steps, masks))):
        assert measured(given)[0].tobytes() == mean(given, [10] * 4).tobytes()


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_is_clipped_to_the_bound_and_others_are_not(steps, masks, masked):
    given = [patch_of(step, mask if masked else None) for step, mask in zip(steps, masks, strict=True)]
    weights = [10, 20, 30, 40]
    found, figures = measured(given, 0.5, weights)
    assert [one.factor < 1 for one in figures] == [False, False, False, True]
    where = masks[3] if masked else np.ones(SIZE, bool)
    rms = np.sqrt(np.mean(np.square(steps[3][:SIZE][where].astype(np.float64))))
    assert figures[3].rms == pytest.approx(rms, rel=1e-5)
    scaled = patch_of(steps[3] * (0.5 / rms), masks[3] if masked else None)
    np.testing.assert_allclose(found, mean([*given[:3], scaled], weights), atol=1e-6)


def test_the_size_of_a_step_does_not_depend_on_how_much_is_sent(steps):
    step = np.full(SPEC.size, 0.25, np.float32)
    few = np.arange(SIZE) < 3
    _, figures = measured([patch_of(step), patch_of(step, few)])
    assert figures[0].rms == pytest.approx(0.25, rel=1e-6)
    assert figures[1].rms == pytest.approx(0.25, rel=1e-6)


def test_huge_numbers_are_clipped_too():
    huge = Patch(Everything(), np.full(SIZE, 1e30, np.float32))
    small = patch_of(np.full(SPEC.size, 0.1, np.float32))
    found, figures = measured([small, huge], bound=0.1)
    assert figures[1].rms == pytest.approx(1e30, rel=1e-6)
    assert np.abs(found - BASE).max() < 0.11


def test_cosines_point_with_and_against_the_median_step():
    step = np.linspace(1, 2, SPEC.size, dtype=np.float32)
    flat = np.zeros(SPEC.size, np.float32)
    given = [patch_of(one) for one in (step, 2 * step, -100 * step, 3 * step, flat)]
    assert [one.cosine for one in measured(given)[1]] == [
        pytest.approx(1),
        pytest.approx(1),
        pytest.approx(-1),
        pytest.approx(1),
        None,
    ]


def test_a_cosine_covers_the_entries_that_a_device_sent():
    step = np.linspace(-1, 2, SPEC.size, dtype=np.float32)
    up = step[:SIZE] > 0
    given = [patch_of(step), patch_of(step), patch_of(step), patch_of(-step, up), patch_of(step, ~up)]
    assert [one.cosine for one in measured(given)[1]] == [pytest.approx(one) for one in (1, 1, 1, -1, 1)]


def test_the_typical_size_is_the_median_of_the_updates_that_count():
    sizes = [Step(1.0, 1.0, True), Step(2.0, 1.0, True), Step(9.0, 1.0, True), Step(99.0, 1.0, False)]
    assert typical_rms(sizes) == 2.0
    assert typical_rms([]) is None
    assert typical_rms([Step(0.0, 1.0, True)]) is None


def test_the_sample_is_bounded_for_large_models_and_many_updates():
    assert sampled_entries(100, 10).tolist() == list(range(100))
    assert 500 < sampled_entries(10**7, 10).size <= 512
    assert sampled_entries(10**7, 10**6).size <= 64
