"""What a run may take: it ends before the round that would go beyond, and says so with the figures."""

import pytest
from tests.coordinator.rounds.test_engine import Script, of

from fleetune.coordinator.rounds.actions import AbandonRound, CloseRound, FinishRun
from fleetune.coordinator.rounds.spent_budget import Amounts, SpentBudget, over_budget
from fleetune.protocols.method.choice import RatioCandidate
from fleetune.protocols.settings.objective import ObjectiveSection, WithinSection

AFFORDS = (RatioCandidate(0.5, 2.0, 400_000, 5.0), RatioCandidate(1.0, 4.0, 800_000, 10.0))


def within(minimise="none", **limits):
    return Script(
        rounds=50, start_with=2, objective=ObjectiveSection(minimise, within=WithinSection(**limits))
    )


def played(script, rounds, *, num_bytes=500_000, joules=3.0, takes_s=2.0):
    """How many rounds closed, and how the run ended."""
    closed, ended = 0, None
    for _ in range(rounds):
        if script.engine.finished:
            break
        script.now += takes_s
        actions = script.updates("a", "b", num_bytes=num_bytes, joules=joules)
        closed += len(of(CloseRound, actions))
        ended = next((one.reason for one in of(FinishRun, actions)), ended)
    return closed, ended


@pytest.mark.parametrize(
    ("limits", "rounds", "words"),
    [
        (
            {"seconds": 11.0},
            5,
            "objective.within.seconds = 11: 10 are spent, and the next round needs about 2",
        ),
        (
            {"megabytes": 3.0},
            3,
            "objective.within.megabytes = 3: 3 are spent, and the next round needs about 1",
        ),
        ({"joules": 20.0}, 3, "objective.within.joules = 20: 18 are spent, and the next round needs about 6"),
        (
            {"seconds": 1e9, "joules": 12.0},
            2,
            "objective.within.joules = 12: 12 are spent, and the next round needs about 6",
        ),
    ],
)
def test_a_run_ends_before_the_round_that_would_go_beyond(limits, rounds, words):
    script = within(**limits)
    script.ready("a", "b")
    assert played(script, 20) == (rounds, words)


def test_without_limits_all_rounds_are_done():
    script = within()
    script.ready("a", "b")
    assert played(script, 60) == (50, "all rounds are done")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"seconds": 1.5}, "objective.within.seconds = 1.5: the first round needs at least 2"),
        ({"megabytes": 0.5}, "objective.within.megabytes = 0.5: the first round needs at least 0.8"),
        ({"joules": 9.0}, "objective.within.joules = 9: the first round needs at least 10"),
    ],
)
def test_what_cannot_be_met_is_said_before_the_first_round(limits, words):
    script = within("time", **limits)
    actions = script.ready("a", "b", affords=AFFORDS, ratio=1.0)
    assert [one.reason for one in of(FinishRun, actions)] == [words]


def test_without_an_objective_it_is_said_as_far_as_devices_say_what_they_expect():
    script = within(seconds=1.5)
    actions = script.ready("a", ratio=1.0, round_s=2.0) + script.ready("b", ratio=1.0, round_s=30.0)
    words = "objective.within.seconds = 1.5: the first round needs at least 2"
    assert [one.reason for one in of(FinishRun, actions)] == [words], "the quickest may be enough"
    script = within(seconds=1.5)
    assert not of(FinishRun, script.ready("a", "b", ratio=1.0)), "they do not know"


def test_what_was_sent_in_vain_is_paid_for_too():
    script = within(megabytes=2.0)
    script.ready("a", "b")
    script.update("a", num_bytes=900_000)
    actions = script.tick(script.engine.wake_at)
    assert of(AbandonRound, actions) or of(CloseRound, actions)
    spent = script.state.spent
    assert spent.megabytes == 0.9
    assert played(script, 10, num_bytes=100_000)[1].startswith("objective.within.megabytes = 2")


def test_a_restart_forgets_nothing():
    script = within(joules=20.0)
    script.ready("a", "b")
    played(script, 2)
    script.restart(script.now)
    script.ready("a", "b")
    assert played(script, 20)[0] == 1


def test_what_devices_do_not_tell_does_not_count():
    script = within(joules=1.0)
    script.ready("a", "b")
    assert played(script, 60, joules=None) == (50, "all rounds are done")


def test_before_anything_is_known_a_round_may_open():
    assert over_budget(WithinSection(1.0, 1.0, 1.0), SpentBudget(), 0.0, Amounts()) is None


def test_time_that_nobody_trained_counts():
    """A run that waits for its devices, or for tomorrow, is under way."""
    spending = SpentBudget().opened(10.0).round_closed(12.0)
    limit = WithinSection(seconds=100.0)
    assert over_budget(limit, spending, 100.0, Amounts()) is None
    assert over_budget(limit, spending, 109.0, Amounts()) is not None
