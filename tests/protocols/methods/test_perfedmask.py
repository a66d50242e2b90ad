"""PerFedMask against worked numbers: which layers a device trains, what travels, who is averaged."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.methods.perfedmask import PerFedMask, choose, unevenness
from fleetune.protocols.model.spec import TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers

SPEC = tiny_spec()
KEY = Key.of("test", "layers")


def mask_of(*layers):
    return Layers(layers).mask(SPEC)


def work(method, device, task, trainer):
    return method.work(device, task, trainer, Budget(), KEY.child("work"))


def literally(masks, sizes):
    """sum_n [P * max_l K_nl - sum_l K_nl * P_l - sum_l M_nl * P_l], number by number."""
    trainers, total = [sum(column) for column in zip(*masks, strict=True)], 0.0
    for mask in masks:
        shares = [taken / max(1, number) for taken, number in zip(mask, trainers, strict=True)]
        total += sum(sizes) * max(shares)
        total -= sum(share * size for share, size in zip(shares, sizes, strict=True))
        total -= sum(taken * size for taken, size in zip(mask, sizes, strict=True))
    return total


def masks_of(num_layers):
    return [mask for mask in itertools.product((0, 1), repeat=num_layers) if any(mask)]


@pytest.mark.parametrize("others", [0, 1, 4])
def test_perfedmasks_sum_is_the_formula(others):
    sizes, options = np.array([5, 1, 7, 2]), np.array(masks_of(4), bool)
    rows = np.array(masks_of(4), bool)[Key.of(others).sample(others, 15)]
    found = unevenness(options, rows, sizes)
    wanted = [literally([option.tolist(), *rows.tolist()], sizes.tolist()) for option in options]
    assert found == pytest.approx(wanted)


def test_perfedmask_prefers_the_same_layer_and_a_filled_capability():
    """Layers of 1 and 1, both devices afford one: apart the sum is 2 * 2 - 2 - 2, together 2 * 1 - 1 - 2."""
    masks = choose({}, {"a": 0.5, "b": 0.5}, np.array([1, 1]), KEY)
    assert np.array_equal(masks["a"], masks["b"])
    assert masks["a"].sum() == 1
    full = choose({}, {"a": 1.0, "b": 1.0}, np.array([1, 5, 2]), KEY)
    assert all(mask.all() for mask in full.values())


def test_perfedmasks_search_comes_to_the_best_masks_there_are():
    reached = 0
    for case in range(20):
        draw = KEY.child(case).uniform(6)
        sizes = (1 + 20 * draw[:3]).astype(int)
        ratios = {f"d{at}": float(np.ceil(5 * share) / 5) for at, share in enumerate(draw[3:])}
        limits = [max(ratio * sizes.sum() + 1e-6, sizes.min()) for ratio in ratios.values()]
        affordable = [[mask for mask in masks_of(3) if mask @ sizes <= limit] for limit in limits]
        best = min(literally(masks, sizes.tolist()) for masks in itertools.product(*affordable))
        masks = choose({}, ratios, sizes, KEY)
        assert all(masks[f"d{at}"] @ sizes <= limit for at, limit in enumerate(limits))
        reached += literally([mask.tolist() for mask in masks.values()], sizes.tolist()) < best + 1e-6
    assert reached >= 19


def test_perfedmask_fits_a_newcomer_to_the_masks_that_are_there():
    known = {"a": np.array([True, False, False]), "c": np.array([False, True, False])}
    masks = choose(known, {"a": 1.0, "b": 0.1, "c": 1.0}, np.array([4, 4, 3]), KEY)
    assert list(masks) == ["a", "c", "b"]
    assert masks["a"] is not masks["b"]
    assert [masks[name].tolist() for name in "ac"] == [[True, False, False], [False, True, False]]
    assert masks["b"].tolist() == [False, False, True]  # affords none, so the smallest


def perfedmask_state(method, weights, **ratios):
    state = method.init_coordinator(weights)
    for device, ratio in ratios.items():
        state = method.admit(state, DeviceReport(device, ratio=ratio))
    return state


def test_perfedmask_chooses_anew_for_a_new_ratio_only(weights):
    method = PerFedMask(SPEC)
    state, _ = method.plan(perfedmask_state(method, weights, a=1.0, b=1.0), Round(1, ("a",)), KEY)
    assert set(state.masks) == {"a", "b"}
    assert method.admit(state, DeviceReport("a", ratio=1.0)) is state
    assert set(method.admit(state, DeviceReport("a", ratio=0.5)).masks) == {"b"}


def two_layer_body():
    """tiny_spec with another layer behind the norm: the body is a with n, and m; the head is b."""
    tensors = list(SPEC.tensors)
    tensors.insert(3, TensorSpec("m.weight", (2,), "weight", "m", ((),)))
    return replace(SPEC, tensors=tuple(tensors))


def test_perfedmask_trains_and_sends_the_chosen_layers_under_the_first_head():
    spec = two_layer_body()
    method, weights = PerFedMask(spec), np.zeros(spec.size, np.float32)
    assert method.maskable == (Layers(("a", "n")), Layers(("m",)))
    state = perfedmask_state(method, weights, small=0.1, big=1.0)
    state, tasks = method.plan(state, Round(1, ("big", "small", "unknown")), KEY)
    assert [tasks[name].trained.names for name in ("small", "big", "unknown")] == [
        ("m",),
        ("a", "n", "m"),
        ("a", "n", "m"),
    ]
    assert all(tasks[name].patch.selection == Layers(("a", "n", "m")) for name in tasks)
    plans = []

    class Noting(PullToTarget):
        def fit(self, weights, plan, key):
            plans.append((weights, plan))
            return super().fit(weights, plan, key)

    device = replace(method.init_device(weights), weights=weights + np.float32(3))
    device, update = work(method, device, tasks["small"], Noting(spec, "d"))
    (start, body), (again, tuning) = plans
    assert np.array_equal(start, again)
    assert not start[: spec.num_parameters].any()  # the shared body and the first head, nothing of its own
    assert np.array_equal(body.trainable, Layers(("m",)).mask(spec))
    assert (tuning.trainable, tuning.epochs) == (None, 5)
    assert update.patch.selection == Layers(("m",))
    assert device.weights[Layers(("b",)).mask(spec)].all()  # the personal head is tuned


def test_perfedmask_tells_who_trains_each_layer():
    spec = two_layer_body()
    method = PerFedMask(spec)
    state = perfedmask_state(method, np.zeros(spec.size, np.float32), small=0.1, big=1.0)
    assert method.diagnose_round(state) == {}
    state, _ = method.plan(state, Round(1, ("big", "small")), KEY)
    assert method.diagnose_round(state) == {"trainers": {"a": 0.5, "m": 1.0}}


def test_perfedmask_averages_each_layer_over_who_sent_it(weights):
    method, state = PerFedMask(SPEC), PerFedMask(SPEC).init_coordinator(weights)
    one, four, nine = (np.full(SPEC.size, value, np.float32) for value in (1, 4, 9))
    updates = [
        ("d0", Update(Patch.of(one, Layers(("a", "n")), SPEC), 10)),
        ("d1", Update(Patch.of(four, Layers(("a",)), SPEC), 30)),
        ("d2", Update(Patch.of(nine, Layers(("b",)), SPEC), 30)),  # the head is nobody's to send
    ]
    merged = method.shared_model(method.aggregate(state, updates))
    assert merged[mask_of("a")] == pytest.approx(3.25)
    assert merged[mask_of("n")] == pytest.approx(1)
    assert np.array_equal(merged[mask_of("b")], weights[mask_of("b")])


def test_perfedmask_of_devices_that_afford_everything_is_fedbabu(weights):
    ours, theirs = create("perfedmask", SPEC, {}), create("fedbabu", SPEC, {"fine_tuned": "all"})
    ends = []
    for method in (ours, theirs):
        state, devices = method.init_coordinator(weights), {}
        for number in (1, 2):
            state, tasks = method.plan(state, Round(number, ("d0", "d1")), KEY)
            updates = []
            for name, task in tasks.items():
                before = devices.get(name, method.init_device(weights))
                devices[name], update = work(method, before, task, PullToTarget(SPEC, name))
                updates.append((name, update))
            state = method.aggregate(state, updates)
        ends.append([method.shared_model(state), *(method.personal_model(d) for d in devices.values())])
    assert np.array_equal(*ends)
    assert not np.array_equal(ends[0][0], weights)
