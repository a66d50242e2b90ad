"""Deadlines of rounds that minimise time: they follow what devices predict."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.coordinator.rounds.test_engine import DEADLINE_S, Script, asked

from fleetune.coordinator.rounds.actions import AbandonRound
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.deadline import SHORTEST_S, proposed_s
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.round import RoundSection

TIME = ObjectiveSection("time")


def predicted(**options):
    return Script(objective=TIME, **options)


def expecting(script, **round_s):
    """Devices join, each with the seconds it expects a round to take."""
    return [action for device, time_s in round_s.items() for action in script.ready(device, round_s=time_s)]


def span_s(script):
    return script.engine.wake_at - script.now


def test_a_fixed_deadline_does_not_ask_what_devices_expect():
    script = Script(start_with=2)
    expecting(script, a=2.0, b=3.0)
    assert span_s(script) == DEADLINE_S


def test_a_round_is_given_the_time_that_enough_of_those_asked_expect():
    script = predicted(participants=2, over_selection=2.0, start_with=4)
    expecting(script, a=5.0, b=4.0, c=None, d=2.0)
    assert span_s(script) == 1.5 * 4.0


def test_without_over_selection_it_is_the_slowest_of_those_asked():
    script = predicted(start_with=3, deadline_slack=2.0)
    expecting(script, a=1.0, b=4.5, c=2.0)
    assert span_s(script) == 2.0 * 4.5


def test_who_does_not_know_counts_as_the_whole_deadline():
    script = predicted(start_with=2)
    expecting(script, a=1.0, b=None)
    assert span_s(script) == DEADLINE_S


def test_only_those_that_are_asked_are_listened_to():
    script = predicted(participants=1, start_with=2)
    (chosen,) = asked(expecting(script, a=2.0, b=4.0))
    assert span_s(script) == 1.5 * {"a": 2.0, "b": 4.0}[chosen]


@pytest.mark.parametrize("said_s", [0.0, -3.0, 10.5, 1e300, math.inf, math.nan])
def test_what_cannot_be_counts_as_the_whole_deadline(said_s):
    script = predicted()
    expecting(script, a=said_s)
    assert span_s(script) == DEADLINE_S


@pytest.mark.parametrize(("said_s", "given_s"), [(1e-9, SHORTEST_S), (5e-324, SHORTEST_S), (9.0, DEADLINE_S)])
def test_a_proposal_stays_between_a_second_and_the_deadline(said_s, given_s):
    script = predicted()
    expecting(script, a=said_s)
    assert span_s(script) == given_s


def test_a_deadline_below_a_second_stands():
    script = predicted(deadline_s=0.5)
    expecting(script, a=0.1)
    assert span_s(script) == 0.5


def test_a_second_attempt_gets_the_whole_deadline():
    script = predicted(start_with=2, quorum=2)
    expecting(script, a=2.0, b=2.0)
    script.update("a")
    assert script.tick(3.0)[0] == AbandonRound(1, 1, "deadline")
    assert span_s(script) == DEADLINE_S
    script.updates("a", "b")
    assert script.state.round_attempt == (2, 1)
    assert span_s(script) == 1.5 * 2.0


def test_the_final_evaluation_gets_the_whole_deadline():
    script = predicted(rounds=1, final_evaluation=True)
    expecting(script, a=2.0)
    script.update("a")
    assert script.state.stage == "evaluating"
    assert span_s(script) == DEADLINE_S


def test_a_restart_gives_the_open_round_the_same_time_whatever_was_reported_since():
    script = predicted(start_with=2)
    expecting(script, a=2.0, b=4.0)
    expecting(script, a=None, b=1.0)
    script.restart(now=1000.0)
    assert script.engine.wake_at == 1000.0 + 6.0
    script.restart(now=2000.0, deadline_s=5.0)
    assert script.engine.wake_at == 2000.0 + 5.0


def test_a_pause_is_not_shortened_by_what_the_round_before_was_given():
    script = predicted()
    expecting(script, a=2.0)
    assert script.decline("a") == [AbandonRound(1, 1, "too-few")]
    assert script.engine.wake_at == 3.0
    script.restart(now=50.0)
    assert script.engine.wake_at == 50.0 + DEADLINE_S


def test_a_state_that_knows_of_no_proposals_goes_on_with_the_whole_deadline():
    script = predicted()
    expecting(script, a=2.0)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(script.state))
    del kept["timing"]["span_s"]
    state = msgspec.convert(kept, EngineState)
    engine = RoundEngine(script.run, script.round, state)
    engine.resume(7.0)
    assert engine.wake_at == 7.0 + DEADLINE_S


@given(
    said=st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
    participants=st.none() | st.integers(1, 8),
    slack=st.floats(1, 10),
    faster=st.integers(0, 7),
)
def test_a_proposal_is_within_its_bounds_and_never_longer_for_a_faster_device(
    said, participants, slack, faster
):
    section = RoundSection(participants=participants, deadline_s=60.0, deadline_slack=slack)

    def proposal(round_s):
        members = {f"d{i}": Member(DeviceReport(f"d{i}", round_s=s)) for i, s in enumerate(round_s)}
        state = EngineState("training", participants=tuple(members), members=members)
        return proposed_s(state, section, TIME)

    given_s = proposal(said)
    assert SHORTEST_S <= given_s <= 60.0
    known = said[faster % len(said)]
    if known is not None and known / 2 > 0 and known <= 60.0:  # half of the smallest number is 0
        quicker = [s / 2 if i == faster % len(said) else s for i, s in enumerate(said)]
        assert proposal(quicker) <= given_s
