"""The rivals that train parts of the network, and ClusterFL: what travels, what is absent, worked numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.errors import raises
from torch import nn

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.submodels import cut, norms, strongest
from fleetune.protocols.methods import create
from fleetune.protocols.methods.clusterfl import ClusterFL, farthest_points, k_means
from fleetune.protocols.methods.fjord import FjORD
from fleetune.protocols.methods.lotteryfl import LotteryFL, prune, share_left
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import ChosenNeurons, Entries, Everything

SPEC = tiny_spec()
PARAMETERS = np.arange(SPEC.size) < SPEC.num_parameters
LOCAL = ["fedmp", "hermes", "prunefl"]


def start(method, weights, **ratios):
    state = method.init_coordinator(weights)
    for device, ratio in ratios.items():
        state = method.admit(state, DeviceReport(device, ratio=ratio))
    return state


def tasks_of(method, state, *devices, number=1):
    return method.plan(state, Round(number, devices), Key.of(number))[1]


def work(method, device, task, name="d", **trainer):
    return method.work(device, task, PullToTarget(SPEC, name, **trainer), Budget(), Key.of("work", name))


class Probe(PullToTarget):
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self, spec, *, gradient=None, accuracies=None, trained=None):
        super().__init__(spec, "probe")
        self._gradient, self._accuracies, self._trained = gradient, accuracies or {}, trained
        self.plans, self.starts = [], []

    def fit(self, weights, plan, key):
        self.plans.append(plan)
        self.starts.append(weights)
        fit = super().fit(weights, plan, key)
        return replace(fit, weights=self._trained) if plan.epochs == 1 else fit

    def gradient(self, weights):
        return super().gradient(weights) if self._gradient is None else self._gradient

    def accuracy(self, weights, part="test"):
        assert part != "test"
        return self._accuracies.get(part)


def test_norms_count_incoming_weights_and_bias():
    values = np.zeros(SPEC.size, np.float32)
    values[SPEC.slices["a.weight"]] = np.arange(24)
    values[SPEC.slices["a.bias"]] = -3
    values[SPEC.slices["n.weight"]] = values[SPEC.slices["b.weight"]] = 1000  # norm, outgoing
    values[SPEC.num_parameters :] = 1000
    assert norms(values, SPEC, 1)[0].tolist() == [9, 25, 41, 57, 73, 89]
    assert norms(values, SPEC, 2)[0][1] == 4**2 + 5**2 + 6**2 + 7**2 + 9


def test_norms_of_coupled_channels_behind_fixed_positions():
    axes = ((Span(ALWAYS_ACTIVE, 0, 1), Span(0, 1, 1, repeat=2), Span(0, 0, 1, repeat=2)), ())
    tensors = (
        TensorSpec("v", (5, 1), "weight", "v", axes),
        TensorSpec("w", (2, 1), "weight", "w", ((Span(0, 0, 2),), ())),
    )
    spec = ModelSpec("coupled", tensors, (2,), (1,), 5)
    assert norms(np.array([9, 1, 2, 4, 8, 100, 200], np.float32), spec, 1)[0].tolist() == [112, 203]


def test_the_strongest_are_kept_and_of_equals_the_leftmost():
    chosen = strongest([np.array([1.0, 3, 2, 3, 3]), np.array([0.0, 5])], 0.4)
    assert chosen.active.tolist() == [False, True, False, True, False, False, True]


def test_chosen_neurons_travel_as_a_bit_each_and_must_fit_the_model(weights):
    active = np.arange(6) < 2
    patch = Patch.of(weights, ChosenNeurons(active), SPEC)
    back = codec.decode(codec.encode(patch, SPEC), Patch, SPEC)
    assert np.array_equal(back.selection.active, active)
    assert patch.values.size == back.selection.count(SPEC) == 2 * 4 + 2 + 2 + 3 * 2 + 3
    for wrong in (active[:5], active.astype(np.float32)):
        with pytest.raises(PacketCorrupt, match="bitmap of shape"):
            ChosenNeurons(wrong).mask(SPEC)


def test_fjord_cuts_the_rightmost_neurons_and_smaller_models_are_nested(weights):
    masks = [FjORD(SPEC).first_selection(ratio).mask(SPEC) for ratio in (0.2, 0.5, 1.0)]
    neurons = [mask[SPEC.slices["a.bias"]].tolist() for mask in masks]
    assert neurons == [[True] + [False] * 5, [True] * 3 + [False] * 3, [True] * 6]
    assert masks[2].sum() == SPEC.num_parameters
    assert not np.any(masks[0] & ~masks[1])


def test_what_is_outside_is_absent_where_fedspu_would_freeze_it(weights):
    method = FjORD(SPEC)
    task = tasks_of(method, start(method, weights, d=0.5), "d")["d"]
    inside = task.patch.selection.mask(SPEC)
    device, update = work(method, method.init_device(weights + np.float32(1)), task)
    assert task.patch.values.size == inside.sum() < SPEC.num_parameters
    assert not device.weights[PARAMETERS & ~inside].any()
    assert not np.any(device.weights[inside] == weights[inside])
    assert np.array_equal(update.patch.values, device.weights[inside])


def test_a_neuron_outside_gives_nothing_to_the_next_layer():
    spec, weights = draw("mlp", (1, 8, 8), 10, Key.of(1))
    part = FjORD(spec).first_selection(0.3)
    backend = TorchBackend.from_spec(spec)
    backend.load(cut(weights, part.mask(spec), spec))
    linear = [tensor for tensor in spec.tensors if tensor.kind == "weight"]
    widths = [max(1, int(0.3 * tensor.shape[0])) for tensor in linear[:-1]] + [10]
    layers, inputs = [nn.Flatten()], 64
    for tensor, width in zip(linear, widths, strict=True):
        layer = nn.Linear(inputs, width)
        bias = weights[spec.slices[tensor.name.replace("weight", "bias")]]
        full = weights[spec.slices[tensor.name]].reshape(tensor.shape)
        layer.weight.data, layer.bias.data = torch.tensor(full[:width, :inputs]), torch.tensor(bias[:width])
        layers += [layer, nn.ReLU()]
        inputs = width
    x = Key.of(2).generator().normal(size=(7, 1, 8, 8)).astype(np.float32)
    y = np.arange(7)
    smaller = nn.Sequential(*layers[:-1])(torch.from_numpy(x))
    loss = nn.functional.cross_entropy(smaller, torch.from_numpy(y), reduction="sum").item()
    assert backend.evaluate(x, y)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", LOCAL)
def test_the_whole_model_comes_once_and_the_devices_part_from_then_on(name, weights):
    method = create(name, SPEC, {})
    state, device = start(method, weights, d=0.5), method.init_device(weights)
    first = tasks_of(method, state, "d")["d"]
    device, update = work(method, device, first)
    again = tasks_of(method, state, "d")["d"]  # the update got lost
    state = method.aggregate(state, [("d", update)])
    second = tasks_of(method, state, "d", number=2)["d"]
    assert [task.patch.values.size for task in (first, again)] == [SPEC.num_parameters] * 2
    assert second.patch.values.size == update.patch.values.size == SPEC.num_parameters - 3 * 9
    fresh = method.init_device(weights)  # the device lost its state
    _, from_nothing = work(method, fresh, second)
    assert np.array_equal(from_nothing.patch.selection.active, update.patch.selection.active)
    same, other = (method.admit(state, DeviceReport("d", ratio=ratio)) for ratio in (0.5, 0.2))
    assert tasks_of(method, same, "d")["d"].patch.values.size == second.patch.values.size
    assert tasks_of(method, other, "d")["d"].patch.values.size == SPEC.num_parameters


@pytest.mark.parametrize(("name", "kept"), [("fedmp", 1), ("hermes", 0)])
def test_fedmp_ranks_by_l1_and_hermes_by_l2_after_an_epoch_on_the_whole_model(name, kept, weights):
    trained = np.zeros(SPEC.size, np.float32)
    trained[SPEC.slices["a.weight"]][:8] = [3, 0, 0, 0, 1, 1, 1, 1]
    trainer, method = Probe(SPEC, trained=trained), create(name, SPEC, {})
    task = tasks_of(method, start(method, weights, d=0.2), "d")["d"]
    _, update = method.work(method.init_device(weights), task, trainer, Budget(), Key.of(1))
    assert np.flatnonzero(update.patch.selection.active).tolist() == [kept]
    assert [plan.epochs for plan in trainer.plans] == [1, None]
    assert trainer.plans[0].trainable is None
    inside = update.patch.selection.mask(SPEC)
    assert np.array_equal(trainer.starts[1][inside], weights[inside])  # as received, not as trained


def test_prunefl_ranks_by_the_gradient(weights):
    gradient = np.zeros(SPEC.size, np.float32)
    gradient[SPEC.slices["a.bias"]] = [0.1, -0.2, 0.1, -0.9, 0.3, 0.2]
    trainer, method = Probe(SPEC, gradient=gradient), create("prunefl", SPEC, {})
    task = tasks_of(method, start(method, weights, d=0.5), "d")["d"]
    _, update = method.work(method.init_device(weights), task, trainer, Budget(), Key.of(1))
    assert np.flatnonzero(update.patch.selection.active).tolist() == [1, 3, 4]
    assert len(trainer.plans) == 1


def test_each_entry_is_averaged_over_the_devices_that_have_it(weights):
    method = FjORD(SPEC)
    updates = []
    for name, ratio, value, samples in (("d0", 0.2, 1, 10), ("d1", 0.5, 4, 20)):
        part = method.first_selection(ratio)
        values = np.full(part.count(SPEC), value, np.float32)
        updates.append((name, Update(Patch(part, values), samples)))
    merged = method.aggregate(start(method, weights, d0=0.2, d1=0.5), updates).weights
    assert merged[SPEC.slices["a.bias"]].tolist()[:3] == [3, 4, 4]
    rest = slice(SPEC.slices["a.bias"].start + 3, SPEC.slices["a.bias"].stop)
    assert np.array_equal(merged[rest], weights[rest])


@pytest.mark.parametrize("name", ["fjord", "fedmp"])
def test_a_ratio_must_fit_the_round_in_which_the_whole_model_comes(name):
    spec = tiny_spec(hidden=600)
    choices = create(name, spec, {}).choices(DeviceReport("d"))
    half, full = choices[4].cost, choices[-1].cost
    assert half.bytes_up < 0.55 * full.bytes_up
    assert half.bytes_down == (half.bytes_up if name == "fjord" else full.bytes_down)


def test_lotteryfl_prunes_the_smallest_of_each_layer_and_never_biases_or_norms(weights):
    ticket = Everything().mask(SPEC)
    values = np.ones(SPEC.size, np.float32)
    values[SPEC.slices["a.weight"]] = -np.arange(24) - 1
    values[SPEC.slices["a.bias"]] = values[SPEC.slices["n.weight"]] = 0
    once = prune(ticket, values, SPEC, 0.25)
    assert np.flatnonzero(~once[SPEC.slices["a.weight"]]).tolist() == list(range(6))
    assert np.flatnonzero(~once[SPEC.slices["b.weight"]]).tolist() == [0, 1, 2, 3]  # all equal: the first
    assert (ticket & ~once).sum() == 6 + 4
    twice = prune(once, values, SPEC, 0.25)
    assert np.flatnonzero(~twice[SPEC.slices["a.weight"]]).tolist() == list(range(6 + 4))
    assert share_left(once, SPEC) == pytest.approx((18 + 14) / (24 + 18))


@pytest.mark.parametrize(
    ("accuracies", "target", "pruned"),
    [
        ({"validation": 0.6, "train": 0.1}, 0.5, True),
        ({"validation": 0.5, "train": 0.9}, 0.5, False),
        ({"train": 0.6}, 0.5, True),
        ({"train": 0.6}, 1.0, False),
        ({}, 0.5, False),
    ],
)
def test_lotteryfl_draws_a_smaller_ticket_once_the_device_does_well(accuracies, target, pruned, weights):
    method = LotteryFL(SPEC, target=target)
    trainer, initial = Probe(SPEC, accuracies=accuracies), weights + np.float32(1)
    task = tasks_of(method, start(method, weights, d=1.0), "d")["d"]
    device, update = method.work(method.init_device(initial), task, trainer, Budget(), Key.of(1))
    (began,), (plan,) = trainer.starts, trainer.plans
    inside = update.patch.selection.mask(SPEC)
    assert inside.sum() == SPEC.num_parameters - (4 + 3 if pruned else 0)
    assert np.array_equal(plan.trainable, inside)
    assert np.array_equal(began[inside], (initial if pruned else weights)[inside])
    assert not device.weights[PARAMETERS & ~inside].any()


def test_a_ticket_only_shrinks_even_when_an_update_gets_lost(weights):
    method = LotteryFL(SPEC, target=0.0)
    state, device = start(method, weights, d=1.0), method.init_device(weights)
    sizes = []
    for number in (1, 2, 3):
        task = tasks_of(method, state, "d", number=number)["d"]
        device, update = work(method, device, task)
        sizes.append((task.patch.values.size, update.patch.values.size))
        if number != 2:
            state = method.aggregate(state, [("d", update)])
    whole = SPEC.num_parameters
    assert sizes == [(whole, whole - 7), (whole - 7, whole - 14), (whole - 7, whole - 19)]


def test_k_means_finds_the_groups_and_no_more_than_there_are():
    points = np.array([[0.0, 0], [10, 0], [0.5, 0], [10, 1], [0, 12], [0.1, 0.2]])
    labels = k_means(points @ points.T, 3)
    assert [sorted(np.flatnonzero(labels == label)) for label in labels] == [
        [0, 2, 5], [1, 3], [0, 2, 5], [1, 3], [4], [0, 2, 5],
    ]  # fmt: skip
    same = np.ones((4, 4))
    assert farthest_points(same, 3) == [0]
    assert k_means(same, 3).tolist() == [0] * 4
    assert k_means(np.eye(1), 5).tolist() == [0]


def clusterfl_after_a_round(weights, moves, **settings):
    method = ClusterFL(SPEC, **settings)
    state = method.init_coordinator(weights)
    updates = [(name, method.update_type(whole(weights + np.float32(by)))) for name, by in moves.items()]
    return method, method.aggregate(state, updates)


def whole(weights):
    return Patch.of(weights, Everything(), SPEC)


def test_clusterfl_groups_stay_until_somebody_new_is_heard(weights):
    method, state = clusterfl_after_a_round(
        weights, {"d0": 1, "d1": 1.2, "d2": -3}, num_groups=2, regroup_rounds=0
    )
    swapped = [("d0", method.update_type(whole(weights - np.float32(3))))]
    later = method.aggregate(state, swapped)
    assert later.groups == state.groups
    assert later.groups["d0"] == later.groups["d1"] != later.groups["d2"]
    newcomer = [("d3", method.update_type(whole(weights + np.float32(1.1))))]
    joined = method.aggregate(later, newcomer)
    assert joined.groups["d3"] == joined.groups["d1"] != joined.groups["d0"] == joined.groups["d2"]


def test_clusterfl_refuses_an_objective_without_a_minimum():
    with raises(SettingError, "method.attract: 0.2", "method.shrink", "0.1"):
        create("clusterfl", SPEC, {"attract": 0.2, "shrink": 0.1})


def test_a_part_that_a_device_made_up_is_taken_as_its_part(weights):
    method = create("fedmp", SPEC, {})
    bitmap = np.arange(SPEC.num_parameters) < 3
    update = Update(Patch(Entries(bitmap), np.ones(3, np.float32)), 10)
    state = method.aggregate(start(method, weights, d=0.5), [("d", update)])
    assert state.weights[:3].tolist() == [1, 1, 1]
    assert tasks_of(method, state, "d")["d"].patch.values.size == 3
