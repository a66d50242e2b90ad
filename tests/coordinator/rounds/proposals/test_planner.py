"""The ratios that a coordinator proposes: rounds as short as it pays, and nobody is asked for too much."""

import dataclasses
import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import tiny_spec
from tests.coordinator.rounds.test_engine import Script, of

from fleetune.coordinator.rounds.actions import Admit, SendTask
from fleetune.coordinator.rounds.policies.deadline import proposed_s
from fleetune.coordinator.rounds.policies.semi_asynchronous import check_method
from fleetune.coordinator.rounds.proposals.candidate_plans import (
    LEAST_UTILITY,
    CandidatePlan,
    candidate_plans,
)
from fleetune.coordinator.rounds.proposals.planner import Planner, cost_efficient
from fleetune.coordinator.rounds.proposals.target_duration import within_target_duration
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, RatioCandidate
from fleetune.protocols.method.utility import default_utility
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import encodings

RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
TIME, ENERGY, BYTES = map(ObjectiveSection, ("time", "energy", "bytes"))


def needing(whole_s, *, start_s=0.0, ratios=RATIOS):
    """What a device affords that takes so long for a whole model."""
    return tuple(RatioCandidate(r, start_s + whole_s * r) for r in ratios)


def option(budget, *costs):
    return CandidatePlan(budget, *costs, *[None] * (3 - len(costs)), default_utility(budget))


def options(whole_s, *, start_s=0.0, ratios=RATIOS, joules=lambda _: None):
    """The same as the coordinator has it."""
    return [option(Budget(r), start_s + whole_s * r, None, joules(r)) for r in ratios]


def options_of(member, objective, factors=(1.0,)):
    return candidate_plans(member, objective, factors, default_utility)


def largest(plans):
    return {device: some[-1].budget.ratio for device, some in plans.items()}


def playing(objective=TIME, **options):
    return Script(rounds=200, objective=objective, **options)


def assigned_ratio(script):
    found = {device: member.assigned for device, member in script.state.members.items()}
    return {device: budget and budget.ratio for device, budget in found.items()}


def test_nobody_is_waited_for_longer_than_it_pays():
    fast, slow = options(1.0), options(10.0)
    assert largest(within_target_duration({"a": fast, "b": fast, "c": slow})) == {
        "a": 1.0,
        "b": 1.0,
        "c": 0.2,
    }


def test_equals_are_waited_for_while_it_pays():
    """What a round costs anyhow is paid less often when rounds are longer."""
    all_ = {name: options(1.0, start_s=20.0) for name in "abc"}
    assert largest(within_target_duration(all_)) == dict.fromkeys("abc", 1.0)
    alike = {name: options(1.0) for name in "abc"}
    assert largest(within_target_duration(alike)) == dict.fromkeys("abc", 0.2), (
        "half the work in a fifth of the time"
    )
    tenths = {name: options(1.0, ratios=(0.1, 0.3)) for name in "abc"}
    assert largest(within_target_duration(tenths)) == dict.fromkeys("abc", 0.3), "a tenth is too little"


def test_who_cannot_keep_the_pace_works_at_its_smallest_ratio():
    found = within_target_duration({"a": options(1.0), "b": options(100.0)})
    assert [one.budget.ratio for one in found["b"]] == [0.2]


def test_a_device_that_says_nothing_of_its_seconds_holds_nobody_up():
    unknown = [option(Budget(ratio)) for ratio in RATIOS]
    found = within_target_duration({"a": options(1.0, start_s=1.0), "b": unknown})
    assert len(found["b"]) == len(RATIOS)
    assert within_target_duration({}) == {}


def test_an_agent_of_an_older_release_is_waited_for_and_proposed_nothing():
    script = playing(start_with=2)
    script.ready("a", ratio=1.0, affords=needing(1.0), round_s=1.0)
    script.ready("b", ratio=0.3, round_s=50.0)
    assert assigned_ratio(script)["b"] is None
    draws = {assigned_ratio(script)["a"]} | {
        script.updates("a", "b") and assigned_ratio(script)["a"] for _ in range(60)
    }
    assert 1.0 in draws, "within 50 s all is within the pace"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 100)), min_size=1, max_size=8))
