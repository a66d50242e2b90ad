"""FedSPU's steps against the worked cases and the paper's words."""

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.method.averaging import Task, Update, covered_average
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods.fedspu import FedSPU, rose, stopping_loss
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import (
    Entries,
    Neurons,
    draw_neurons,
    expected_count,
    neuron_mask,
    num_active,
)

SPEC = tiny_spec()


def flat(size: int) -> ModelSpec:
    return ModelSpec("flat", (TensorSpec("w", (size,), "weight", "w", ((),)),), (), (1,), 2)


@pytest.mark.parametrize(("n", "p", "expected"), [(6, 0.2, 1), (120, 0.6, 72), (5, 1.0, 5), (3, 0.34, 1)])
def test_number_of_active_neurons(n, p, expected):
    assert num_active(n, p) == expected


def test_each_entry_is_averaged_over_its_senders():
    masks = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0]], bool)
    values = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [-1, -2, -3, -4]], np.float32)
    updates = [
        (f"d{i}", Update(Patch(Entries(m), v[m]), n))
        for i, (m, v, n) in enumerate(zip(masks, values, (10, 30, 60), strict=True))
    ]
    merged = covered_average(np.full(4, 9, np.float32), updates, flat(4))
    assert merged == pytest.approx([1.0, -1.4285714285714286, 1 / 3, 9.0])


def test_entries_between_active_neurons_with_a_flatten_between():
    conv = TensorSpec("c", (2, 1, 1, 1), "weight", "c", ((Span(0, 0, 2),), (), (), ()))
    bias = TensorSpec("cb", (2,), "bias", "c", ((Span(0, 0, 2),),))
    fc = TensorSpec("f", (3, 8), "weight", "f", ((), (Span(0, 0, 2, repeat=4),)))
    spec = ModelSpec("flatten", (conv, bias, fc), (2,), (1, 2, 2), 3)
    mask = neuron_mask(spec, [np.array([False, True])])
    assert mask[:4].tolist() == [False, True, False, True]
    assert mask[4:].reshape(3, 8).tolist() == [[False] * 4 + [True] * 4] * 3


def test_both_sides_draw_the_same_neurons_and_the_count_is_known_beforehand():
    for ratio in (0.1, 0.5, 1.0):
        mask = Neurons(ratio, 11).mask(SPEC)
        assert np.array_equal(mask, Neurons(ratio, 11).mask(SPEC))
        assert np.count_nonzero(mask) == expected_count(SPEC, ratio)
    drawn = {tuple(draw_neurons((6,), 0.5, key)[0]) for key in range(40)}
    assert len(drawn) > 10


def test_the_documented_hash_pins_the_draw():
    """An agent in another language must get these numbers (made in plain Python from the docstring)."""
    key = Key.of("fleetune", 0)
    assert key.value == 9145208938111830163
    assert key.bits(2).tolist() == [16228852975176068288, 18218803799667093943]
    assert key.sample(3, 10).tolist() == [3, 7, 8]


def test_what_is_not_active_is_neither_trained_nor_sent(weights):
    method = FedSPU(SPEC)
    state = method.admit(method.init_coordinator(weights), DeviceReport("d", ratio=0.5))
    state, tasks = method.plan(state, Round(1, ("d",)), Key.of(1))
    own = weights + np.float32(1)
    device, update = method.work(
        method.init_device(own), tasks["d"], PullToTarget(SPEC, "d"), Budget(), Key.of(2)
    )
    active = tasks["d"].patch.selection.mask(SPEC)
    parameters = np.arange(SPEC.size) < SPEC.num_parameters
    assert 0 < active.sum() < SPEC.num_parameters
    assert np.array_equal(device.weights[parameters & ~active], own[parameters & ~active])
    assert np.array_equal(update.patch.values, device.weights[active])
    assert not np.any(device.weights[active] == own[active])


def test_early_stopping_follows_the_worked_cases():
    history = [(2.0, 2.1), (1.5, 1.9), (1.6, 1.9)]
    losses = [stopping_loss(train, validation, 0.7) for train, validation in history]
    assert losses == pytest.approx([2.03, 1.62, 1.69])
    assert [rose(new, old) for old, new in zip([None, *losses], losses, strict=False)] == [False, False, True]
    assert not rose(1.0, 1.0)


def test_a_device_whose_loss_rises_has_finished(weights):
    method = FedSPU(SPEC, early_stopping=True)
    state = method.admit(method.init_coordinator(weights), DeviceReport("d"))
    _, tasks = method.plan(state, Round(1, ("d",)), Key.of(1))
    device = method.init_device(weights)
    device, _ = method.work(device, tasks["d"], PullToTarget(SPEC, "d"), Budget(), Key.of(2))
    assert not method.finished(device)
    device, _ = method.work(device, tasks["d"], PullToTarget(SPEC, "d", rate=-1), Budget(), Key.of(3))
    assert method.finished(device)


def test_without_a_full_local_model_a_device_has_only_what_it_received(weights):
    spec, selection = SPEC, Neurons(0.5, 7)
    mask = selection.mask(spec)
    task = Task(Patch.of(weights, selection, spec))
    own = weights + np.float32(1)
    full, cut_down = FedSPU(spec), FedSPU(spec, local_model="sub-model")
    kept, sent = full.work(full.init_device(own), task, PullToTarget(spec, "d"), Budget(), Key(1))
    lacking, _ = cut_down.work(cut_down.init_device(own), task, PullToTarget(spec, "d"), Budget(), Key(1))
    frozen = np.flatnonzero(~mask[: spec.num_parameters])
    assert np.array_equal(kept.weights[frozen], own[frozen])
    assert not lacking.weights[frozen].any()
    assert full.diagnose_update(sent) == {"active_share": np.count_nonzero(mask) / spec.num_parameters}


def test_it_tells_how_many_devices_run_at_each_ratio(weights):
    method = FedSPU(SPEC)
    state = method.init_coordinator(weights)
    for device, ratio in {"a": 0.5, "b": 1.0, "c": 0.5}.items():
        state = method.admit(state, DeviceReport(device, ratio=ratio))
    assert method.diagnose_round(state) == {"devices_at": {"0.5": 2, "1": 1}}
