"""What a device says it could do, where the coordinator proposes ratios."""

import msgspec
import pytest
from tests.helpers.talk import Coordinating, run_settings

from fleetune.protocols.method.choice import MOST_CHOICES, RATIOS, Budget, RatioCandidate
from fleetune.protocols.settings.objective import ObjectiveSection


@pytest.fixture
def talk(tmp_path):
    """A run of two devices whose coordinator proposes ratios."""
    settings = run_settings("fedspu", start_with=2)
    settings = msgspec.structs.replace(settings, objective=ObjectiveSection("time"))
    talk = Coordinating.of(tmp_path, settings, proposes=True)
    yield talk
    talk.close()


def affording(*ratios, round_s=1.0):
    return tuple(RatioCandidate(ratio, round_s) for ratio in ratios)


def test_what_it_affords_is_heard_and_proposed(talk):
    talk.greet("a", num_samples=10, affords=affording(*RATIOS))
    talk.greet("b", num_samples=10, affords=affording(0.3))
    members = talk.run.controller.members
    assert members["b"].assigned == Budget(0.3)
    assert members["a"].assigned.ratio in RATIOS


@pytest.mark.parametrize(
    "affords",
    [
        affording(0.123),
        affording(0.5, 0.2),
        affording(0.5, 0.5),
        affording(0.5, round_s=1e16),
        affording(0.5, round_s=-1.0),
        affording(*RATIOS) * (MOST_CHOICES // len(RATIOS) + 1),
    ],
)
def test_what_no_device_affords_is_refused_and_counted(talk, affords):
    talk.greet("a", num_samples=10, affords=affords)
    assert "a" not in talk.run.controller.members
    assert talk.run.controller.ledger.refusals == {"PacketCorrupt": 1}
    talk.greet("a", num_samples=10, affords=affording(*RATIOS))
    assert talk.run.controller.members["a"].ready


@pytest.mark.parametrize("idle_w", [-1.0, 1e5, float("nan")])
def test_a_board_that_cannot_be_is_refused_and_counted(talk, idle_w):
    talk.greet("a", num_samples=10, affords=affording(*RATIOS), idle_w=idle_w)
    assert "a" not in talk.run.controller.members
    talk.greet("a", num_samples=10, affords=affording(*RATIOS), idle_w=2.5)
    assert talk.run.controller.members["a"].report.idle_w == 2.5