def test_no_other_pace_pays_more(fleet):
    choices = {str(number): options(whole, start_s=start) for number, (whole, start) in enumerate(fleet)}
    kept = within_target_duration(choices)
    assert all(kept.values())

    def pays(pace_s):
        within = {
            d: [one for one in some if one.round_s <= pace_s] or some[:1] for d, some in choices.items()
        }
        takes_s = max(some[-1].round_s for some in within.values())
        return math.prod(some[-1].utility for some in within.values()) ** (1 / len(within)) / takes_s

    takes_s = max(some[-1].round_s for some in kept.values())
    least_s = max(some[0].round_s for some in choices.values())
    others = [one.round_s for some in choices.values() for one in some if one.round_s >= least_s]
    assert pays(takes_s) >= max(map(pays, others)) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("power", "kept"),
    [
        (("battery", "battery", "mains"), True),
        (("battery", "mains", "mains"), False),
        (("mains", None, "battery"), False),
        ((None, None, None), False),
    ],
)
def test_where_most_run_on_batteries_few_bytes_are_sent_at_a_pace(power, kept):
    script = playing(BYTES, start_with=4)
    for name, one in zip("abc", power, strict=True):
        script.ready(name, ratio=1.0, conditions=Conditions(power=one))
    alike = [option(Budget(r, work), 10.0 * work, 100, None) for r in RATIOS for work in (0.5, 1.0, 4.0)]
    paying = Planner(BYTES).worthwhile(script.state, dict.fromkeys("abc", alike))
    longest = {max(one.seconds for one in some) for some in paying.values()}
    assert longest == ({5.0} if kept else {40.0})


def test_a_joule_brings_most_up_to_where_it_does():
    costly = options(1.0, joules=lambda ratio: 1 + 100 * ratio**3)
    assert [one.budget.ratio for one in cost_efficient(costly, ENERGY)] == [0.2]
    idle = options(1.0, joules=lambda ratio: 100 + ratio)
    assert [one.budget.ratio for one in cost_efficient(idle, ENERGY)] == list(RATIOS)
    assert len(cost_efficient(options(1.0), ENERGY)) == len(RATIOS), (
        "joules that are not known forbid nothing"
    )


def test_cost_efficiency_is_by_the_methods_utility():
    idle = options(1.0, joules=lambda ratio: 100 + ratio)
    of_little = [dataclasses.replace(one, utility=1 - one.budget.ratio / 2) for one in idle]
    assert [one.budget.ratio for one in cost_efficient(of_little, ENERGY)] == [0.2]


def test_a_byte_sent_counts_likewise():
    sends = [option(Budget(ratio), 1.0, round(1e6 * (0.5 + ratio**3)), 100 * ratio) for ratio in RATIOS]
    assert [one.budget.ratio for one in cost_efficient(sends, ObjectiveSection("bytes"))] == [0.2, 0.4]


def test_who_trains_slowly_does_a_share_of_the_local_training():
    """The pace is that of a quick device; another one's round is all training."""
    slow = [
        option(Budget(ratio, share), 10.0 * share + ratio) for ratio in RATIOS for share in (0.25, 0.5, 1.0)
    ]
    found = within_target_duration(
        {"a": options(1.0, start_s=2.0), "b": options(1.0, start_s=2.0), "c": slow}
    )
    assert largest(found)["a"] == 1.0
    assert {one.budget.local_work for one in found["c"]} == {0.25}, "all of it would take four times as long"
    script = playing(start_with=1)
    affords = RatioCandidate(0.5, 20.0, 1000, 8.0, 16.0, 4.0, 1.0)
    script.ready("a", affords=(affords,), ratio=0.5)
    assert script.state.members["a"].assigned == Budget(0.5), "a second of training is worth as much as any"
    assert (affords.seconds(0.25), affords.energy(0.25)) == (8.0, 5.0)


