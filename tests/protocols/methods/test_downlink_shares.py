"""What a device of a small ratio is sent by SRP-pFed and FedPURIN: less down, too, both ways as priced."""

from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods import create
from fleetune.protocols.methods.srp_pfed import num_shared, shared_mask
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.selection import DrawnEntries, Everything

SPEC = tiny_spec(400)
START = Key.of("start").uniform(SPEC.size).astype(np.float32) - np.float32(0.5)


def after_rounds(method, ratios, rounds=3):
    """The last round's tasks and updates of a fleet with these ratios, each device's state before, and the
    coordinator's.
    """
    state, devices = method.init_coordinator(START), {}
    for name, ratio in ratios.items():
        state = method.admit(state, DeviceReport(name, ratio=ratio))
        devices[name] = method.init_device(START)
    for number in range(1, rounds + 1):
        state, tasks = method.plan(state, Round(number, tuple(sorted(ratios))), Key.of(number))
        planned, before, updates = state, dict(devices), {}
        for name in sorted(ratios):
            trainer = PullToTarget(SPEC, name)
            devices[name], updates[name] = method.work(
                before[name], tasks[name], trainer, Budget(ratios[name]), Key.of(number, name)
            )
        state = method.aggregate(state, updates.items())
    return {name: tasks[name] for name in ratios}, updates, before, planned


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9, 1.0])
def test_drawn_entries_are_their_share_of_every_layer_and_arcs_in_turn_take_each_entry(share):
    seen = np.zeros(SPEC.size, int)
    rounds = [DrawnEntries.of_round(share, number, Key.of("device")) for number in range(round(1 / share))]
    for drawn in rounds:
        mask = drawn.mask(SPEC)
        assert drawn.count(SPEC) == mask.sum()
        assert not mask[SPEC.num_parameters :].any()
        assert mask[SPEC.layers["a"]].mean() == pytest.approx(share, abs=0.06)
        seen += mask
    if share in (0.1, 0.25, 0.5, 1.0):
        assert (seen[: SPEC.num_parameters] == 1).mean() > 0.99  # ten arcs of 0.1 are a rounding short
    again = codec.decode(codec.encode(rounds[0], SPEC), DrawnEntries, SPEC)
    assert np.array_equal(again.mask(SPEC), rounds[0].mask(SPEC))


def test_drawn_entries_by_hand():
    """Places on the circle are what SplitMix64 gives from the state 0."""
    places = Key(0).bits(SPEC.num_parameters)
    assert [int(place) for place in places[:2]] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    arc = DrawnEntries(0.25, 2**64 - 2**62).mask(SPEC)[: SPEC.num_parameters]
    assert np.array_equal(arc, places >= 2**64 - 2**62)
    around = DrawnEntries(0.5, 2**64 - 2**62).mask(SPEC)[: SPEC.num_parameters]
    assert np.array_equal(around, (places >= 2**64 - 2**62) | (places < 2**62))


@pytest.mark.parametrize(("share", "start"), [(0.0, 1), (1.5, 1), (0.5, -1), (0.5, 2**64)])
def test_impossible_draws_are_refused(share, start):
    with pytest.raises(PacketCorrupt):
        DrawnEntries(share, start).mask(SPEC)


def test_srp_pfed_shares_the_smallest_of_what_was_sent_and_keeps_the_rest():
    method = create("srp-pfed", SPEC, {"downlink": "share", "credit": "used", "draws": 1})
    tasks, updates, before, planned = after_rounds(method, {"thin": 0.3, "whole": 1.0})
    sent = tasks["thin"].patch.selection.mask(SPEC)
    assert sent.mean() == pytest.approx(0.3, abs=0.05)
    assert isinstance(tasks["whole"].patch.selection, Everything)
    assert tasks["thin"].rates == tasks["whole"].rates  # no rate is capped
    shared = updates["thin"].patch.selection.mask(SPEC)
    entries, own = np.flatnonzero(sent), before["thin"].weights
    expected = entries[shared_mask(own[entries], tasks["thin"].rates[0])]
    assert np.flatnonzero(shared).tolist() == expected.tolist()
    assert shared.sum() == num_shared(tasks["thin"].rates[0], entries.size)
    trainer = PullToTarget(SPEC, "thin")
    start = np.where(shared, planned.weights, own)
    fitted = trainer.fit(start, FitPlan(), Key.of(3, "thin")).weights
    assert np.array_equal(updates["thin"].patch.values, fitted[shared])


def test_srp_pfed_at_ratio_1_is_the_same_with_either_downlink():
    ratios = {"a": 1.0, "b": 1.0}
    whole, share = (create("srp-pfed", SPEC, {"downlink": one}) for one in ("whole", "share"))
    assert same(after_rounds(whole, ratios), after_rounds(share, ratios))
    assert not same(after_rounds(whole, {"a": 1.0, "b": 0.4}), after_rounds(share, {"a": 1.0, "b": 0.4}))


