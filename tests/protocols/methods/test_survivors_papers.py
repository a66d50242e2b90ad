"""What no other test noticed in KAPC, BLS, DC-PFL, FedPURIN and SRP-pFed when it was changed on purpose."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.methods.dcpfl.discrepancy import PairMeans, groups_at, intervals, scale
from fleetune.protocols.methods.dcpfl.splitting import Update
from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.methods.kapc.bls import Visit
from fleetune.protocols.methods.srp_pfed import increment, num_shared, shared_mask
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

SPEC = tiny_spec()
KEY = Key.of("survivors of the papers")
WEIGHTS = KEY.uniform(SPEC.size).astype(np.float32) - np.float32(0.5)


def own(device):
    return KEY.child(device).uniform(SPEC.size).astype(np.float32) - np.float32(0.5)


# KAPC and BLS


def test_kapc_costs_are_those_of_its_layers():
    sizes = [4 * 6 + 6, 6 * 3 + 3]
    for name in ("kapc", "kapc-bls"):
        first, whole = create(name, SPEC, {"downlink": "share"}).choices(DeviceReport("d"))
        assert first.cost.bytes_down == first.cost.bytes_up == estimate_bytes(sizes[0])
        assert whole.cost.bytes_down == whole.cost.bytes_up == estimate_bytes(sum(sizes))
        assert first.cost.memory_bytes == whole.cost.memory_bytes == 4 * SPEC.size


def test_bls_takes_each_layer_for_a_matrix_of_outputs_and_inputs():
    assert create("kapc-bls", SPEC, {})._shapes == [(6, 4), (3, 6)]


def test_a_budget_just_below_two_layers_is_one_layer():
    method = create("kapc-bls", SPEC, {})
    _, tasks = method.plan(method.init_coordinator(WEIGHTS), Round(1, ("d",)), KEY)
    device, _ = method.work(method.init_device(WEIGHTS), tasks["d"], PullToTarget(SPEC, "d"), Budget(), KEY)
    device = replace(device, visit=replace(device.visit, norms=1e9 * device.visit.norms))
    whole, almost = (
        method.work(device, tasks["d"], PullToTarget(SPEC, "d"), Budget(ratio=ratio), KEY)[1].patch.selection
        for ratio in (1.0, 0.99)
    )
    assert (whole, almost) == (Layers(("a", "b")), Layers(("a",)))


def test_only_the_rows_that_ran_away_become_uniform():
    method = create("kapc", SPEC, {"relation_steps": 30, "relation_rate": 0.01})
    rows = KEY.uniform(6).reshape(2, 3) - 0.5
    calm = [[row * np.float64(0.1) for row in np.vstack([rows, rows[:1] + 1])] for _ in range(2)]
    wild = [[row * 1e30 for row in calm[0]], calm[1]]
    start = np.full((3, 2, 3), 1 / 3)
    expected = method._step(start, calm)
    found = method._step(start, wild)
    assert np.abs(expected[:, 1] - 1 / 3).max() > 1e-4
    assert found[:, 1] == pytest.approx(expected[:, 1])
    assert found[:, 0] == pytest.approx(np.full((3, 3), 1 / 3))


def test_each_row_is_projected_on_its_own():
    cube = 2 * KEY.uniform(24).reshape(2, 3, 4) - 0.5
    project = relationship_cube.project_simplex
    alone = [[project(row[None, None])[0, 0] for row in rows] for rows in cube]
    assert project(cube) == pytest.approx(np.array(alone))
    assert project(cube - 5) == pytest.approx(np.array(alone))
    assert project(np.array([[[0.5, 0.25, -1.0]]])).tolist() == [[[0.625, 0.375, 0.0]]]


@pytest.mark.parametrize("shares", [relationship_cube.normalise, relationship_cube.project_simplex])
def test_what_is_not_finite_counts_as_nothing(shares):
    found = shares(np.array([[[np.inf, 0.5, 0.5], [0.25, 0.25, 0.5]]]))
    assert found.tolist() == [[[0, 0.5, 0.5], [0.25, 0.25, 0.5]]]


def test_a_safe_step_is_bounded_though_the_layer_is_nearly_flat():
    cube, grams = np.full((2, 1, 2), 0.5), [np.diag([0.25, 0.125])]
    safe, same = (
        relationship_cube.descend(cube, grams, coaching=1.0, equal_sharing=0.0, rate=rate, safe=rate > 2)
        for rate in (100.0, 2.0)
    )
    assert safe == pytest.approx(same)


@pytest.mark.parametrize(("held", "counted"), [(0, 1), (1, 1), (5, 5)])
def test_the_criterion_counts_the_classes_that_a_device_holds(monkeypatch, held, counted):
    seen = []
    monkeypatch.setattr(bls, "criterion", lambda *args: (0, 0, seen.append(args[-1]) is not None))
    layers, shapes = [np.ones(4), np.ones(4)], [(2, 2), (2, 2)]
    bls.select(Visit(np.ones(2), np.ones(2), 1), layers, layers, shapes, held, "largest")
    assert seen == [counted]


@pytest.mark.parametrize(
    ("previous", "satisfied", "expected"), [(3, {3}, 2), (4, {3, 4}, 2), (4, {2, 3, 4}, 1), (1, {2}, 2)]
)
def test_the_literal_search_leaves_out_no_number(previous, satisfied, expected):
    found = bls.search(previous, 5, lambda number: number in satisfied, first=False, mode="literal")
    assert found == expected


# DC-PFL


def dc_pfl(*groups, **settings):
    """The method, and a state in which the devices are in these groups, of models of their own."""
    method = create("dc-pfl", SPEC, {"start_rounds": 1, **settings})
    state = method.init_coordinator(WEIGHTS)
    first = state.grouping.groups[0]
    placed = {device: place for place, members in enumerate(groups) for device in members}
    models = tuple(replace(first, weights=own(members)) for members in groups)
    return method, replace(state, grouping=replace(state.grouping, groups=models, placed=placed), round=2)


def whole(device):
    return Update(Patch.of(own(device), Everything(), SPEC), 1, loss=1.0)


def test_a_late_joiner_of_round_2_gets_what_round_1_averaged():
    method, state = dc_pfl("ab")
    state = method.aggregate(replace(state, round=1), [(device, whole(device)) for device in "ab"])
    _, tasks = method.plan(method.admit(state, DeviceReport("c")), Round(2, ("c",)), KEY)
    found = tasks["c"].patch.apply(WEIGHTS, SPEC)
    parameters = slice(SPEC.num_parameters)
    assert np.array_equal(found[parameters], method.shared_model(state)[parameters])


def test_everything_goes_up_in_the_last_of_the_first_rounds():
    method, state = dc_pfl("ab", start_rounds=2)
    rare = replace(state.grouping.groups[0], every=np.full(3, 3))
    assert [method.due(replace(state, round=number), rare).all() for number in (2, 4)] == [True, False]


def test_a_split_waits_for_the_whole_models_of_every_group():
    method, state = dc_pfl("ab", "cd")
    waiting = replace(state.grouping.groups[1], every=np.array([1, 3, 1]))
    assert method._all_upload_everything(state)
    groups = (state.grouping.groups[0], waiting)
    assert not method._all_upload_everything(replace(state, grouping=replace(state.grouping, groups=groups)))


def test_a_group_of_two_averages_and_is_compared_and_one_of_one_waits_for_full_syncs():
    method, state = dc_pfl("ab", "c", low_discrepancy=0.0)
    state = method._with_averages(state, {device: whole(device) for device in "abc"})
    assert [group.every.tolist() for group in state.grouping.groups] == [[1, 1, 1], [3, 3, 3]]
    assert state.pairs.devices == ("a", "b")
    old = state.grouping
    split = method.averaging.split(old, 0.5, "abc", np.array([0, 1, 1]), {}, 2)
    assert [group.every.tolist() for group in split.groups] == [[3, 3, 3], [1, 1, 1]]


def test_models_that_did_not_go_up_whole_are_not_compared():
    method, state = dc_pfl("ab")
    rare = replace(state.grouping.groups[0], every=np.array([1, 3, 1]))
    state = replace(state, grouping=replace(state.grouping, groups=(rare,)))
    part = Layers(("a", "b"))
    sent = {device: replace(whole(device), patch=Patch.of(own(device), part, SPEC)) for device in "ab"}
    assert method._with_averages(state, sent).pairs.devices == ()


@pytest.mark.parametrize("weak", ["", "c"])
def test_intervals_follow_a_full_sync_of_two_though_a_weak_device_sent_only_some_layers(weak):
    method, state = dc_pfl("abc", low_discrepancy=1.0)
    updates = {device: whole(device) for device in "ab"}
    for device in weak:
        updates[device] = replace(whole(device), patch=Patch.of(own(device), Layers(("b",)), SPEC))
    every = method.averaging.average(state.grouping.groups[0], updates, 2, alone=False).every
    assert set(every.tolist()) == {1, 3}


def test_the_mean_model_counts_a_group_of_one_once():
    _, state = dc_pfl("a", "bcd")
    expected = (own("a").astype(np.float64) + 3 * own("bcd")) / 4
    assert state.grouping.mean_model() == pytest.approx(expected)


def test_two_devices_can_part():
    labels, height = groups_at(np.array([[0.0, 0.25], [0.25, 0.0]]), 0.5)
    assert labels.tolist() == [0, 1]
    assert height == 0.25


def test_a_range_beyond_the_numbers_is_scaled_all_the_same():
    assert scale(np.array([-3e38, 0, 3e38], np.float32)).tolist() == [0, 0.5, 1]


def test_a_constant_layer_is_scaled_to_zeros():
    assert scale(np.full(3, 2, np.float32)).tolist() == [0, 0, 0]


def test_layers_that_are_alike_everywhere_do_not_wait():
    assert intervals(np.zeros(2), 0.0, 3, 1).tolist() == [1, 1]


def test_known_distances_stay_beside_those_that_are_estimated():
    def apart(distance):
        return np.array([[0.0, distance], [distance, 0.0]])

    pairs = PairMeans().add(["x", "k"], apart(0.2), 5).add(["k", "y"], apart(0.3), 5)
    assert pairs.lacks(["x", "k", "y"], 1)
    expected = [[0, 0.2, 0.3], [0.2, 0, 0.3], [0.3, 0.3, 0]]
    assert pairs.between(["x", "k", "y"]) == pytest.approx(np.array(expected))


# FedPURIN and SRP-pFed


def test_a_device_whose_first_update_was_lost_is_not_taken_for_one_that_is_held():
    method = create("fedpurin", SPEC, {})
    state, tasks = method.plan(method.init_coordinator(WEIGHTS), Round(1, ("a", "b")), KEY)
    device, updates = {}, {}
    for name in "ab":
        device[name], updates[name] = method.work(
            method.init_device(WEIGHTS), tasks[name], PullToTarget(SPEC, name), Budget(), KEY
        )
    state = method.aggregate(state, [("b", updates["b"])])
    _, tasks = method.plan(state, Round(2, ("a",)), KEY)
    start = method.combined_model(device["a"], tasks["a"])
    unsent = (state.weights == 0) & ~device["a"].critical
    assert unsent.any()
    assert np.array_equal(start[unsent], device["a"].weights[unsent])


def test_no_choice_of_fedpurin_is_listed_twice():
    choices = create("fedpurin", SPEC, {"tau": 0.5}).choices(DeviceReport("d"))
    assert [choice.ratio for choice in choices] == [0.05, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_the_bitmap_is_part_of_the_cost():
    spec = tiny_spec(4000)
    shared = 4 * 4000 + 4000 + 3 * 4000 + 3
    cost = create("fedpurin", spec, {"tau": 1.0}).choices(DeviceReport("d"))[-1].cost
    bitmap = estimate_bitmap_bytes(shared, spec.num_parameters)
    assert (cost.bytes_down, cost.bytes_up) == (estimate_bytes(shared) + bitmap,) * 2
    assert cost.mask_bytes_up == bitmap
    cost = create("srp-pfed", spec, {}).choices(DeviceReport("d"))[0].cost
    sent = num_shared(0.1, spec.num_parameters)
    assert cost.mask_bytes_up == estimate_bitmap_bytes(sent, spec.num_parameters)
    assert cost.bytes_up == cost.mask_bytes_up + estimate_bytes(sent)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.35, 0.8])
def test_the_least_of_many_are_shared(rate):
    for number in range(5):
        weights = KEY.child("many", number).uniform(1000) - 0.5
        least = np.argsort(np.abs(weights))[: num_shared(rate, 1000)]
        assert np.flatnonzero(shared_mask(weights, rate)).tolist() == sorted(least)


def test_one_devices_loss_is_the_mean():
    assert increment([2.0], "mean") == pytest.approx(1 - 1 / (1 + math.exp(-2)))