def test_a_few_slow_devices_are_given_time_where_it_brings_them_much():
    """A little longer, and they do four times as much; one of many holds up nobody for that."""
    slow = [option(Budget(0.5, share), 2.0 + share) for share in (0.25, 0.5, 1.0)]
    quick = {f"q{number}": options(1.0) for number in range(7)}
    found = within_target_duration(quick | {"a": slow, "b": slow, "c": slow})
    assert {found[name][-1].budget.local_work for name in "abc"} == {1.0}
    assert within_target_duration(quick | {"a": slow})["a"][-1].budget.local_work == 0.25


@pytest.mark.parametrize("objective", [TIME, ENERGY, ObjectiveSection("bytes")])
@pytest.mark.parametrize("share", [5e-324, 1e-300, 1e-9])
def test_who_makes_much_of_its_least_choice_holds_up_a_round_by_a_bound(share, objective):
    """One of ten says that it does next to nothing in a moment, and 10^300 times as much in a while."""
    liar = (RatioCandidate(0.2, 0.1, 1000, 0.1, local_work=share), RatioCandidate(1.0, 60.0, 1000, 60.0))
    honest = {f"q{number}": needing(1.0, start_s=1.0) for number in range(9)}
    script = playing(objective, start_with=10)
    for name, affords in (honest | {"liar": liar}).items():
        script.ready(name, affords=affords, ratio=affords[0].ratio, idle_w=1.0)
    assert all(member.assigned for member in script.state.members.values())
    of_liar = options_of(script.state.members["liar"], TIME)
    assert of_liar[0].utility == pytest.approx(LEAST_UTILITY)
    times = (of_liar[-1].utility / LEAST_UTILITY) ** (1 / 10)
    kept = within_target_duration(
        {name: options_of(member, TIME) for name, member in script.state.members.items()}
    )
    assert max(one.seconds for some in kept.values() for one in some) <= 2.0 * times


def test_who_has_time_left_does_more_local_training_where_the_run_allows_it():
    quick = RatioCandidate(0.5, 3.0, 1000, 8.0, 1.0, 4.0, 4.0)
    held_up = RatioCandidate(0.5, 6.0, 1000, 8.0, 0.5, 4.0, 4.0)
    allowed = ObjectiveSection("time", most_work=4.0)
    script = playing(start_with=2)
    script.ready("a", affords=(quick,), ratio=0.5)
    script.ready("b", affords=(held_up,), ratio=0.5)
    told = {name: options_of(script.state.members[name], allowed) for name in "ab"}
    assert [one.budget.local_work for one in told["a"]] == [0.25, 0.5, 0.75, 1.0, 2.0, 4.0]
    kept = within_target_duration(told)
    assert {name: some[-1].budget.local_work for name, some in kept.items()} == {"a": 4.0, "b": 4.0}
    once = {name: options_of(script.state.members[name], TIME) for name in "ab"}
    assert {some[-1].budget.local_work for some in once.values()} == {1.0}
    assert default_utility(Budget(0.5, 2.0)) < 2 * default_utility(Budget(0.5, 1.0)), (
        "the second time brings less"
    )


FACTORS = (1.0, 0.98, 0.9)


def sending(send_s, values_up=100_000, uplink=0):
    """What a device affords whose whole model takes so long to send, its work two seconds."""
    return tuple(
        RatioCandidate(
            ratio,
            round_s=2.0 + send_s * ratio,
            bytes_up=150 + round(values_up * ratio),
            uplink=uplink,
            values_up=round(values_up * ratio),
            values_s=send_s * ratio,
        )
        for ratio in RATIOS
    )


def proposed(script, objective, device):
    return options_of(script.state.members[device], objective, FACTORS)


def test_a_thin_link_is_asked_for_an_update_of_fewer_bytes_and_a_fast_one_is_not():
    script = playing(start_with=2)
    script.ready("fast", affords=sending(0.01), ratio=1.0, values=(1.0, 0.2, 0.01))
    script.ready("thin", affords=sending(50.0), ratio=1.0, values=(1.0, 0.2, 0.01))
    kept = within_target_duration({name: proposed(script, TIME, name) for name in ("fast", "thin")})
    best = {name: max(some, key=lambda one: one.utility) for name, some in kept.items()}
    assert best["fast"].budget == Budget(1.0, 1.0, 0)
    thin = best["thin"]
    assert thin.budget.uplink == 2
    assert thin.seconds == pytest.approx(2.0 + 0.01 * 50.0 * thin.budget.ratio)
    assert thin.bytes_up == 150 + 1000 * thin.budget.ratio


