"""A payload over an emulated slow link, in network namespaces that the measurement makes and removes."""

import pytest

from fleetune.tools.bench.slow_link import Job, measure
from fleetune.tools.links.network_namespaces import obstacle

OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or "")


@pytest.mark.parametrize(("direction", "which"), [("up", "amqtt"), ("down", "auto")])
def test_a_control_message_never_waits_behind_a_payload(direction, which):
    """1.5 MB at 2 Mbit/s take three times the keepalive; unwindowed, the last Ping would wait 6 s."""
    report = measure(Job(megabytes=1.5, mbps=2.0, direction=direction, keepalive_s=2, which=which))
    assert report.exact
    assert report.losses == []
    assert report.pings >= 10
    assert report.control_max_s < 1.0
    assert report.goodput_share > 0.5
