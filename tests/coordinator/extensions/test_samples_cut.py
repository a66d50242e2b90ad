"""`round.max_share`: how much one update may weigh in a round's mean."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.coordinator.extensions.max_share import samples_cut

HUGE = 10_000_000


@pytest.mark.parametrize(
    ("claimed", "max_share", "cut"),
    [
        ([100] * 8, 0.3, {}),
        ([HUGE, *[100] * 7], 0.3, {0: 300}),  # 300 / 1000
        ([HUGE, *[100] * 7], 0.1, {0: 233}),  # never less than 2 / 8: 233 / 933
        ([HUGE, 2 * HUGE, *[100] * 8], 0.3, {0: 600, 1: 600}),  # 600 / 2000 each
        ([500, 420, *[10] * 8], 0.3, {0: 60, 1: 60}),  # the second only once the first is cut
        ([HUGE, 100, 100], 0.3, {0: 400}),  # of three, two thirds
        ([HUGE, 1], 0.3, {}),
        ([HUGE], 0.3, {}),
        ([HUGE, 0, 0, 0, 0], 0.3, {}),  # updates without samples have no share to take over
        ([HUGE, 5, 5, 5, 0], 0.3, {0: 15}),  # four of them count
        ([HUGE, *[1] * 9], 1, {}),
        ([0, 0], 0.3, {}),
        ([], 0.3, {}),
    ],
)
def test_worked_cases(claimed, max_share, cut):
    assert samples_cut(dict(enumerate(claimed)), max_share) == cut


@given(
    st.dictionaries(st.integers(0, 99), st.integers(0, HUGE), max_size=40),
    st.floats(0.001, 1) | st.just(0.3),
)
def test_shares_are_within_the_limit_in_the_same_order_and_others_keep_their_weight(claimed, max_share):
    cut = samples_cut(claimed, max_share)
    weights = {device: cut.get(device, samples) for device, samples in claimed.items()}
    counted = [samples for samples in claimed.values() if samples]
    limit = max(Fraction(str(max_share)), Fraction(2, max(1, len(counted))))
    total = sum(weights.values())
    assert all(weight <= limit * total for weight in weights.values())
    assert all(0 < cut[device] < claimed[device] for device in cut)
    ascending = sorted(claimed, key=lambda device: (claimed[device], weights[device]))
    assert [weights[device] for device in ascending] == sorted(weights.values())
    assert bool(cut) == any(samples > limit * sum(counted) for samples in counted)
    if cut:  # as much as the limit allows, to a sample
        assert all(weight + 1 > limit * (total + len(cut)) * Fraction(999, 1000) for weight in cut.values())
        assert len(set(cut.values())) == 1


@given(st.permutations(range(6)))
def test_the_order_of_updates_does_not_matter(order):
    claimed = dict(enumerate([HUGE, 7000, 30, 20, 10, 10]))
    assert samples_cut({device: claimed[device] for device in order}, 0.3) == samples_cut(claimed, 0.3)