def test_the_fewest_bytes_are_those_of_the_thinnest_update():
    script = playing(start_with=1)
    script.ready("a", affords=sending(1.0), ratio=1.0, values=(1.0, 0.2, 0.01))
    objective = ObjectiveSection("bytes")
    paying = cost_efficient(proposed(script, objective, "a"), objective)
    assert max(paying, key=lambda one: one.utility).budget.uplink == 2
    assert all(one.bytes_up <= 1150 for one in paying)


def test_who_fits_with_fewer_bytes_alone_is_asked_for_no_more_and_who_does_not_know_for_the_first():
    script = playing(start_with=2)
    script.ready("a", affords=sending(1.0, uplink=1), ratio=1.0, values=(1.0, 0.2, 0.01))
    script.ready("b", affords=needing(1.0), ratio=1.0)
    assert {one.budget.uplink for one in proposed(script, TIME, "a")} == {1, 2}
    assert {one.budget.uplink for one in proposed(script, TIME, "b")} == {0}


def test_a_device_that_claims_encodings_which_the_run_does_not_have_is_asked_for_none_of_them():
    script, forged = playing(start_with=2), tuple(0.5**n for n in range(9))
    script.ready("a", affords=sending(1.0, uplink=8), ratio=1.0, values=(1.0, 0.2, 0.01))
    script.ready("b", affords=sending(1.0), ratio=1.0, values=forged)
    assert {one.budget.uplink for one in proposed(script, TIME, "a")} == {0}
    assert {one.budget.uplink for one in proposed(script, TIME, "b")} == {0, 1, 2}


def test_a_task_says_what_its_round_takes_with_the_encoding_that_is_asked_for():
    script = playing(start_with=1)
    script.ready("a", affords=sending(50.0), ratio=1.0, values=(1.0, 0.2, 0.01))
    member = script.state.members["a"]
    script.state.put("a", assigned=Budget(0.4, 1.0, 2))
    assert script.state.members["a"].at_work.round_s == pytest.approx(2.0 + 0.01 * 20.0)
    script.state.put("a", assigned=Budget(0.4))
    assert script.state.members["a"].at_work.round_s == pytest.approx(22.0)
    assert member.report.values == (1.0, 0.2, 0.01)


def test_what_an_encoding_leaves_for_later_is_lost_till_then_and_noise_is_not():
    of = {name: encodings.find(name).cost.utility_factor() for name in encodings.REGISTRY}
    assert of["raw"] == of["lossless"] == of["sketch"] == of["peaks"] == 1
    fine, coarse = encodings.chosen({"name": "lowrank", "step": 1}), encodings.find("lowrank")
    assert 1 > fine.cost.utility_factor() > coarse.cost.utility_factor() > of["sparse"] > 0.5
    assert fine.cost.bytes_per_value > coarse.cost.bytes_per_value


def test_no_less_local_training_is_proposed_than_the_run_says_or_more_than_fits():
    member = playing(start_with=2)
    member.ready("a", affords=(RatioCandidate(0.5, 20.0, 1000, 8.0, 16.0, 4.0, 0.75),), ratio=0.5)
    told = member.state.members["a"]
    shares = [one.budget.local_work for one in options_of(told, ObjectiveSection("time", least_work=0.5))]
    assert shares == [0.5, 0.75]
    whole = options_of(told, ObjectiveSection("time", least_work=1.0))
    assert [one.budget.local_work for one in whole] == [0.75], "it cannot do more, and is not left out"


def test_no_more_is_proposed_than_the_device_affords_or_the_run_allows():
    script = playing(ObjectiveSection("time", at_most=0.6), start_with=2)
    script.ready("a", affords=needing(1.0, start_s=9.0), ratio=1.0)
    script.ready("b", affords=needing(1.0, start_s=9.0, ratios=(0.8, 1.0)), ratio=1.0)
    seen = defaultdict(set)
    for _ in range(60):
        for device, ratio in assigned_ratio(script).items():
            seen[device].add(ratio)
        script.updates("a", "b")
    assert seen == {"a": {0.6}, "b": {0.8}}