@pytest.mark.parametrize("beta", [0, 5])
def test_fedpurin_at_tau_is_the_same_with_either_downlink(beta):
    ratios = {"a": 0.5, "b": 1.0}
    whole, share = (create("fedpurin", SPEC, {"downlink": one, "beta": beta}) for one in ("whole", "share"))
    assert same(after_rounds(whole, ratios), after_rounds(share, ratios))
    assert not same(after_rounds(whole, {"a": 0.5, "b": 0.4}), after_rounds(share, {"a": 0.5, "b": 0.4}))


def same(one, other):
    return all(
        codec.encode(one[part][name], SPEC) == codec.encode(other[part][name], SPEC)
        for part in (0, 1, 2)
        for name in one[part]
    )


@pytest.mark.parametrize("beta", [0, 5])
def test_fedpurin_takes_bar_where_it_was_sent_and_its_own_elsewhere(beta):
    method = create("fedpurin", SPEC, {"downlink": "share", "beta": beta, "tau": 0.5})
    tasks, _, before, planned = after_rounds(method, dict.fromkeys("abc", 0.2))
    name = next(name for name in "abc" if (planned.held[name].collaborated is None) == (beta == 0))
    task, device = tasks[name], before[name]
    assert task.holds == device.number == 2
    start = method.combined_model(device, task)
    drawn = DrawnEntries.of_round((0.4 - 0.2) / (1 - 0.2), 3, Key.of("downlink")).mask(SPEC)
    critical = device.critical
    assert drawn.mean() == pytest.approx((0.4 - 0.2) / (1 - 0.2), abs=0.03)
    shared = np.isin(np.arange(SPEC.size), np.concatenate([np.arange(s.start, s.stop) for s in norms_out()]))
    held = planned.held[name]
    own = device.weights if held.collaborated is None else scattered(critical, held.collaborated)
    expected = np.where(critical, own, np.where(drawn & shared, planned.weights, device.weights))
    assert np.array_equal(start, expected)
    assert (planned.weights[drawn & shared & ~critical] == 0).any()  # known to be 0 without being sent
    late = method.combined_model(replace(device, number=1), task)  # its update was lost
    assert np.array_equal(late[~drawn & ~critical], device.weights[~drawn & ~critical])


def norms_out():
    return [SPEC.slices[one.name] for one in SPEC.tensors if one.kind in ("weight", "bias")]


def scattered(critical, values):
    whole = np.zeros(SPEC.size, np.float32)
    whole[critical] = values
    return whole


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.4, 0.5])
@pytest.mark.parametrize("beta", [0, 9])
def test_fedpurin_is_priced_at_what_it_sends(ratio, beta):
    method = create("fedpurin", BIG, {"downlink": "share", "beta": beta, "average": "coverage"})
    down, up = sizes(method, dict.fromkeys("abcdefgh", ratio))
    cost = next(one.cost for one in method.choices(DeviceReport("a")) if one.ratio == ratio)
    assert up == pytest.approx(cost.bytes_up, rel=0.05)
    assert down <= 1.05 * cost.bytes_down
    if beta and ratio >= 0.1:  # then what is critical comes down, too, and bar has few zeros
        assert down >= 0.7 * cost.bytes_down


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 1.0])
def test_srp_pfed_is_priced_at_what_it_sends(ratio):
    method = create("srp-pfed", BIG, {"downlink": "share", "fixed_rates": [1.0]})
    down, up = sizes(method, dict.fromkeys("ab", ratio))
    cost = next(one.cost for one in method.choices(DeviceReport("a")) if one.ratio == ratio)
    assert down == pytest.approx(cost.bytes_down, rel=0.03)
    assert up == pytest.approx(cost.bytes_up, rel=0.05)


BIG = tiny_spec(4000)


def sizes(method, ratios):
    """About how many bytes the largest task and update take in the third round, by the entries in them."""
    state = method.init_coordinator(Key.of("big").uniform(BIG.size).astype(np.float32) - np.float32(0.5))
    devices = {}
    for device, ratio in ratios.items():
        state = method.admit(state, DeviceReport(device, ratio=ratio))
        devices[device] = method.init_device(state.weights)
    for number in (1, 2, 3):
        state, tasks = method.plan(state, Round(number, tuple(ratios)), Key.of(number))
        tasks, updates = dict(tasks), {}
        for device, ratio in ratios.items():
            trainer = PullToTarget(BIG, device)
            devices[device], updates[device] = method.work(
                devices[device], tasks[device], trainer, Budget(ratio), Key.of(device)
            )
        state = method.aggregate(state, updates.items())
    return [max(about(one.patch) for one in made.values()) for made in (tasks, updates)]


def about(patch):
    bitmap = getattr(patch.selection, "bitmap", np.empty(0, bool))
    return codec.estimate_bytes(patch.values.size) + len(codec.encode(bitmap, BIG))
