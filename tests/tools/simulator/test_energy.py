"""What boards of a simulated fleet drew until a round's end: at work as they tell, and idling between."""

import pytest

from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.simulator.energy import joules_by_round


def closed(number, *replies, asked=("a", "b")):
    """A round of ten seconds; a reply: device, seconds at work, joules."""
    devices = {
        device: DeviceRound(
            1.0, 1, 1, Measures(5, 5, 0.1, 0.1, 0.1), RoundCost(train_s=seconds, joules=joules)
        )
        for device, seconds, joules in replies
    }
    return RoundRecord(number, 1, False, 10.0 * (number - 1), 10.0 * number, asked, devices)


def test_a_board_idles_while_it_does_not_work():
    records = [closed(1, ("a", 4.0, 20.0), ("b", 10.0, 30.0)), closed(2, ("a", 4.0, 20.0), ("b", 10.0, 30.0))]
    assert list(joules_by_round(records, {"a": 2.0, "b": 1.0})) == pytest.approx([50 + 2 * 6, 100 + 2 * 12])


def test_who_is_late_idles_as_far_as_is_known_and_who_is_gone_draws_nothing():
    records = [closed(1, ("a", 4.0, 20.0)), closed(2, ("a", 4.0, 20.0), asked=("a",))]
    assert list(joules_by_round(records, {"a": 0.0, "b": 1.0, "never-asked": 100.0})) == pytest.approx(
        [30.0, 50.0]
    )


def test_joules_that_a_reply_does_not_tell_count_as_none_of_its_work():
    (found,) = joules_by_round([closed(1, ("a", 4.0, None))], {"a": 1.0})
    assert found == pytest.approx(6.0)
