"""The margin of time: learned from what rounds took, also from those that were over before they were done."""

import io
import re
from itertools import pairwise
from statistics import NormalDist

import msgspec
import numpy as np
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.edge_agent.budget.test_ratio_controller import FIRST, UNKNOWN, a_ratio_controller, take_part
from tests.helpers.late_rounds import controller, play
from tests.helpers.world import CHOICES, World

from fleetune.edge_agent.budget import safety_margin
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.explain import explanation
from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
from fleetune.edge_agent.budget.safety_margin import (
    PRIOR_SPREAD,
    ForecastError,
    censored_error,
    forecast_error,
    observed_parts,
    seconds_with_margin,
)
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import TransferKey

LATE = 0.05
AS_EXPECTED = ForecastError(1.0, 1.0, 1.0)
TEN_S = RoundCost(download_s=1.0, train_s=6.0, upload_s=3.0)


def margin(errors, late=LATE, expected=TEN_S):
    return seconds_with_margin(expected, errors, late) / expected.known_s


def both(factor, *, censored=False):
    return ForecastError(factor, factor, factor, censored)


def with_margin(late=LATE, deadline_s=20.0, **policy):
    return controller(late, deadline_s, **policy)


def key_of(number):
    return TransferKey("task", "run", number, 1)


def share_late(known, world, deadline_s=20.0, seeds=6, rounds=150):
    played = [play(known, [world] * rounds, deadline_s, seed)[0] for seed in range(seeds)]
    return np.mean([late for rounds_ in played for _, late in rounds_])


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_at_most_the_stated_share_of_rounds_is_late(noise):
    """And without a margin up to nearly half of them are."""
    assert share_late(with_margin(), World(noise=noise)) <= LATE
    if noise >= 0.1:
        assert share_late(a_ratio_controller(), World(noise=noise)) > 2 * LATE


def test_another_share_gives_another_margin():
    errors = [both(factor) for factor in np.exp(0.3 * np.random.default_rng(0).normal(size=64))]
    margins = [margin(errors, late) for late in (0.01, 0.05, 0.2, 0.5, 1.0)]
    assert margins == sorted(margins, reverse=True)
    assert margins[1] == pytest.approx(np.exp(0.3 * NormalDist().inv_cdf(0.95)), rel=0.15)
    assert margins[-1] == 1.0, "no margin at all"


def test_before_the_first_round_the_prior_says_how_far_off_it_may_be():
    assert margin([]) == pytest.approx(np.exp(PRIOR_SPREAD * NormalDist().inv_cdf(0.925)))
    shrinking = [margin([AS_EXPECTED] * rounds) for rounds in (0, 5, 10, 20, 40)]
    assert shrinking == sorted(shrinking, reverse=True)
    assert shrinking[3] < 1.1
    assert shrinking[4] == 1.0


def test_few_rounds_without_luck_count_and_old_ones_are_forgotten():
    assert margin([both(2.0)]) >= 2.0
    assert margin([both(2.0), *[AS_EXPECTED] * 60]) == 1.0, "one in 60 is within a share of 5 %"
    history = CostHistory()
    for factor in range(1, 200):
        history = history.erring(both(float(factor)))
    assert [one.work for one in history.errors] == [float(f) for f in range(136, 200)]


@given(st.lists(st.tuples(st.floats(0.2, 5), st.booleans()), max_size=64), st.floats(0.2, 5), st.floats(0, 4))
def test_a_round_that_was_given_up_never_counts_for_less_than_one_that_was_done(past, factor, more):
    """It would have taken longer: taken for finished it would bias the margin downwards."""
    errors = [both(value, censored=over) for value, over in past]
    censored = margin([*errors, both(factor, censored=True)])
    assert censored >= margin([*errors, both(factor)]) - 1e-9
    done_later = margin([*errors, both(factor + more)])
    assert censored >= min(done_later, margin(errors)) - 1e-9


@given(st.integers(0, 20))
def test_a_late_round_raises_the_margin(before):
    """As long as few rounds are known; of many the stated share may be late."""
    errors = [AS_EXPECTED] * before
    late = both(1.5, censored=True)
    assert margin([*errors, late]) > margin(errors)
    assert margin([*errors, late, late]) >= margin([*errors, late])
    assert margin([late] * 3) > 1.5, "nobody knows how long they would have taken"


def test_rounds_given_up_do_not_bias_it_downwards():
    """Of 64 rounds those beyond a factor of 1.2 were given up there: the margin is no less than of all."""
    rng, missed = np.random.default_rng(1), []
    for _ in range(200):
        factors = np.exp(0.2 * rng.normal(size=64))
        known = [both(min(one, 1.2), censored=one > 1.2) for one in factors]
        missed.append(margin(known) < np.exp(0.2 * NormalDist().inv_cdf(0.95)) - 0.2)
        left_out = [one for one in known if not one.censored]
        assert margin(known) > margin(left_out)
    assert not any(missed)


