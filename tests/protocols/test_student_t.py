"""Student's t, against values of printed tables and its own symmetries."""

import math

import pytest

from fleetune.protocols.student_t import student_t_quantile, student_t_share

TABLE = {  # Abramowitz and Stegun, table 26.10
    (0.9, 1): 3.078,
    (0.9, 4): 1.533,
    (0.95, 4): 2.132,
    (0.975, 7): 2.365,
    (0.9, 19): 1.328,
    (0.99, 30): 2.457,
    (0.995, 120): 2.617,
}


@pytest.mark.parametrize(("at", "wanted"), TABLE.items())
def test_quantiles_are_those_of_the_tables(at, wanted):
    assert student_t_quantile(*at) == pytest.approx(wanted, abs=6e-4)


@pytest.mark.parametrize("freedom", [0.5, 1.0, 3.7, 50.0, 1e5])
def test_a_quantile_has_its_share_below_it(freedom):
    assert student_t_share(0.0, freedom) == 0.5
    for share in (0.5, 0.6, 0.9, 0.999):
        assert student_t_share(student_t_quantile(share, freedom), freedom) == pytest.approx(share, abs=1e-10)


def test_with_one_degree_of_freedom_it_is_cauchys_and_with_many_the_normal():
    for value in (0.1, 1.0, 20.0):
        assert student_t_share(value, 1) == pytest.approx(0.5 + math.atan(value) / math.pi, abs=1e-12)
        normal = 0.5 * (1 + math.erf(value / math.sqrt(2)))
        assert student_t_share(value, 1e6) == pytest.approx(normal, abs=1e-6)
