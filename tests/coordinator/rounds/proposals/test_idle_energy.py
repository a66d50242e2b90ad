"""What boards draw while a round lasts is a part of what it takes: who saves a joule costs others no two."""

import pytest
from tests.coordinator.rounds.test_engine import Script

from fleetune.coordinator.rounds.proposals.idle_energy import MOST_DURATIONS, MOST_TIMES_USUAL, idle_cost
from fleetune.coordinator.rounds.proposals.planner import Planner, cost_efficient
from fleetune.protocols.method.choice import RatioCandidate
from fleetune.protocols.settings.objective import ObjectiveSection

ENERGY = ObjectiveSection("energy", encodings=())


def affording(start_s, whole_s, watts=2.0, ratios=(0.2, 0.6, 1.0)):
    """Rounds of which a part takes as long whatever the ratio is, at so many watts."""
    seconds = {ratio: start_s + whole_s * ratio for ratio in ratios}
    return tuple(RatioCandidate(ratio, s, 1000, watts * s) for ratio, s in seconds.items())


def fleet(idle_w, **devices):
    script = Script(rounds=9, objective=ENERGY, start_with=len(devices))
    for name, affords in devices.items():
        told = {} if idle_w.get(name) is None else {"idle_w": idle_w[name]}
        script.ready(name, affords=affords, ratio=1.0, **told)
    return script.state


def paying(state, names, objective=ENERGY):
    planner = Planner(objective)
    plans = planner.candidates(state, names)
    return plans, planner.worthwhile(state, plans)


def longest_s(kept):
    return max(one.seconds for some in kept.values() for one in some)


QUICK, SLOW = affording(1.0, 0.5, watts=20.0), affording(8.0, 20.0, watts=0.5)


def test_who_draws_nothing_while_waiting_does_what_brings_most_a_joule():
    state = fleet({}, a=QUICK, b=SLOW)
    plans, kept = paying(state, "ab")
    assert idle_cost(state, plans, ENERGY) is None
    assert kept == {name: cost_efficient(some, ENERGY) for name, some in plans.items()}


def test_the_more_boards_draw_doing_nothing_the_shorter_is_a_round():
    found = []
    for idle_w in (0.01, 0.5, 2.0):
        state = fleet(dict.fromkeys("abcd", idle_w), a=SLOW, b=QUICK, c=QUICK, d=QUICK)
        found.append(longest_s(paying(state, "abcd")[1]))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] >= min(one.round_s for one in SLOW)


def test_boards_beside_the_round_count_too():
    devices = {"a": SLOW, "b": QUICK} | {f"waits-{n}": QUICK for n in range(8)}
    few = fleet(dict.fromkeys("ab", 0.01), **devices)
    all_ = fleet({**dict.fromkeys(devices, 1.0), "a": 0.01, "b": 0.01}, **devices)
    assert longest_s(paying(all_, "ab")[1]) < longest_s(paying(few, "ab")[1])


def test_everybody_has_something_to_do_and_nobody_more_than_pays():
    state = fleet({"a": 1.0, "b": 1.0, "old": None}, a=QUICK, b=SLOW, old=QUICK)
    plans, kept = paying(state, ["a", "b", "old"])
    assert all(kept[name] and set(kept[name]) <= set(some) for name, some in plans.items())
    assert kept["old"] == [one for one in plans["old"] if one.seconds <= longest_s(kept)]


def test_who_lies_of_its_idling_shortens_rounds_by_no_more_than_so_many_honest_ones_would():
    honest = {f"d{n}": affording(1.0, 20.0, watts=3.0) for n in range(9)}
    usual = dict.fromkeys(honest, 0.3)
    for lie_w in (1e4, 1e9):
        state = fleet({**usual, "liar": lie_w}, **honest, liar=affording(1.0, 20.0, watts=1e9))
        plans = Planner(ENERGY).candidates(state, [*honest, "liar"])
        told = idle_cost(state, plans, ENERGY)
        assert told.of["liar"] == pytest.approx(MOST_TIMES_USUAL * 0.3)
    state = fleet({**usual, "liar": 1e4}, **honest, liar=affording(1.0, 20.0, watts=2.0))
    plans = Planner(ENERGY).candidates(state, [*honest, "liar"])
    assert idle_cost(state, plans, ENERGY).of["liar"] == pytest.approx(2.0), "no more than at work"


def test_who_does_not_know_its_joules_is_asked_for_whatever_keeps_the_pace():
    unknown = tuple(RatioCandidate(ratio, 1.0 + ratio) for ratio in (0.2, 1.0))
    state = fleet({"a": 1.0, "b": 1.0}, a=QUICK, b=unknown)
    plans, kept = paying(state, "ab")
    assert idle_cost(state, plans, ENERGY).of.keys() == {"a"}
    assert idle_cost(state, plans, ENERGY).others == pytest.approx(1.0)
    assert kept["b"] == [one for one in plans["b"] if one.seconds <= max(longest_s(kept), 1.2)]
    nobody = fleet({"a": 1.0}, a=unknown)
    assert paying(nobody, "a")[1] == paying(nobody, "a")[0], "all that fits may pay"


def test_seconds_that_nobody_knows_or_that_are_none_at_all_harm_nobody():
    nothing = (RatioCandidate(0.5, None, 1000, 1.0), RatioCandidate(1.0, 0.0, 1000, 2.0))
    state = fleet({"a": 1.0, "b": 1.0}, a=QUICK, b=nothing)
    assert all(paying(state, "ab")[1].values())


def test_a_fleet_of_many_different_devices_looks_at_few_paces():
    devices = {
        f"d{n:03}": affording(0.5 + n / 100, 1.0 + n, ratios=(0.1, 0.3, 0.5, 0.7, 0.9)) for n in range(90)
    }
    state = fleet(dict.fromkeys(devices, 1.0), **devices)
    plans, kept = paying(state, devices)
    assert sum(map(len, plans.values())) > MOST_DURATIONS
    assert all(kept.values())
