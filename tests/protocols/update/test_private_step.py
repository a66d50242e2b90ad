"""Clipping and noise of one step: the bound holds for what is sent, and the noise is what epsilon assumes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.conftest import tiny_spec

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.private_noise import secret_normal
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.private_step import clipped, noised, step_norm, task_values
from fleetune.protocols.update.selection import Everything, Layers, Neurons

SPEC = tiny_spec()
CLIP = 0.5


def drawn(name, size=1000, scale=1.0):
    return (scale * Key.of(name).normal(size)).astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.floats(1e-12, 1e12),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
    st.integers(1, 3000),
)
def test_no_step_is_longer_than_the_clip_after_rounding(seed, clip, weight_scale, step_scale, size):
    start = drawn(f"{seed} start", size, weight_scale)
    values = start + drawn(f"{seed} step", size, step_scale)
    bounded = clipped(values, start, clip)
    assert bounded.dtype == np.float32
    assert step_norm(bounded, start) <= clip


def test_a_step_within_the_clip_stays_bit_for_bit_and_a_longer_one_keeps_its_direction():
    start = drawn("start")
    near, far = start + drawn("near", scale=1e-3), start + drawn("far")
    assert clipped(near, start, CLIP) is near
    moved = clipped(far, start, CLIP).astype(np.float64) - start
    step = far.astype(np.float64) - start
    cosine = moved @ step / np.linalg.norm(moved) / np.linalg.norm(step)
    assert np.linalg.norm(moved) == pytest.approx(CLIP, rel=1e-5)
    assert cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_becomes_zero(bad):
    start = drawn("start")
    values = start.copy()
    values[7] = bad
    assert np.array_equal(clipped(values, start, CLIP), start)


def noise_of(draw, size=200_000, deviation=0.7):
    """The noise in each entry, over its due deviation: the output minus the known clipped step."""
    start = np.zeros(size, np.float32)
    values = drawn("far", size)
    step = CLIP * values.astype(np.float64) / np.linalg.norm(values.astype(np.float64))
    return (noised(values, start, CLIP, deviation, draw) - step) / deviation


@pytest.mark.parametrize(
    ("draw", "least"), [(Key.of("noise").normal, 1e-3), (secret_normal, 1e-9)], ids=["key", "secret"]
)
def test_the_noise_is_normal_with_its_deviation_and_independent(draw, least):
    """Kolmogorov-Smirnov for the shape, chi-square for the variance, and lag-1 correlation.

    The key's draws never change. The secret ones do: a test of ours fails by chance once in 1e9 runs.
    """
    noise = noise_of(draw)
    assert stats.kstest(noise, "norm").pvalue > least
    squares = float(np.sum(noise**2))
    assert 2 * min(stats.chi2.cdf(squares, noise.size), stats.chi2.sf(squares, noise.size)) > least
    lag = float(noise[1:] @ noise[:-1]) / np.sqrt(noise.size - 1)
    assert 2 * stats.norm.sf(abs(lag)) > least


@pytest.mark.parametrize("factor", [0.0, 0.98, 1.02])
def test_the_test_of_the_noise_finds_a_deviation_that_is_wrong_by_two_percent(factor):
    noise = noise_of(lambda count, first: factor * Key.of("noise").normal(count, first))
    squares = float(np.sum(noise**2))
    assert 2 * min(stats.chi2.cdf(squares, noise.size), stats.chi2.sf(squares, noise.size)) < 1e-9


def test_secret_noise_is_never_drawn_again():
    assert not np.isin(secret_normal(1000), secret_normal(1000)).any()


def test_a_step_is_taken_from_the_entries_of_its_task():
    weights = drawn("weights", SPEC.size)
    whole = Patch.of(weights, Everything(), SPEC)
    part = Patch.of(weights, Neurons(0.5, 3), SPEC)
    assert task_values(whole, whole, SPEC) is whole.values
    assert np.array_equal(task_values(whole, part, SPEC), part.values)
    assert np.array_equal(task_values(part, part, SPEC), part.values)
    with pytest.raises(PacketCorrupt, match="no step from the task"):
        task_values(Patch.of(weights, Layers((next(iter(SPEC.layers)),)), SPEC), whole, SPEC)
