"""What small transfers say of larger ones: a link that lets their first bytes through at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.edge_agent.budget.bandwidth_forecast import BandwidthForecast, forecast_bandwidth

FREE_BYTES, S_PER_BYTE = 3_000, 8 / 300e3  # as the kernel's TBF shapes a LoRa gateway's backhaul
INSTANT_S = 0.001


def through(num_bytes):
    """Bytes, and the seconds from a payload's offer to its end."""
    return float(num_bytes), max(INSTANT_S, (num_bytes - FREE_BYTES) * S_PER_BYTE)


def shown(*sizes, measured=S_PER_BYTE):
    return forecast_bandwidth([through(size) for size in sizes], 0.0, measured, has_bursts=True)


def test_what_came_at_once_says_nothing_of_more():
    """Real agents behind shaped links: 2,486 bytes in a millisecond, then 23,268 in 0.559 s."""
    assert shown(2_486).seconds(2_486) == pytest.approx(INSTANT_S)
    assert shown(2_486).seconds(23_268) == pytest.approx(through(23_268)[1], rel=0.05)
    assert shown(2_486, measured=0.0).seconds(23_268) < 0.02  # nobody has measured anything else


def test_two_sizes_tell_what_comes_at_once():
    link = shown(2_486, 4_713, 8_000)
    for size in (6_000, 10_000, 20_000):
        assert link.seconds(size) == pytest.approx(through(size)[1], rel=0.15)
    assert 0 < link.seconds(1_000) <= through(4_000)[1]


def test_a_link_that_is_faster_than_was_measured_is_found_out():
    for sizes in ([20_000], [20_000] * 3, [5_000, 20_000]):
        link = forecast_bandwidth([(float(size), size * 1e-6) for size in sizes], 0.0, 1e-3, has_bursts=True)
        assert link.seconds(100_000) == pytest.approx(0.1)


def test_a_reply_has_no_bytes_for_nothing():
    """It is timed until its last byte is acknowledged."""
    link = forecast_bandwidth([through(2_486), through(8_000)], 0.0, S_PER_BYTE, has_bursts=False)
    assert link == BandwidthForecast(0.0, INSTANT_S / 2_486, 8_000)


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e5)), min_size=1, max_size=10),
    st.floats(0, 10),
    st.floats(0, 1),
    st.booleans(),
    st.lists(st.floats(0, 1e9), min_size=2, max_size=2),
)
def test_more_bytes_never_take_less_and_none_less_than_nothing(seen, latency_s, measured, has_bursts, sizes):
    link = forecast_bandwidth(seen, latency_s, measured, has_bursts)
    few, many = sorted(sizes)
    assert 0 <= link.seconds(few) <= link.seconds(many)


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=1, max_size=10),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1, 1e6),
)
def test_a_link_that_was_measured_as_faster_is_never_slower(seen, one, other, num_bytes):
    fast, slow = (
        forecast_bandwidth(seen, 0.0, measured, has_bursts=True) for measured in sorted((one, other))
    )
    assert fast.seconds(num_bytes) <= slow.seconds(num_bytes)
