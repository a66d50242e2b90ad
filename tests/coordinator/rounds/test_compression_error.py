"""What encodings leave for later: told by devices, remembered, and worth as much as it delays."""

import pytest
from tests.coordinator.rounds.proposals.test_planner import BYTES, playing
from tests.coordinator.rounds.test_engine import Script

from fleetune.coordinator.rounds.compression_error import CompressionErrors
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.protocols.method.choice import RatioCandidate
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import SLOWING

UPLINKS = tuple(encodings.find(name).cost for name in ("raw", "int4", "lowrank"))
RAW, INT4, LOWRANK = range(3)


class SendingThinly(Script):
    """A fleet of three devices on thin links, in a run with these encodings of updates."""

    def __init__(self):
        super().__init__(rounds=200, objective=BYTES, start_with=3)
        self.engine = RoundEngine(self.run, self.round, planner=Planner(BYTES, UPLINKS))
        whole = RatioCandidate(1.0, 22.0, 10_000, 8.0, 1.0, 4.0, values_up=9_900, values_s=20.0)
        self.ready("a", "b", "c", affords=(whole,), ratio=1.0, values=(1.0, 0.5, 0.36))

    @property
    def asked_for(self):
        return [self.state.members[name].assigned.uplink for name in "abc"]

    def replies(self, *errors):
        for name, share in zip("abc", errors, strict=True):
            self.update(name, compression_error=share)


def test_it_is_as_usual_where_nobody_tells():
    usual = tuple(one.utility_factor() for one in UPLINKS)
    assert CompressionErrors().utility_factors(UPLINKS) == usual
    assert CompressionErrors().utility_factors(()) == (1.0,), "a run with its own encoding alone"
    assert CompressionErrors((0.0, None)).utility_factors(UPLINKS) == usual, (
        "of a state that knew fewer encodings"
    )
    assert 1 == usual[RAW] == usual[INT4] > usual[LOWRANK]


def test_what_waits_delays_and_noise_does_not():
    assert CompressionErrors((0.3, 0.3, 0.3)).utility_factors(UPLINKS) == pytest.approx(
        (1, 1, 1 / (1 + 0.3 * SLOWING))
    )


def test_the_median_of_a_round_counts_and_rounds_are_blended():
    first = CompressionErrors().after({LOWRANK: (0.1, 0.2, 1.0)}, UPLINKS)
    assert first.shares == (None, None, 0.2), "one liar is none of three"
    assert first.after({LOWRANK: (0.7,)}, UPLINKS).shares[LOWRANK] == pytest.approx(0.3)


def test_what_nobody_is_asked_for_goes_back_to_the_usual():
    known = CompressionErrors((None, None, 1.0))
    for _ in range(200):
        known = known.after({INT4: (0.1,)}, UPLINKS)
    assert known.shares[LOWRANK] == pytest.approx(UPLINKS[LOWRANK].compression_error, abs=0.02)
    assert known.shares[INT4] == pytest.approx(0.1)


def test_an_encoding_that_leaves_more_than_it_saves_is_asked_for_no_more():
    """A quarter fewer bytes than by int4 are worth little that waits, and not most of an update."""
    fleet = SendingThinly()
    assert fleet.state.compression_errors == CompressionErrors()
    for _ in range(4):
        fleet.replies(0.05, 0.05, 0.05)
    assert fleet.asked_for == [LOWRANK] * 3
    for _ in range(20):
        fleet.replies(0.9, 0.9, 0.9)
    assert fleet.asked_for == [INT4] * 3


def test_one_that_lies_changes_nothing_for_the_others():
    fleet = SendingThinly()
    for _ in range(20):
        fleet.replies(0.05, 1.0, 0.05)
    assert fleet.asked_for == [LOWRANK] * 3
    assert fleet.state.compression_errors.shares[LOWRANK] == pytest.approx(0.05)


def test_it_is_known_after_a_restart():
    fleet = SendingThinly()
    fleet.replies(0.3, 0.3, 0.3)
    before = fleet.state.compression_errors
    fleet.restart()
    assert fleet.state.compression_errors == before != CompressionErrors()


def test_without_an_objective_nothing_is_noted():
    fleet = Script(start_with=1)
    fleet.ready("a")
    fleet.update("a", compression_error=0.5)
    assert fleet.state.compression_errors == CompressionErrors()
    assert fleet.state.members["a"].observed.compression_error is None
    paced = playing(start_with=1)
    paced.ready("a", affords=(RatioCandidate(1.0, 2.0),), ratio=1.0)
    paced.update("a", compression_error=0.5)
    assert paced.state.compression_errors == CompressionErrors(), (
        "a run with its own encoding alone has none to choose"
    )
