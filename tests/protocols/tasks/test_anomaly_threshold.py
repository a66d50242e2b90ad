"""The threshold of anomalies: which order statistic it is, and that its false alarms are as stated."""

import numpy as np
import pytest
from scipy import stats

from fleetune.protocols.student_t import beta_quantile
from fleetune.protocols.tasks.anomaly_threshold import false_alarms_of, num_needed, threshold_of


@pytest.mark.parametrize(
    ("num_samples", "quantile", "rank", "expected"),
    [
        (99, 0.99, 99, 0.01),
        (199, 0.99, 198, 0.01),
        (40, 0.99, 40, 1 / 41),  # too few: the largest
        (1, 0.5, 1, 0.5),
        (10, 0.75, 9, 2 / 11),
    ],
)
def test_the_threshold_is_an_order_statistic(num_samples, quantile, rank, expected):
    errors = np.random.default_rng(1).permutation(num_samples).astype(float)
    assert threshold_of(errors, quantile) == rank - 1
    assert false_alarms_of(num_samples, quantile, "test").expected == pytest.approx(expected)
    assert (num_samples >= num_needed(quantile)) == (expected <= 1 - quantile + 1e-12)


@pytest.mark.parametrize(("num_samples", "quantile"), [(30, 0.99), (99, 0.99), (500, 0.99), (40, 0.9)])
def test_new_normal_samples_exceed_it_as_often_as_it_says(num_samples, quantile):
    known = false_alarms_of(num_samples, quantile, "test")
    draws = np.random.default_rng(2).random((4000, num_samples))  # a sample's error is its own rank
    rates = np.array([1 - threshold_of(one, quantile) for one in draws])
    assert rates.mean() == pytest.approx(known.expected, rel=0.1)
    assert ((rates >= known.low) & (rates <= known.high)).mean() == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 40), (2, 198), (50, 50), (900, 9)])
def test_quantiles_of_the_beta_distribution_are_those_of_scipy(a, b):
    for share in (0.025, 0.5, 0.975):
        assert beta_quantile(share, a, b) == pytest.approx(stats.beta.ppf(share, a, b), rel=1e-9)


def test_the_line_says_rate_interval_and_samples():
    words = str(false_alarms_of(99, 0.99, "validation"))
    assert words == (
        "expected false alarms 1.0% of normal samples (95 % interval 0.0% to 3.7%; by 99 validation samples)"
    )