def test_an_outage_of_many_rounds_is_soon_forgotten():
    history = CostHistory(errors=(AS_EXPECTED,) * 40)
    for _ in range(7):
        history = history.erring(both(1.4, censored=True))
    assert len(history.errors) == 41
    assert margin(history.errors) < 1.1
    assert history.erring(both(2.0, censored=True)).errors[-1].work == 2.0
    again = history.erring(both(1.2)).erring(both(1.3, censored=True)).errors[-3:]
    assert [one.work for one in again] == [1.4, 1.2, 1.3]


FACTORS = st.lists(st.tuples(*[st.floats(0.1, 9)] * 3, st.booleans()), max_size=64)
SECONDS = st.floats(0.01, 1e3)


@given(
    FACTORS, SECONDS, SECONDS, SECONDS, st.floats(1.001, 10), st.sampled_from((0, 1, 2)), st.floats(0.01, 1)
)
def test_more_of_anything_never_takes_longer_with_the_margin(factors, down, work, up, less, part, late):
    errors = [ForecastError(*one) for one in factors]
    slow = [down, work, up]
    fast = [seconds / less if index == part else seconds for index, seconds in enumerate(slow)]
    within = [
        seconds_with_margin(RoundCost(download_s=one[0], train_s=one[1], upload_s=one[2]), errors, late)
        for one in (fast, slow)
    ]
    assert within[0] <= within[1] * (1 + 1e-9)


@given(FACTORS, st.floats(1, 200), st.floats(1, 10))
def test_more_time_never_gives_a_smaller_ratio(factors, deadline_s, more):
    history = CostHistory(errors=tuple(ForecastError(*one) for one in factors))
    known = structs.replace(with_margin(), cost_history=history)
    tight, wide = (
        structs.replace(known, deadline_s=seconds).chosen(UNKNOWN).report.affords or ()
        for seconds in (deadline_s, more * deadline_s)
    )
    assert {one.ratio for one in tight} <= {one.ratio for one in wide}


def test_what_a_round_showed_is_told_by_its_parts():
    took = RoundCost(download_s=2.0, train_s=9.0, upload_s=4.0)
    assert forecast_error(TEN_S, took) == ForecastError(1.5, 1.5, 1.5)
    assert forecast_error(TEN_S, structs.replace(took, upload_s=None)) is None
    assert forecast_error(RoundCost(), took) is None
    assert forecast_error(RoundCost(download_s=0.0, train_s=0.0, upload_s=0.0), took) == AS_EXPECTED
    assert forecast_error(TEN_S, RoundCost(download_s=1e9, train_s=1e9, upload_s=1e9)).work == 100


def test_a_round_that_was_given_up_shows_what_it_had_taken():
    sending = RoundCost(download_s=2.0, train_s=6.0)
    assert censored_error(TEN_S, sending, 20.0) == ForecastError(2.0, 14 / 4, 1.0, censored=True)
    assert observed_parts(TEN_S, sending, 20.0).upload_s == 12.0
    assert observed_parts(TEN_S, sending, 9.0).upload_s is None, "that may be short"
    training = RoundCost(download_s=2.0)
    assert censored_error(TEN_S, training, 20.0) == ForecastError(2.0, 0.5, 3.0, censored=True)
    assert observed_parts(TEN_S, training, 20.0).train_s == 18.0
    assert censored_error(RoundCost(), training, 20.0) is None


def test_a_device_that_is_late_learns_of_it_with_its_next_task():
    member = RoundPlanner(with_margin())
    first = member.begin(FIRST, 100, 1.0, began_s=0.0)
    member.learn(first.trained(9.0, 100).sent(4.0, None), UNKNOWN)
    before = member.ratio_controller
    work = member.begin(key_of(2), 100, 1.0, began_s=20.0)
    member.going_on(work.trained(9.0, 100))
    member.begin(key_of(3), 100, 1.0, began_s=1000.0)
    (error,) = member.ratio_controller.cost_history.errors
    assert error.censored
    assert member.ratio_controller.cost_history.past_rounds[-1].actual.upload_s == 10.0, "up to the deadline"
    assert member.report.ratio < before.report.ratio
    member.learn(work.trained(9.0, 100).sent(30.0, None), UNKNOWN)
    assert member.ratio_controller.cost_history.errors == (error,), "it arrived too late: counted already"


def test_who_declined_was_away_or_is_asked_the_same_again_was_not_late():
    for end in (RoundPlanner.interrupt, lambda member: member.begin(key_of(2), 100, 1.0, began_s=30.0)):
        member = RoundPlanner(with_margin())
        member.learn(member.begin(FIRST, 100, 1.0).trained(9.0, 100).sent(4.0, None), UNKNOWN)
        known = member.ratio_controller
        work = member.begin(key_of(2), 100, 1.0, began_s=20.0)
        end(member)
        if end is RoundPlanner.interrupt:
            member.begin(key_of(3), 100, 1.0, began_s=60.0)
        assert member.ratio_controller is known
        assert work.budget.ratio == known.report.ratio


def test_a_first_round_unlike_the_profile_is_no_noise():
    _, known = play(with_margin(), [World()] * 3, 60.0)
    assert len(known.cost_history.errors) == 2
    assert margin(known.cost_history.errors) < 1.4


