"""A device's part in a run, without a board or a clock: as an agent and a simulated device have it."""

import dataclasses

import pytest
from msgspec import structs
from tests.edge_agent.budget.test_ratio_controller import FINAL_EVALUATION, FIRST, UNKNOWN, a_ratio_controller

from fleetune.edge_agent.run.joined_run import known_late, short_cost, short_report
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import TransferKey


@pytest.fixture
def planner():
    return RoundPlanner(a_ratio_controller())


def done(planner, key=FIRST, upload_s=2.0):
    """A round done to its end."""
    work = planner.begin(key, 100, 0.5).trained(7.0, 30, 260_000_000).sent(upload_s, 10.0)
    planner.learn(work, UNKNOWN)
    return work


def test_a_round_keeps_the_ratio_and_the_forecast_that_it_began_with(planner):
    ratio, expected = planner.report.ratio, planner.ratio_controller.predicted
    work = planner.begin(FIRST, 100, None)
    for number in range(2, 7):
        done(planner, TransferKey("task", "run", number, 1), upload_s=15.0)
    assert planner.report.ratio < ratio
    assert (work.key, work.budget, work.expected) == (FIRST, Budget(ratio), expected)
    assert planner.begin(FIRST, 100, None).budget.ratio == planner.report.ratio


def test_what_a_round_takes_comes_together_as_it_goes(planner):
    began = planner.begin(FIRST, 100, 0.5)
    assert began.taken == RoundCost(bytes_down=100, download_s=0.5)
    trained = began.trained(7.0, 30)
    assert trained.taken == RoundCost(bytes_down=100, download_s=0.5, train_s=7.0, bytes_up=30)
    once, again = trained.sent(2.0, 10.0), trained.sent(3.0, None)  # one reply may be asked for twice
    assert (once.taken.upload_s, once.taken.joules) == (2.0, 10.0)
    assert (again.taken.upload_s, again.taken.joules) == (3.0, None)
    assert began.taken == RoundCost(bytes_down=100, download_s=0.5)


def test_what_was_done_is_learned_and_a_final_evaluation_teaches_nothing(planner):
    work = done(planner)
    (lesson,) = planner.ratio_controller.cost_history.past_rounds
    slight = {"bytes_down": None, "download_s": None}  # a first task of hardly any bytes
    assert lesson.actual == structs.replace(work.taken, **slight)
    known = planner.ratio_controller
    done(planner, FINAL_EVALUATION)
    assert planner.ratio_controller == known


def test_the_coordinator_hears_the_first_report_and_then_what_changed(planner):
    assert planner.is_news
    assert planner.tell() == planner.sent_report == planner.report
    assert not planner.is_news
    for _ in range(5):
        done(planner, upload_s=15.0)
    assert planner.is_news


def test_what_does_not_fit_is_tried_again_with_less_trust_in_what_was_learned(planner):
    for _ in range(5):
        done(planner, upload_s=1000.0)
    assert planner.refusal == planner.report.reason
    for _ in range(50):
        planner.try_again(UNKNOWN)
    assert planner.refusal is None


def test_a_compact_run_hears_of_a_forecast_only_when_it_is_quite_another():
    usual, compact = (
        RoundPlanner(a_ratio_controller(deadline_s=None), compact=said) for said in (False, True)
    )
    for member in (usual, compact):
        told = member.tell()
        for share, news in ((1.2, member is usual), (0.6, member is usual), (1.6, True), (0.4, True)):
            member.sent_report = dataclasses.replace(told, round_s=told.round_s / share)
            assert member.is_news == news


FIGURES = {
    "board": "raspberry-pi-4b",
    "num_samples": 7,
    "ratio": 1 / 3,
    "drift": 0.99996,
    "round_s": 12.3456789,
}


def test_figures_of_clocks_and_meters_are_short_and_what_decides_is_as_it_was():
    conditions = Conditions(memory_bytes=123_456_789, battery=0.123456, celsius=48.56789)
    report = DeviceReport("d", samples_per_s=1234.5678, uplink_bps=None, conditions=conditions, **FIGURES)
    short = structs.replace(conditions, celsius=48.57)
    assert short_report(report) == dataclasses.replace(
        report, samples_per_s=1235.0, round_s=12.35, conditions=short
    )
    cost = RoundCost(1, 2, 0.12345678, None, 1e-9 / 3, 123_456_789, 12345.678)
    assert short_cost(cost) == RoundCost(1, 2, 0.1235, None, 3.333e-10, 123_456_789, 12350.0)
    assert known_late(cost) == RoundCost(upload_s=cost.upload_s, joules=cost.joules)
