"""The paired test: how often it is wrong, and what it says of few, equal, weighted and skewed samples."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fleetune.edge_agent.extensions.adoption.paired_test import (
    LEAST_SAMPLES,
    newest_count_most,
    paired_difference,
)

TIMES = 2000
DRAWS = {  # differences of mean 0
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "right or wrong": lambda rng, n: rng.choice([-1.0, 0.0, 0.0, 0.0, 1.0], n),
    "seldom much worse": lambda rng, n: rng.lognormal(0, 1, n) - math.exp(0.5),
    "seldom much better": lambda rng, n: math.exp(0.5) - rng.lognormal(0, 1, n),
}
SKEWED = "seldom much worse"


def rate(draw, num_samples, confidence, shift=0.0):
    """How often a model that is worse by `shift` is called better."""
    rng = np.random.default_rng(0)
    others = np.zeros(num_samples)
    found = (paired_difference(draw(rng, num_samples) + shift, others) for _ in range(TIMES))
    return np.mean([one.shows_better(confidence) for one in found])


@pytest.mark.parametrize("num_samples", [8, 20, 60])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_model_that_is_no_better_is_called_better_about_as_often_as_said(kind, num_samples):
    usual = {8: 0.165, 20: 0.125, 60: 0.125}
    most = ({8: 0.23, 20: 0.18, 60: 0.15} if kind == SKEWED else usual)[num_samples]
    assert 0.03 < rate(DRAWS[kind], num_samples, 0.9) < most


def test_a_model_that_is_worse_is_called_better_less_often_and_a_better_one_is_found():
    assert rate(DRAWS["normal"], 20, 0.9, shift=0.2) < 0.03
    assert rate(DRAWS["normal"], 20, 0.9, shift=-0.5) > 0.75
    assert rate(DRAWS["normal"], 20, 0.5, shift=0.0) == pytest.approx(0.5, abs=0.04)


def test_few_samples_show_nothing_however_clear_they_are():
    losses = np.linspace(0.0, 0.1, LEAST_SAMPLES)
    assert paired_difference(losses, losses + 1 + losses).shows_better(0.9)
    few = paired_difference(losses[:-1], losses[:-1] + 1 + losses[:-1])
    assert not few.shows_better(0.9)
    assert few.shows_better(0.5)  # that asks for the lower mean alone
    assert not few.shows_worse(0.9)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_of_none_or_one_sample_nothing_is_known(num_samples):
    found = paired_difference(np.zeros(num_samples), np.ones(num_samples))
    assert found.standard_error == math.inf
    assert found.interval(0.9) == (-math.inf, math.inf)
    assert not found.shows_better(0.9)


def test_the_same_model_is_neither_better_nor_worse():
    losses = np.arange(20.0)
    found = paired_difference(losses, losses)
    assert found.interval(0.9) == (0.0, 0.0)
    assert not any((found.shows_better(c), found.shows_worse(c)) == (True, True) for c in (0.5, 0.9))
    assert not found.shows_better(0.9)
    assert not found.shows_better(0.5)


@given(arrays(np.float64, st.integers(2, 30), elements=st.floats(-5, 5)), st.floats(0.5, 0.99))
def test_what_is_better_the_one_way_is_worse_the_other(differences, confidence):
    zeros = np.zeros(differences.size)
    one, other = paired_difference(differences, zeros), paired_difference(zeros, differences)
    assert one.shows_better(confidence) == other.shows_worse(confidence)
    assert not (one.shows_better(confidence) and one.shows_worse(confidence))
    low, high = one.interval(confidence)
    assert low <= high


def test_weights_count_as_often_as_they_say_and_the_newest_count_most():
    rng = np.random.default_rng(1)
    losses, others = rng.normal(size=10), rng.normal(size=10)
    none = np.r_[np.ones(10), np.zeros(5)]
    longer = [np.r_[values, rng.normal(size=5)] for values in (losses, others)]
    assert paired_difference(*longer, none) == paired_difference(losses, others)
    assert newest_count_most(4, None) is None
    np.testing.assert_allclose(newest_count_most(4, 2.0), [2**-1.5, 0.5, 2**-0.5, 1.0])
    # worse of late, better before: with a short half-life it is worse
    trend = np.linspace(-1.0, 0.6, 40) + rng.normal(scale=0.01, size=40)
    assert paired_difference(trend, np.zeros(40)).mean < 0
    weights = [2 ** (-age / 8) for age in range(40)]
    sum_w, sum_w2 = sum(weights), sum(weight**2 for weight in weights)
    aged = paired_difference(trend, np.zeros(40), newest_count_most(40, 8.0))
    assert aged.mean > 0
    assert aged.num_samples == pytest.approx(sum_w**2 / sum_w2)
