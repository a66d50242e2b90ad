"""FedPURIN's rounds: what is critical, what travels, what becomes of those who miss a round."""

from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec
from tests.protocols.methods.conformance.fedpurin import table_3_bytes

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.critical_parameters import (
    collaborators,
    critical_mask,
    masked_mean,
    mean_and_largest,
    overlap_ratios,
    perturbation,
)
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.methods.fedpurin import FedPURIN, Update, combined, shared_entries
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

SPEC = tiny_spec(40)
SHARED = shared_entries(SPEC)
DEVICES = ("d0", "d1", "d2")


@pytest.fixture
def weights():
    return Key.of("weights").uniform(SPEC.size).astype(np.float32) - np.float32(0.5)


class Fleet:
    """Rounds by hand: who takes part, whose update arrives."""

    def __init__(self, weights, **settings):
        self.method = create("fedpurin", SPEC, settings)
        self.state = self.method.init_coordinator(weights)
        self.devices = {device: self.method.init_device(weights) for device in DEVICES}
        self.tasks, self.starts, self.updates = {}, {}, {}

    def round(self, number, participants=DEVICES, arriving=None):
        planned, self.tasks = self.method.plan(self.state, Round(number, participants), Key.of(number))
        self.tasks = dict(self.tasks)
        for device in participants:
            self.starts[device] = self.method.combined_model(self.devices[device], self.tasks[device])
            self.devices[device], self.updates[device] = self.method.work(
                self.devices[device],
                self.tasks[device],
                PullToTarget(SPEC, device),
                Budget(),
                Key.of(number, device),
            )
        arriving = participants if arriving is None else arriving
        if arriving:  # otherwise the round is abandoned
            self.state = self.method.aggregate(planned, [(d, self.updates[d]) for d in arriving])

    def sparse(self, device):
        """The device's masked weights."""
        state = self.devices[device]
        return np.where(state.critical, state.weights, np.float32(0))


def test_the_top_scores_are_critical():
    weights, gradient = np.array([2.0, 3.0, 5.0, 1.0]), np.array([1.0, -2.0, 0.1, 0.0])
    scores = perturbation(weights, gradient)
    assert scores == pytest.approx([2, 6, 0.5, 0])
    assert critical_mask(scores, 0.5).tolist() == [True, True, False, False]
    assert critical_mask(scores, 0.2).tolist() == [False] * 4


def test_the_second_order_term_tells_a_rise_from_a_fall():
    scores = perturbation(np.array([1.0, 1.0]), np.array([1.0, -1.0]), second_order=True)
    assert scores == pytest.approx([0.5, 1.5])


def test_equal_scores_at_the_threshold_are_all_in():
    assert critical_mask(np.array([1.0, 3.0, 1.0, 0.0]), 0.5).tolist() == [True, True, True, False]


def test_scores_at_the_noise_level_are_cut_off():
    assert critical_mask(np.array([1.0, 1e-9, 1e-10, 0.0]), 1.0).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("keep", "expected"), [(True, [True] * 3), (False, [False] * 3)])
def test_a_tensor_of_zeros_is_kept_or_omitted(keep, expected):
    assert critical_mask(np.zeros(3), 0.5, keep_all_zero=keep).tolist() == expected


def test_a_tensor_below_the_noise_level_keeps_its_highest_or_none():
    scores = np.array([1e-12, 1e-11, 0.0, 0.0], np.float32)
    assert critical_mask(scores, 0.5).tolist() == [True, True, False, False]
    assert critical_mask(scores, 0.5, keep_all_zero=False).tolist() == [False] * 4


def test_a_device_without_critical_entries_overlaps_with_nobody():
    overlap = overlap_ratios([np.zeros(4, bool), np.ones(4, bool)])
    assert overlap.tolist() == [[1.0, 0.0], [0.5, 1.0]]


def test_the_threshold_rises_until_nobody_collaborates():
    masks = [np.array(mask, bool) for mask in ([1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0])]
    overlap = overlap_ratios(masks)
    chosen = [collaborators(overlap, *mean_and_largest(overlap), t, 4) for t in range(1, 7)]
    sizes = [sum(map(len, row)) for row in chosen]
    assert sizes == sorted(sizes, reverse=True)
    assert chosen[3] == [[3], [], [], [0]]  # t = beta: whoever is at the maximum
    assert sizes[4:] == [0, 0]


