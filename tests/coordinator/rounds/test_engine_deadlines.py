"""Rounds that take what devices expect of them into account: proposed deadlines, and who is asked first."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.coordinator.rounds.test_engine import DEADLINE_S, Script, asked, of
from tests.coordinator.rounds.test_window_engine import buffered, windowed

from fleetune.coordinator.rounds.actions import AbandonRound, CloseRound, DropReply
from fleetune.coordinator.rounds.engine_state import EngineState, Member, Observed
from fleetune.coordinator.rounds.policies.deadline import SHORTEST_S, proposed_s
from fleetune.coordinator.rounds.policies.selection import able, draw
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.coordinator import RoundSection
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.run_toml import parse_run


def predicted(**options):
    return Script(deadline="predicted", **options)


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


def test_a_second_attempt_gets_the_whole_deadline_and_the_next_round_more_than_the_first():
    script = predicted(start_with=2, quorum=2)
    expecting(script, a=2.0, b=2.0)
    script.update("a")
    assert script.tick(3.0)[0] == AbandonRound(1, 1, "deadline")
    assert span_s(script) == DEADLINE_S
    script.updates("a", "b")
    assert script.state.round_attempt == (2, 1)
    assert span_s(script) == 2 * 1.5 * 2.0


def test_rounds_that_closed_too_early_make_the_next_longer_until_all_reply():
    script = predicted(start_with=2, rounds=20, deadline_s=100.0)
    expecting(script, a=2.0, b=2.0)
    spans = []
    for reply_s in (3.5, 7.0, 7.0):  # b takes longer than it says, but less than four times its share
        spans.append(span_s(script))
        opened = script.now
        script.update("a")
        if reply_s < span_s(script):
            script.now = opened + reply_s
            script.update("b")
        else:
            assert script.tick(script.engine.wake_at)[0] == CloseRound(script.state.rounds_done, 1, ("a",))
    assert spans == pytest.approx([3.0, 6.0, 12.0])
    assert span_s(script) == pytest.approx(0.9 * 12.0)
    for _ in range(13):
        script.updates("a", "b")
    assert span_s(script) == 3.0


def test_only_whoever_was_too_slow_is_trusted_less():
    script = predicted(participants=1, start_with=2, rounds=40)
    (slow,) = asked(expecting(script, a=2.0, b=2.0))
    script.tick(3.0)
    spans = {}
    while not script.engine.finished:
        (device,) = script.state.participants
        if script.state.attempt == 1:
            spans.setdefault(device, span_s(script))
        script.update(device)
    assert spans[slow] > 3.0
    assert [time_s for device, time_s in spans.items() if device != slow] == [3.0]


def test_those_a_full_round_did_not_need_were_not_too_slow():
    script = predicted(participants=1, over_selection=2.0, start_with=2)
    expecting(script, a=2.0, b=2.0)
    script.update("a")
    assert script.update("b", (1, 1)) == [DropReply("b", 1, 1, "late")]
    script.gone("a")
    script.update("b")
    script.ready("b", round_s=2.0)
    assert script.state.participants == ("b",)
    assert span_s(script) == 3.0


def test_a_device_that_is_away_makes_no_deadline_longer():
    script = predicted(start_with=2)
    expecting(script, a=2.0, b=2.0)
    script.gone("b")
    script.update("a")
    assert of(CloseRound, script.tick(3.0)) == [CloseRound(1, 1, ("a",))]
    expecting(script, b=2.0)
    assert asked(script.update("a")) == ("a", "b")
    assert span_s(script) == 3.0


def test_devices_that_decline_make_no_deadline_longer():
    script = predicted(start_with=2)
    expecting(script, a=2.0, b=2.0)
    script.decline("b")
    script.update("a")
    assert script.state.round_attempt == (2, 1)
    assert span_s(script) == 3.0


def test_a_deadline_that_was_the_whole_one_is_not_stretched_further():
    script = predicted(start_with=2, rounds=9)
    expecting(script, a=2.0, b=None)
    for _ in range(4):
        script.update("a")
        script.tick(script.engine.wake_at)
    assert script.state.members["b"].observed.stretch == 1.0


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
    del kept["timing"]["span_s"], kept["members"]["a"]["observed"]["stretch"]
    state = msgspec.convert(kept, EngineState)
    engine, _ = type(script.engine).resume(script.run, script.round, state, 7.0)
    assert engine.wake_at == 7.0 + DEADLINE_S


def test_predicted_deadlines_are_for_synchronous_rounds():
    section = {"mode": "buffer", "buffer": 2, "deadline": "predicted"}
    content = {"run": {"name": "r"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}, "round": section}
    with pytest.raises(SettingError, match=r'^round: deadline = "predicted" is for mode = "synchronous"'):
        parse_run(content)


METERED = Conditions(metered=True)
LOW = Conditions(power="battery", battery=0.19)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, True),
        ({"round_s": DEADLINE_S}, True),
        ({"round_s": DEADLINE_S + 0.1}, False),
        ({"conditions": METERED}, False),
        ({"conditions": LOW}, False),
        ({"conditions": Conditions(power="battery", battery=0.2)}, True),
        ({"conditions": Conditions(power="charging", battery=0.05)}, True),
        ({"conditions": Conditions(battery=0.05)}, True),  # perhaps it charges
        ({"conditions": Conditions(power="battery")}, True),
        ({"conditions": Conditions(metered=False)}, True),
    ],
)
def test_what_speaks_against_asking_a_device(fields, verdict):
    section = RoundSection(deadline_s=DEADLINE_S, prefer="able", min_battery=0.2)
    assert able(DeviceReport("a", **fields), section) == verdict


def fleet(script, *, fit, unfit):
    script.ready(*unfit, conditions=METERED)
    return asked(script.ready(*fit))


def test_those_that_are_able_are_asked_first_and_others_only_for_what_is_missing():
    unfit = ("u", "v", "w")
    for fit, others in [("abcd", 0), ("abc", 0), ("a", 1), ("", 2)]:
        script = Script(participants=2, over_selection=2.0, prefer="able", start_with=len(fit) + 3)
        drawn = fleet(script, fit=tuple(fit), unfit=unfit)
        if not fit:
            drawn = script.state.participants
        assert len([device for device in drawn if device in fit]) == min(4, len(fit))
        assert len([device for device in drawn if device in unfit]) == others


def test_without_a_number_of_participants_the_quorum_is_what_others_fill_up_to():
    assert fleet(Script(prefer="able", quorum=2, start_with=4), fit=("a", "b", "c"), unfit=("u",)) == (
        "a",
        "b",
        "c",
    )
    script = Script(prefer="able", quorum=2, start_with=3)
    drawn = fleet(script, fit=("a",), unfit=("u", "v"))
    assert len(drawn) == 2
    assert "a" in drawn


def test_a_device_is_asked_again_when_its_report_has_become_better():
    script = Script(prefer="able", start_with=2)
    assert fleet(script, fit=("a",), unfit=("u",)) == ("a",)
    script.ready("u", conditions=UNKNOWN)
    assert asked(script.update("a")) == ("a", "u")


def test_who_declined_is_asked_after_those_that_are_not_able():
    script = Script(participants=1, prefer="able", start_with=2)
    assert fleet(script, fit=("a",), unfit=("u",)) == ("a",)
    assert asked(script.decline("a")) == ("u",)


def test_free_places_of_a_window_go_to_the_able_first():
    script = buffered(3, participants=2, prefer="able", start_with=3)
    assert fleet(script, fit=("a", "b"), unfit=("u",)) == ("a", "b")
    assert asked(script.update("a")) == ("u",)


def test_a_buffer_that_the_able_cannot_fill_is_filled_by_others():
    script = buffered(2, prefer="able", start_with=3)
    drawn = fleet(script, fit=("a",), unfit=("u", "v"))
    assert len(drawn) == 2
    assert "a" in drawn
    assert asked(script.gone("a")) == tuple({"u", "v"} - set(drawn))


def test_a_window_does_not_wait_for_those_it_will_not_ask():
    script = windowed(prefer="able", start_with=2)
    assert fleet(script, fit=("a",), unfit=("u",)) == ("a",)
    assert script.update("a")[1] == CloseRound(1, 1, ("a",))


@st.composite
def fleets(draw):
    """A state in which devices are there, and which of them are able."""
    fit = {f"d{index:02}": draw(st.booleans()) for index in range(draw(st.integers(1, 12)))}
    members = {
        name: Member(DeviceReport(name, conditions=UNKNOWN if ok else METERED), ready=True)
        for name, ok in fit.items()
    }
    return fit, EngineState(members=members, rounds_done=draw(st.integers(0, 3)))


@given(
    fleet=fleets(),
    participants=st.none() | st.integers(1, 8),
    over_selection=st.sampled_from([1.0, 1.3, 2.0]),
    quorum=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_the_draw_takes_others_only_when_the_able_are_too_few(
    fleet, participants, over_selection, quorum, seed
):
    fit, state = fleet
    quorum = min(quorum, participants or quorum)
    section = RoundSection(
        participants=participants, over_selection=over_selection, quorum=quorum, prefer="able"
    )
    names = tuple(sorted(fit))
    drawn = draw(names, state, section, seed)
    least = participants or quorum
    assert list(drawn) == sorted(set(drawn))
    assert len(drawn) >= min(least, len(names))
    if not all(fit[name] for name in drawn):
        assert {name for name in names if fit[name]} <= set(drawn)
        assert len(drawn) <= least
    any_of_them = draw(names, state, msgspec.structs.replace(section, prefer="any"), seed)
    if all(fit.values()):
        assert drawn == any_of_them


@given(
    said=st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
    participants=st.none() | st.integers(1, 8),
    slack=st.floats(1, 10),
    stretch=st.floats(1, 1e6),
    faster=st.integers(0, 7),
)
def test_a_proposal_is_within_its_bounds_and_never_longer_for_a_faster_device(
    said, participants, slack, stretch, faster
):
    section = RoundSection(
        participants=participants, deadline_s=60.0, deadline="predicted", deadline_slack=slack
    )

    def proposal(round_s):
        members = {
            f"d{i}": Member(DeviceReport(f"d{i}", round_s=s), observed=Observed(stretch=stretch))
            for i, s in enumerate(round_s)
        }
        state = EngineState("training", participants=tuple(members), members=members)
        return proposed_s(state, section, ObjectiveSection())

    given_s = proposal(said)
    assert SHORTEST_S <= given_s <= 60.0
    known = said[faster % len(said)]
    if known is not None and 0 < known <= 60.0:
        quicker = [s / 2 if i == faster % len(said) else s for i, s in enumerate(said)]
        assert proposal(quicker) <= given_s
