"""The ratios that a coordinator proposes: rounds as short as it pays, and nobody is asked for too much."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import tiny_spec
from tests.coordinator.rounds.test_engine import Script, of

from fleetune.coordinator.rounds.actions import Admit, SendTask
from fleetune.coordinator.rounds.deadlines import proposed_s
from fleetune.coordinator.rounds.pace import frugal, keeping_pace, work
from fleetune.coordinator.rounds.semi_asynchronous import check_method
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.skeletons.choice import Affordable

RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
TIME = ObjectiveSection("time")


def needing(whole_s, *, start_s=0.0, ratios=RATIOS, joules=None):
    """What a device affords that takes so long for a whole model."""
    return tuple(
        Affordable(r, start_s + whole_s * r, None, None if joules is None else joules(r)) for r in ratios
    )


def largest(choices):
    return {device: some[-1].ratio for device, some in choices.items()}


def playing(objective=TIME, **options):
    return Script(rounds=200, objective=objective, **options)


def dealt(script):
    return {device: member.dealt for device, member in script.state.members.items()}


def test_nobody_is_waited_for_longer_than_it_pays():
    fast, slow = needing(1.0), needing(10.0)
    assert largest(keeping_pace({"a": fast, "b": fast, "c": slow})) == {"a": 1.0, "b": 1.0, "c": 0.2}


def test_equals_are_waited_for_while_it_pays():
    """What a round costs anyhow is paid less often when rounds are longer."""
    all_ = {name: needing(1.0, start_s=20.0) for name in "abc"}
    assert largest(keeping_pace(all_)) == dict.fromkeys("abc", 1.0)
    alike = {name: needing(1.0) for name in "abc"}
    assert largest(keeping_pace(alike)) == dict.fromkeys("abc", 0.2), "half the work in a fifth of the time"
    tenths = {name: needing(1.0, ratios=(0.1, 0.3)) for name in "abc"}
    assert largest(keeping_pace(tenths)) == dict.fromkeys("abc", 0.3), "a tenth is too little"


def test_who_cannot_keep_the_pace_works_at_its_smallest_ratio():
    found = keeping_pace({"a": needing(1.0), "b": needing(100.0)})
    assert [one.ratio for one in found["b"]] == [0.2]


def test_a_device_that_says_nothing_of_its_seconds_holds_nobody_up():
    unknown = tuple(Affordable(ratio) for ratio in RATIOS)
    found = keeping_pace({"a": needing(1.0, start_s=1.0), "b": unknown})
    assert len(found["b"]) == len(RATIOS)
    assert keeping_pace({}) == {}


def test_an_agent_of_an_older_release_is_waited_for_and_proposed_nothing():
    script = playing(start_with=2)
    script.ready("a", ratio=1.0, affords=needing(1.0), round_s=1.0)
    script.ready("b", ratio=0.3, round_s=50.0)
    assert dealt(script)["b"] is None
    draws = {dealt(script)["a"]} | {script.updates("a", "b") and dealt(script)["a"] for _ in range(60)}
    assert 1.0 in draws, "within 50 s all is within the pace"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 100)), min_size=1, max_size=8))
def test_no_other_pace_pays_more(fleet):
    choices = {str(number): needing(whole, start_s=start) for number, (whole, start) in enumerate(fleet)}
    kept = keeping_pace(choices)
    assert all(kept.values())

    def pays(pace_s):
        within = {
            d: [one for one in some if one.round_s <= pace_s] or some[:1] for d, some in choices.items()
        }
        takes_s = max(some[-1].round_s for some in within.values())
        return sum(work(some[-1].ratio) for some in within.values()) / takes_s

    takes_s = max(some[-1].round_s for some in kept.values())
    least_s = max(some[0].round_s for some in choices.values())
    others = [one.round_s for some in choices.values() for one in some if one.round_s >= least_s]
    assert pays(takes_s) >= max(map(pays, others)) * (1 - 1e-9)


def test_a_joule_brings_most_up_to_where_it_does():
    costly = needing(1.0, joules=lambda ratio: 1 + 100 * ratio**3)
    assert [one.ratio for one in frugal(costly)] == [0.2]
    idle = needing(1.0, joules=lambda ratio: 100 + ratio)
    assert [one.ratio for one in frugal(idle)] == list(RATIOS)
    assert len(frugal(needing(1.0))) == len(RATIOS), "joules that are not known forbid nothing"


def test_no_more_is_proposed_than_the_device_affords_or_the_run_allows():
    script = playing(ObjectiveSection("time", at_most=0.6), start_with=2)
    script.ready("a", affords=needing(1.0, start_s=9.0), ratio=1.0)
    script.ready("b", affords=needing(1.0, start_s=9.0, ratios=(0.8, 1.0)), ratio=1.0)
    seen = defaultdict(set)
    for _ in range(60):
        for device, ratio in dealt(script).items():
            seen[device].add(ratio)
        script.updates("a", "b", score=0.5)
    assert seen == {"a": {0.4, 0.6}, "b": {0.8}}, "0.2 is worth too little"


def test_the_method_hears_of_a_ratio_when_it_is_another_one():
    script = playing(start_with=2)
    actions = [*script.ready("a", "b", affords=needing(1.0, start_s=9.0), ratio=1.0)]
    known = {}
    for _ in range(40):
        admitted = {one.report.device: one.report.ratio for one in of(Admit, actions)}
        assert all(known.get(device) != ratio for device, ratio in admitted.items())
        known |= admitted
        assert known == dealt(script), "each task is planned at the ratio that was dealt"
        actions = script.updates("a", "b", score=0.5)
    assert len(of(SendTask, actions)) == 2


def test_a_restart_changes_nothing():
    def rounds(restarted_after):
        script = playing(start_with=3)
        script.ready("a", "b", "c", affords=needing(1.0, start_s=9.0), ratio=1.0)
        found = []
        for number in range(30):
            found.append(dealt(script))
            if number == restarted_after:
                script.restart(script.now)
                script.ready("a", "b", "c", affords=needing(1.0, start_s=9.0), ratio=1.0)
            for device in "abc":
                script.update(device, score=0.1 * number + 0.05 * dealt(script)[device])
        return found, script.state.evidence

    assert rounds(7) == rounds(None)


def test_a_predicted_deadline_is_that_of_what_was_proposed():
    script = playing(ObjectiveSection("time", at_most=0.2), deadline="predicted", deadline_slack=2.0)
    script.ready("a", affords=needing(4.0), ratio=1.0, round_s=4.0)
    assert proposed_s(script.state, script.round) == pytest.approx(2 * 0.2 * 4.0, abs=1.0)
    assert script.engine.wake_at - script.now == pytest.approx(2 * 0.2 * 4.0)


@pytest.mark.parametrize("lie_s", [0.0, 1e-9, 9.9, None])
def test_who_lies_about_its_seconds_makes_no_round_longer_than_without_an_objective(lie_s):
    """Without one each works at the largest ratio that its deadline allows; here never at a larger one."""
    honest = {name: needing(5.0) for name in "abc"}
    lying = honest | {"liar": tuple(Affordable(ratio, lie_s) for ratio in RATIOS)}
    found = keeping_pace(lying)
    assert all(some[-1].round_s <= honest[name][-1].round_s for name, some in found.items() if name != "liar")


def test_an_objective_is_for_rounds_that_wait():
    wanted = {"objective": {"minimise": "energy"}, "round": {"mode": "window", "window_s": 5}}
    settings = parse_run(
        {
            "run": {"name": "r", "rounds": 1},
            "model": {"name": "tiny", "input_shape": [4], "num_classes": 3},
            "method": {"name": "fedavg"},
            **wanted,
        }
    )
    with pytest.raises(SettingError, match=r'minimise = "energy": .* round.mode = "window"'):
        check_method(settings, from_section(settings.method, tiny_spec()))


def test_a_state_without_it_is_as_it_was():
    script = Script()
    script.ready("a", affords=needing(1.0), ratio=1.0)
    script.update("a", score=0.5)
    member = script.state.members["a"]
    assert (member.dealt, member.score, member.shown) == (None, None, None)
    assert msgspec.to_builtins(script.state.members["a"].report)["ratio"] == 1.0