def test_without_a_share_nothing_is_noted_or_held_back():
    _, known = play(a_ratio_controller(), [World(noise=0.3)] * 20, 20.0)
    assert known.cost_history.errors == ()
    assert known.given_up(Budget(0.1), RoundCost(), 99.0) is known
    assert all(one.within_s == one.predicted.known_s for one in known.explained(UNKNOWN))


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_margin_does_not_make_ratios_swing(noise):
    changes = {}
    for late in (None, LATE):
        rounds, _ = play(controller(late), [World(noise=noise)] * 200, 20.0)
        changes[late] = sum(one != other for (one, _), (other, _) in pairwise(rounds[60:]))
    assert changes[LATE] <= changes[None] + 14


def test_the_smallest_ratio_needs_no_margin():
    smallest = a_ratio_controller(60.0).explained(UNKNOWN)[0].predicted.round_s
    known = with_margin(deadline_s=1.01 * smallest)
    assert known.fits
    assert [one.ratio for one in known.report.affords] == [0.1]


def test_a_share_of_local_training_fits_with_its_margin_and_the_least_of_all_without():
    known = structs.replace(with_margin(), least_work=0.25)
    whole = {one.choice.ratio: one for one in known.explained(UNKNOWN)}
    for one in known.chosen(UNKNOWN).report.affords:
        if one.local_work == 1 and one.ratio > 0.1:
            assert whole[one.ratio].within_s <= 20.0
    least = known._forecast(CHOICES[0], 0.25).round_s
    tight = structs.replace(known, deadline_s=1.01 * least).chosen(UNKNOWN)
    assert [(one.ratio, one.local_work) for one in tight.report.affords] == [(0.1, 0.25)]


def test_training_ends_in_time_for_the_upload_with_its_margin():
    plain = structs.replace(a_ratio_controller(), least_work=0.25, proposed=True)
    careful = structs.replace(plain, late=LATE)
    budget = Budget(0.5)
    rest_s = plain.expected(Budget(0.5, 0.0)).known_s - plain.expected(budget).download_s
    assert plain.trains_until_s(budget, 2.0) == pytest.approx(18.0 - rest_s)
    assert careful.trains_until_s(budget, 2.0) == pytest.approx(18.0 - margin([]) * rest_s)


def test_training_that_was_cut_short_is_held_against_what_was_asked_of_the_rest():
    """Else a board that has become slow, and does less, would seem to be as quick as ever."""
    known = structs.replace(play(with_margin(), [World()] * 8, 30.0)[1], least_work=0.25)
    expected = known.expected(Budget(0.5, 0.5))
    slow = structs.replace(expected, train_s=2 * expected.train_s)
    assert known.learned(Budget(0.5, 0.5), slow).cost_history.errors[-1].work == pytest.approx(2.0)


def test_the_margin_is_remembered_and_an_older_state_has_none():
    _, known = play(with_margin(), [World(noise=0.1)] * 100, 20.0)
    assert len(known.cost_history.errors) == safety_margin.ROUNDS
    again = read_ratio_controller(known.encoded())
    assert again.cost_history == known.cost_history
    assert again.late == LATE
    assert len(msgspec.msgpack.encode(known.cost_history)) <= 4096 + 2000
    written = msgspec.msgpack.decode(known.encoded())
    del written["late"]
    del written["cost_history"]["errors"]
    older = read_ratio_controller(msgspec.msgpack.encode(written))
    assert older.late is None
    assert older.cost_history.past_rounds == known.cost_history.past_rounds


def test_it_is_kept_when_a_newer_task_comes_before_the_reply_had_arrived():
    joined = take_part(ratio_controller=structs.replace(with_margin(), proposed=False))
    joined.begin(FIRST, bytes(100), 0.5)
    joined.work(lambda: b"task")
    joined.delivered(2.0)
    joined.begin(key_of(2), bytes(100), 0.5)
    joined.work(lambda: b"task")
    joined.begin(key_of(3), bytes(100), 0.5)
    (error,) = read_ratio_controller(joined._memory.data).cost_history.errors
    assert error.censored
    assert joined.expected.round_s is not None


def test_the_explanation_says_what_of_the_work_is_waiting():
    _, known = play(with_margin(), [World()] * 5, 60.0)
    assert re.search(r"its work takes 2.62 s of processor time and 7.88 s of waiting", shown(known, 160))
    assert "it waits" not in shown(with_margin(), 160)


def shown(known, width):
    console = rich.console.Console(width=width, file=io.StringIO())
    console.print(explanation(known, Conditions(memory_bytes=64 * 10**9)))
    return console.file.getvalue()


def test_the_explanation_names_the_margin():
    _, known = play(with_margin(), [World(noise=0.1)] * 30, 20.0)
    text = " ".join(shown(known, 160).split())
    assert "at most" in text
    assert re.search(r"all but 5 % of rounds, by \d+ past rounds", text)
    assert re.search(r"with \d+ % for noise\)", text)
    assert "at most" not in shown(a_ratio_controller(), 160)
    assert "before any round was measured" in shown(with_margin(), 160)
    table = shown(known, 80).partition("p = ")[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