def test_the_method_hears_of_a_ratio_when_it_is_another_one():
    script = playing(start_with=2)
    actions = [*script.ready("a", "b", affords=needing(1.0, start_s=9.0), ratio=1.0)]
    known = {}
    for number in range(10):
        if number == 5:
            script.ready("a", affords=needing(1.0, start_s=9.0, ratios=(0.2, 0.4)), ratio=0.4)
        admitted = {one.report.device: one.report.ratio for one in of(Admit, actions)}
        assert all(known.get(device) != ratio for device, ratio in admitted.items())
        known |= admitted
        assert number == 5 or known == assigned_ratio(script), (
            "each task is planned at the ratio that was dealt"
        )
        actions = script.updates("a", "b")
    assert known == {"a": 0.4, "b": 0.8}, "of a round that is shorter now"
    assert len(of(SendTask, actions)) == 2


def test_a_restart_changes_nothing():
    def rounds(restarted_after):
        script = playing(start_with=3)
        script.ready("a", "b", "c", affords=needing(1.0, start_s=9.0), ratio=1.0)
        found = []
        for number in range(30):
            found.append(assigned_ratio(script))
            if number == restarted_after:
                script.restart(script.now)
                script.ready("a", "b", "c", affords=needing(1.0, start_s=9.0), ratio=1.0)
            for device in "abc":
                script.update(device)
        return found

    assert rounds(7) == rounds(None)


def test_a_predicted_deadline_is_that_of_what_was_proposed():
    objective = ObjectiveSection("time", at_most=0.2)
    script = playing(objective, deadline_slack=2.0)
    script.ready("a", affords=needing(4.0), ratio=1.0, round_s=4.0)
    assert proposed_s(script.state, script.round, objective) == pytest.approx(2 * 0.2 * 4.0)
    assert proposed_s(script.state, script.round, ENERGY) == 10.0
    assert script.engine.wake_at - script.now == pytest.approx(2 * 0.2 * 4.0)


def test_who_is_held_up_holds_up_nobody_else_for_long():
    """A link that is gone for a while: the round is over at 1.5 times the pace, not at its deadline."""
    script = playing(start_with=3, deadline_s=600.0)
    script.ready("a", "b", "c", affords=needing(4.0, ratios=(0.5,)), ratio=0.5, round_s=2.0)
    script.updates("a", "b")
    assert script.engine.wake_at - script.now == pytest.approx(3.0)
    script.tick(script.now + 3.0)
    assert script.state.rounds_done == 1
    asked = []
    for _ in range(32):
        assert script.engine.wake_at - script.now == pytest.approx(3.0), "and so are the next ones"
        asked.append("c" in script.state.participants)
        script.updates("a", "b")
        if asked[-1]:
            script.tick(script.now + 3.0)
    assert asked[:8] == [True, True, False, True, False, False, False, True]
    assert [number for number, was in enumerate(asked) if was][3:] == [7, 15, 23, 31], "never more rarely"


@pytest.mark.parametrize("lie_s", [0.0, 1e-9, 9.9, None])
def test_who_lies_about_its_seconds_makes_no_round_longer_than_without_an_objective(lie_s):
    """Without one each works at the largest ratio that its deadline allows; here never at a larger one."""
    honest = {name: options(5.0) for name in "abc"}
    lying = honest | {"liar": [option(Budget(ratio), lie_s) for ratio in RATIOS]}
    found = within_target_duration(lying)
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
    with pytest.raises(SettingError, match=r'minimise = "energy" .*round.mode = "window"'):
        check_method(settings, from_section(settings.method, tiny_spec()))


def test_a_state_without_it_is_as_it_was():
    script = Script()
    script.ready("a", affords=needing(1.0), ratio=1.0)
    script.update("a")
    member = script.state.members["a"]
    assert member.assigned is None
    assert msgspec.to_builtins(script.state.members["a"].report)["ratio"] == 1.0
