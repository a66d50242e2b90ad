"""Who is asked with prefer = "oort": those that teach most in least time, and nobody never."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.coordinator.rounds.test_engine import Script, asked

from fleetune.coordinator.rounds.engine_state import EngineState, Member, Observed, RoundAttempt
from fleetune.coordinator.rounds.policies.selection import draw
from fleetune.coordinator.rounds.policies.utility_selection import longest_wait, rounds_waited, utilities
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.round import RoundSection

OORT = RoundSection(participants=3, prefer="oort")


def member(name="a", *, samples=100, loss=1.0, took_s=10.0, asked_in=5, says_s=None):
    report = DeviceReport(name, num_samples=samples, round_s=says_s)
    observed = Observed(loss=loss, took_s=took_s)
    return Member(report, ready=True, asked=RoundAttempt(asked_in, 1), observed=observed)


def alone(number=6, **fields):
    """What a device is worth beside three usual ones, over theirs."""
    found = utilities({"a": member(**fields), **{name: member(name) for name in "bcd"}}, number)
    return found["a"] / found["b"]


def test_a_device_like_the_others_is_worth_as_much():
    assert alone() == 1


def test_what_is_not_learned_yet_is_worth_more_and_slowness_less():
    assert alone(loss=2.0) > 1.5
    assert alone(samples=200) > 1.5
    assert alone(loss=0.1) < 0.5
    assert alone(took_s=20) == pytest.approx(1 / 4)
    assert alone(took_s=1) == 1
    assert alone(number=100, asked_in=1) > 1 > alone(number=100, asked_in=50) > alone(number=100, asked_in=90)


def test_who_never_replied_is_thought_the_best_and_as_fast_as_it_says():
    assert alone(loss=None, took_s=None) == 1
    assert alone(loss=None, took_s=None, says_s=20) == pytest.approx(1 / 4)
    found = utilities({"a": member(loss=None), "b": member(loss=3.0), "c": member(), "d": member()}, 6)
    assert found["a"] == found["b"] > found["c"]


def test_claims_beyond_twice_the_median_gain_nothing():
    assert alone(loss=1e30) == alone(loss=2.0)
    assert alone(samples=10_000_000) == alone(samples=200)
    assert alone(loss=1e30, samples=10_000_000) < 4.2
    assert alone(says_s=1e-9, took_s=20) == pytest.approx(1 / 4), "the coordinator's own clock counts"


def rounds(members, number, section=OORT):
    """Who is drawn in so many rounds, in which nothing else changes."""
    state, drawn = EngineState(members=dict(members)), []
    for done in range(number):
        state.change(rounds_done=done)
        drawn.append(draw(tuple(sorted(members)), state, section, 7))
        for name in drawn[-1]:
            state.put(name, asked=state.round_attempt)
    return drawn


def test_fast_devices_take_part_more_often_and_slow_ones_together():
    members = {f"d{n}": member(f"d{n}", took_s=100.0 if n < 4 else 1.0, asked_in=0) for n in range(12)}
    drawn = rounds(members, 120)
    share = Counter(name for one in drawn for name in one)
    assert min(share.values()) >= 120 // (longest_wait(12, 3) + 1)
    assert min(share[f"d{n}"] for n in range(4, 12)) > 2 * max(share[f"d{n}"] for n in range(4))
    slow = [sum(name in ("d0", "d1", "d2", "d3") for name in one) for one in drawn]
    assert sum(count > 0 for count in slow) < 0.6 * sum(slow), "they share rounds"


@given(
    losses=st.lists(st.none() | st.floats(0, 1e30), min_size=1, max_size=15),
    seconds=st.none() | st.floats(1e-9, 1e12),
    participants=st.integers(1, 6),
    prefer=st.sampled_from(["oort", "tiers"]),
)
def test_nobody_waits_longer_than_is_said(losses, seconds, participants, prefer):
    section = RoundSection(participants=participants, prefer=prefer)
    members = {
        f"d{n:02}": member(f"d{n:02}", loss=loss, took_s=seconds if n % 2 else None, asked_in=0)
        for n, loss in enumerate(losses)
    }
    turns = -(-len(members) // participants)  # that it takes to ask everybody once
    wait, last = longest_wait(len(members), participants), dict.fromkeys(members, 0)
    for number, drawn in enumerate(rounds(members, 40, section), 1):
        assert list(drawn) == sorted(set(drawn))
        assert len(drawn) == min(participants, len(members))
        for name in drawn:
            assert number - last[name] <= wait + turns
            last[name] = number
        assert all(number - one < wait + turns for one in last.values())


def test_the_engine_times_replies_and_notes_what_they_tell():
    script = Script(participants=2, prefer="oort", start_with=2)
    assert asked(script.ready("a", "b")) == ("a", "b")
    script.now = 5.0
    script.update("a", loss=1.5)
    known = script.state.members["a"]
    assert (known.observed.took_s, known.observed.loss) == (5, 1.5)
    assert script.state.members["b"].observed.took_s is None
    script.now = 7.0
    script.update("b", loss=None)
    assert (script.state.members["b"].observed.took_s, script.state.members["b"].observed.loss) == (7, None)
    assert rounds_waited(script.state.members["a"], 4) == 1


def test_without_it_nothing_is_noted():
    script = Script(participants=2, start_with=2)
    script.ready("a", "b")
    script.update("a", loss=1.5)
    known = script.state.members["a"]
    assert (known.observed.asked_at, known.observed.took_s, known.observed.loss) == (None, None, None)