def test_all_that_overlap_alike_collaborate_despite_rounding():
    overlap = np.full((3, 3), 0.1) + 0.9 * np.eye(3)
    assert collaborators(overlap, *mean_and_largest(overlap), 3, 7) == [[1, 2], [0, 2], [0, 1]]


def test_the_mean_is_over_devices_not_over_coverage():
    models = [np.array([3.0, 0.0], np.float32), np.array([3.0, 6.0], np.float32)]
    assert masked_mean(models).tolist() == [3.0, 3.0]
    assert masked_mean(models, [1, 2]).tolist() == [3.0, 4.0]
    assert masked_mean(models, [0, 0]).tolist() == [3.0, 3.0]


def test_the_mean_may_be_over_coverage():
    models = [np.array([3.0, 0.0, 0.0], np.float32), np.array([5.0, 6.0, 0.0], np.float32)]
    masks = [np.array([1, 0, 0], bool), np.array([1, 1, 0], bool)]
    assert masked_mean(models, masks=masks).tolist() == [4.0, 6.0, 0.0]
    assert masked_mean(models, [1, 3], masks).tolist() == [4.5, 6.0, 0.0]


def test_coverage_does_not_shrink_what_few_hold_critical(weights):
    bars = []
    for average in ("devices", "coverage"):
        fleet = Fleet(weights, average=average)
        fleet.round(1)
        bars.append(fleet.state.weights)
    sent = sum(fleet.devices[device].critical.astype(int) for device in DEVICES)
    assert {0, 1, 2, 3} == set(sent[SHARED])
    for count in (1, 2, 3):
        assert bars[1][sent == count] == pytest.approx(bars[0][sent == count] * 3 / count)
    assert not np.any(bars[1][SHARED & (sent == 0)])


def test_two_rounds_are_the_papers(weights):
    """Through patches, masks at the coordinator and rules at the device: eq. 9 to 11, entry by entry."""
    fleet = Fleet(weights, beta=4)
    fleet.round(1)
    masks = [fleet.devices[device].critical for device in DEVICES]
    models = [fleet.sparse(device) for device in DEVICES]
    own = {device: fleet.devices[device].weights for device in DEVICES}
    overlap = overlap_ratios(masks)
    chosen = collaborators(overlap, *mean_and_largest(overlap), 1, 4)
    assert sum(map(len, chosen)) > 0
    fleet.round(2)
    for i, device in enumerate(DEVICES):
        delta = masked_mean([models[j] for j in (i, *chosen[i])])
        expected = np.where(SHARED, combined(masks[i], delta, masked_mean(models)), own[device])
        assert np.array_equal(fleet.starts[device], expected)


def test_before_the_first_aggregation_nothing_travels_down(weights):
    fleet = Fleet(weights)
    fleet.round(1)
    assert all(task.patch.values.size == 0 for task in fleet.tasks.values())
    assert all(np.array_equal(start, weights) for start in fleet.starts.values())


def test_only_what_the_device_cannot_know_travels(weights):
    fleet = Fleet(weights, beta=1)
    fleet.round(1)
    fleet.round(2)
    fleet.round(3)
    for device in DEVICES:
        sent = fleet.tasks[device].patch
        counted = table_3_bytes(fleet.devices[device].critical[SHARED], fleet.starts[device][SHARED])
        assert np.all(sent.values != 0)
        assert not np.any(sent.selection.mask(SPEC) & ~SHARED)
        assert 4 * sent.values.size < counted["down"]
        assert fleet.updates[device].patch.values.size * 4 + SHARED.sum() / 8 == counted["up"]
    assert all(held.collaborated is None for held in fleet.state.held.values())


def test_before_beta_critical_entries_travel_only_to_those_who_have_collaborators(weights):
    fleet = Fleet(weights, beta=1)
    fleet.round(1)
    masks = {device: fleet.devices[device].critical for device in DEVICES}
    overlap = overlap_ratios(list(masks.values()))
    chosen = collaborators(overlap, *mean_and_largest(overlap), 1, 1)  # t = beta: only the closest
    assert {bool(others) for others in chosen} == {True, False}
    fleet.round(2)
    for device, others in zip(DEVICES, chosen, strict=True):
        down = fleet.tasks[device].patch.selection.mask(SPEC)
        assert np.all(down[masks[device]] == bool(others))


