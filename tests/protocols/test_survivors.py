"""What no other test noticed when it was changed on purpose."""

from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.every_method import SETTINGS
from tests.helpers.exact_rounds import DEVICES, Fleet
from tests.helpers.nightly import of_methods

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.methods.clusterfl import farthest_points
from fleetune.protocols.methods.dcpfl.splitting import rapid_decrease_end
from fleetune.protocols.methods.kapc import bls
from fleetune.protocols.methods.kapc.bls import Visit
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec

KEY = Key.of("survivors")
EVERY = pytest.mark.parametrize(
    ("name", "settings"),
    of_methods(SETTINGS),
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)


def played(name, settings, spec, rounds, *, admitted=True):
    """The method, its state, and the last round's task and update of a device that can afford everything."""
    method, weights = (
        create(name, spec, settings),
        KEY.uniform(spec.size).astype(np.float32) - np.float32(0.5),
    )
    state, device = method.init_coordinator(weights), method.init_device(weights)
    if admitted:
        state = method.admit(state, DeviceReport("d", num_samples=12))
    trainer = PullToTarget(spec, "d", 12)
    for number in range(1, rounds + 1):
        before, tasks = method.plan(state, Round(number, ("d",)), KEY.child(number))
        device, update = method.work(device, tasks["d"], trainer, Budget(), KEY.child("work", number))
        state = method.aggregate(before, [("d", update)])
    return method, before, tasks["d"], update


@EVERY
def test_costs_in_bytes_are_those_of_the_largest_round(name, settings):
    spec, sent = tiny_spec(4000), []
    for rounds in (1, 2, 3):
        method, _, task, update = played(name, settings, spec, rounds)
        sent.append([len(codec.encode(one, spec)) for one in (task, update)])
    cost = method.choices(DeviceReport("d"))[-1].cost
    for most, expected in zip(np.max(sent, axis=0), (cost.bytes_down, cost.bytes_up), strict=True):
        assert most <= 1.15 * expected + 500


@EVERY
def test_a_device_of_which_nothing_was_reported_is_taken_for_a_whole_one(name, settings):
    spec = tiny_spec()
    _, _, task, _ = played(name, settings, spec, 1, admitted=False)
    _, _, known, _ = played(name, settings, spec, 1)
    assert codec.encode(task, spec) == codec.encode(known, spec)


@EVERY
def test_a_stale_update_moves_the_shared_model_by_its_factor(name, settings):
    rounds = 1 if "server_momentum" in settings else 2  # what earlier steps carry on is no update's
    method, state, _, update = played(name, settings, tiny_spec(), rounds)
    if not method.semi_asynchronous:
        with pytest.raises(NotImplementedError, match="is not semi-asynchronous"):
            method.discount(state, update, 0.25)
        return
    before = method.shared_model(state)
    whole, quarter = (
        method.shared_model(method.aggregate(state, [("d", one)])) - before
        for one in (update, method.discount(state, update, 0.25))
    )
    sent = update.patch.selection.mask(method.spec)
    assert quarter[sent] == pytest.approx(whole[sent] / 4, abs=1e-6)


def test_a_minimum_is_compared_with_just_the_rounds_after_it():
    assert rapid_decrease_end([5, 3, 4, 5, 1], 2) == (2, 4)
    assert rapid_decrease_end([5, 1, 0.5, 2, 3], 2) == (3, 5)
    assert rapid_decrease_end([5, 1, 1, 2, 3], 2) == (3, 5)


def test_centres_are_far_from_each_other_by_their_distances():
    points = KEY.uniform(24).reshape(12, 2) * [3, 1] + 5
    apart = np.linalg.norm(points[:, None] - points, axis=2) ** 2
    chosen = [int(apart.sum(axis=1).argmax())]
    while len(chosen) < 5:
        chosen.append(int(apart[:, chosen].min(axis=1).argmax()))
    assert farthest_points(points @ points.T, 5) == chosen


def test_dc_pfl_compares_nobody_while_a_grouping_settles():
    fleet = Fleet("dc-pfl")
    fleet.round()
    assert fleet.state.pairs.devices == tuple(DEVICES)
    settling = replace(fleet.method.init_coordinator(fleet.shared), phase="settle", round=1)
    for device in DEVICES:
        settling = fleet.method.admit(settling, DeviceReport(device))
    assert fleet.method.aggregate(settling, fleet.updates.items()).pairs.devices == ()


def test_bls_goes_down_from_where_it_was():
    assert bls.search(2, 4, lambda number: number in (1, 3), first=False) == 1


@pytest.mark.parametrize("previous", [1, 2, 3, 4])
@pytest.mark.parametrize(("bounds", "expected"), [(1, range(1, 5)), (10, [5])])
def test_bls_sends_as_many_layers_as_satisfy_the_criterion(previous, bounds, expected):
    shapes = [(6, 25), (16, 150), (12, 16), (8, 12), (10, 8)]
    weights, targets = (
        [KEY.child(name, i).uniform(d * n) for i, (d, n) in enumerate(shapes)] for name in "ws"
    )
    norms, distances = bls.bounds(weights, targets)
    outputs, inputs = zip(*shapes, strict=True)
    full = norms * bounds, distances * bounds
    held = [bls.criterion(o, full, (norms, distances), outputs, inputs, 4)[2] for o in range(1, 6)]
    assert held == sorted(held, reverse=True)
    assert sum(held) in expected
    last = Visit(*full, previous)
    assert bls.select(last, weights, targets, shapes, 4, "largest").uploaded == sum(held)


def test_who_can_afford_no_rate_gets_the_least():
    method = create("srp-pfed", tiny_spec(), {})
    state = method.admit(method.init_coordinator(np.zeros(method.spec.size, np.float32)), DeviceReport("d"))
    for ratio in (0.05, 0.1, 0.15):
        poor = method.admit(state, DeviceReport("d", ratio=ratio))
        assert method.plan(poor, Round(1, ("d",)), KEY)[1]["d"].rates == (0.1,)


def test_a_hypernetwork_has_three_hidden_layers():
    method = create("pfedla", tiny_spec(), {"embedding": 5, "hidden": 7})
    state, _ = method.plan(
        method.init_coordinator(np.zeros(method.spec.size, np.float32)), Round(1, ("d",)), KEY
    )
    assert [matrix.shape for matrix in state.networks["d"].hidden] == [(7, 6), (7, 8), (7, 8)]