def test_normalisation_layers_stay_on_the_device(weights):
    fleet = Fleet(weights)
    fleet.round(1)
    fleet.round(2)
    assert np.array_equal(fleet.method.shared_model(fleet.state)[~SHARED], weights[~SHARED])
    for device in DEVICES:
        assert not np.any(fleet.devices[device].critical & ~SHARED)
        assert not np.any(fleet.devices[device].weights[~SHARED] == weights[~SHARED])


def test_an_update_beyond_the_shared_entries_counts_only_for_these(weights):
    method = FedPURIN(SPEC)
    state, _ = method.plan(method.init_coordinator(weights), Round(1, ("d",)), Key.of(1))
    whole = Update(Patch.of(np.ones(SPEC.size, np.float32), Everything(), SPEC), 10)
    state = method.aggregate(state, [("d", whole)])
    assert np.array_equal(method.shared_model(state), np.where(SHARED, np.float32(1), weights))
    assert np.array_equal(state.held["d"].critical, SHARED)


@pytest.mark.parametrize("beta", [1, 100])
def test_who_was_absent_keeps_its_critical_entries_and_takes_the_newest_bar(weights, beta):
    fleet = Fleet(weights, beta=beta)
    fleet.round(1)
    fleet.round(2, ("d0", "d1"))
    fleet.round(3, ("d0", "d1"))
    own, bar = fleet.devices["d2"], fleet.state.weights
    assert fleet.state.held["d2"].collaborated is None
    fleet.round(4)
    expected = np.where(SHARED & ~own.critical, bar, own.weights)
    assert np.array_equal(fleet.starts["d2"], expected)
    assert not np.any(fleet.tasks["d2"].patch.selection.mask(SPEC) & own.critical)


def test_a_late_joiner_takes_bar_and_keeps_its_weights_where_bar_is_zero(weights):
    fleet = Fleet(weights)
    fleet.round(1, ("d0", "d1"))
    bar = fleet.state.weights
    fleet.state = fleet.method.admit(fleet.state, DeviceReport("d2"))
    fleet.round(2)
    assert np.array_equal(fleet.starts["d2"], np.where(SHARED & (bar != 0), bar, weights))


@pytest.mark.parametrize("arriving", [("d0", "d1"), ()], ids=["lost update", "abandoned round"])
def test_who_is_ahead_of_the_coordinator_keeps_its_newest_critical_entries(weights, arriving):
    fleet = Fleet(weights)
    fleet.round(1)
    fleet.round(2, arriving=arriving)
    own = fleet.devices["d2"]
    fleet.round(3)
    start, patched = fleet.starts["d2"], fleet.tasks["d2"].patch.selection.mask(SPEC)
    assert np.array_equal(start[own.critical], own.weights[own.critical])
    assert np.array_equal(start[~patched], own.weights[~patched])
    taken = patched & ~own.critical
    assert taken.any()
    assert not np.any(start[taken] == own.weights[taken])


def test_a_device_that_lost_its_state_starts_like_a_late_joiner(weights):
    fleet = Fleet(weights, beta=0)
    fleet.round(1)
    bar, critical = fleet.state.weights, fleet.devices["d0"].critical
    fleet.devices["d0"] = fleet.method.init_device(weights)
    fleet.round(2)
    sent = SHARED & (bar != 0) & ~critical
    assert np.array_equal(fleet.starts["d0"], np.where(sent, bar, weights))


def test_the_gradient_is_of_the_last_batch_or_the_change_of_the_weights(weights):
    fleets = {gradient: Fleet(weights, gradient=gradient) for gradient in ("last-batch", "change")}
    for fleet in fleets.values():
        fleet.round(1)
    start, end = weights, fleets["change"].devices["d0"].weights
    last = PullToTarget(SPEC, "d0").gradient(weights)
    for name, gradient in {"last-batch": last, "change": end - start}.items():
        for tensor, scores in SPEC.views(np.abs(gradient * end)):
            if tensor.kind in ("weight", "bias"):
                critical = fleets[name].devices["d0"].critical[SPEC.slices[tensor.name]]
                lowest = np.sort(scores.ravel())[tensor.size - tensor.size // 2]
                assert np.array_equal(critical, scores.ravel() >= lowest)
    assert not np.array_equal(*(fleet.devices["d0"].critical for fleet in fleets.values()))


class Untrained(PullToTarget):
    """A device without samples: no step, no gradient."""

    def fit(self, weights, plan, key):
        return replace(super().fit(weights, plan, key), weights=weights.copy(), last_gradient=None)


@pytest.mark.parametrize(("policy", "sent"), [("keep", SHARED.sum()), ("omit", 0)])
def test_without_a_gradient_all_or_nothing_is_sent(weights, policy, sent):
    method = FedPURIN(SPEC, all_zero=policy)
    state, tasks = method.plan(method.init_coordinator(weights), Round(1, ("d",)), Key.of(1))
    trainer = Untrained(SPEC, "d", num_samples=0)
    _, update = method.work(method.init_device(weights), tasks["d"], trainer, Budget(), Key.of(2))
    assert update.patch.values.size == sent
    assert np.isfinite(method.aggregate(state, [("d", update)]).weights).all()


def test_second_order_reaches_the_device(weights):
    masks = []
    for second_order in (False, True):
        fleet = Fleet(weights * np.float32(4), second_order=second_order)
        fleet.round(1)
        masks.append(fleet.devices["d0"].critical)
    assert not np.array_equal(*masks)


def test_bar_may_weigh_devices_by_samples(weights):
    for weighted, share in ((False, 1 / 2), (True, 1 / 4)):
        method = FedPURIN(SPEC, weighted=weighted)
        state, _ = method.plan(method.init_coordinator(weights), Round(1, ("a", "b")), Key.of(1))
        ones = Patch.of(np.ones(SPEC.size, np.float32), Everything(), SPEC)
        zeros = Patch.of(np.zeros(SPEC.size, np.float32), Everything(), SPEC)
        state = method.aggregate(state, [("a", Update(ones, 10)), ("b", Update(zeros, 30))])
        assert method.shared_model(state)[SHARED] == pytest.approx(share)


def test_the_sparse_personal_model_changes_no_training(weights):
    trained, sparse = Fleet(weights), Fleet(weights, personal="sparse")
    for number in (1, 2, 3):
        trained.round(number)
        sparse.round(number)
    for device in DEVICES:
        one, other = trained.devices[device], sparse.devices[device]
        assert codec.encode(one, SPEC) == codec.encode(other, SPEC)
        kept = one.critical | ~SHARED
        assert np.array_equal(sparse.method.personal_model(other), np.where(kept, one.weights, np.float32(0)))
        assert np.array_equal(trained.method.personal_model(one), one.weights)
    assert np.array_equal(sparse.method.personal_model(sparse.method.init_device(weights)), weights)


def test_a_budget_lowers_tau(weights):
    counts = []
    for ratio, budget in ((1.0, 1.0), (0.25, 1.0), (1.0, 0.25)):
        method = FedPURIN(SPEC)
        state = method.admit(method.init_coordinator(weights), DeviceReport("d", ratio=ratio))
        _, tasks = method.plan(state, Round(1, ("d",)), Key.of(1))
        device = method.init_device(weights)
        trainer = PullToTarget(SPEC, "d")
        _, update = method.work(device, tasks["d"], trainer, Budget(budget), Key.of(2))
        counts.append(update.patch.values.size)
    assert counts[1] == counts[2] < counts[0]


def test_choices_end_at_tau():
    choices = FedPURIN(SPEC, tau=0.35).choices(DeviceReport("d"))
    assert [choice.ratio for choice in choices] == [0.05, 0.1, 0.2, 0.3, 0.35]
    assert choices[-1].cost.bytes_up < choices[-1].cost.bytes_down


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0}, "method.tau: expected `float` > 0"),
        ({"tau": 1.5}, "method.tau: expected `float` <= 1"),
        ({"beta": -1}, "method.beta: expected `int` >= 0"),
        ({"gradient": "delta"}, "method.gradient: invalid enum value 'delta'"),
        ({"all_zero": "drop"}, "method.all_zero: invalid enum value 'drop'"),
        ({"sparsity": 0.5}, "method.sparsity: fedpurin has no such setting; it has: tau, beta"),
    ],
)
def test_bad_settings_name_the_key(settings, message):
    with pytest.raises(SettingError, match=message):
        create("fedpurin", SPEC, settings)
