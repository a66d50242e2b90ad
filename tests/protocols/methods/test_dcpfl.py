"""DC-PFL's behaviour in a run: when groups split, what travels, and who is not there."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods import create, with_defaults_of_run
from fleetune.protocols.methods.dcpfl.dcpfl import DCPFL, Update
from fleetune.protocols.methods.dcpfl.discrepancy import PairMeans, calm_layers, groups_at, next_gamma
from fleetune.protocols.methods.dcpfl.splitting import radius, rapid_decrease_end, smooth
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

SPEC = tiny_spec()
PARAMETERS = slice(0, SPEC.num_parameters)
NAMES = ("a0", "a1", "a2", "b0", "b1", "b2")
HALVES = {frozenset(NAMES[:3]), frozenset(NAMES[3:])}
QUICK = {"start_rounds": 2, "window": 1, "observe": 1, "gamma_step": 0.4}


class Side(PullToTarget):
    """A device whose data pulls towards its side's target, and a little towards its own.

    In the layer `calm` all devices are the same.
    """

    def __init__(self, name: str, calm: str | None = None) -> None:
        super().__init__(SPEC, name)
        self.calm = SPEC.layers[calm] if calm else slice(0)
        side = Key.of("side", name[0]).uniform(SPEC.size).astype(np.float32)
        self.target = side + np.float32(0.05) * self.target
        self.target[self.calm] = 0.25 * np.arange(self.target[self.calm].size)

    def fit(self, weights, plan, key):
        fit = super().fit(weights, plan, key)
        step = self.rate * self.gradient(weights)
        fit.weights[self.calm] = (weights - step)[self.calm]
        return fit


def through_codec(value, kind):
    return codec.decode(codec.encode(value, SPEC), kind, SPEC, finite=False)


class Fleet:
    """Coordinator and devices in one process, restarted every round; keeps a round's tasks and updates."""

    def __init__(self, weights, *, devices=NAMES, ratios=None, calm=None, **settings):
        self.method = create("dc-pfl", SPEC, settings)
        self.weights, self.calm = weights, calm
        self.state = self.method.init_coordinator(weights)
        self.devices = {}
        self.tasks, self.updates = {}, {}
        self.number = 0
        for device in devices:
            self.join(device, (ratios or {}).get(device, 1.0))

    def join(self, device, ratio=1.0):
        self.state = self.method.admit(self.state, DeviceReport(device, num_samples=10, ratio=ratio))
        self.devices.setdefault(device, self.method.init_device(self.weights))

    def round(self, *participants, replying=None, votes=None):
        self.number += 1
        self.state = through_codec(self.state, self.method.state_type)
        self.devices = {d: through_codec(s, self.method.device_state_type) for d, s in self.devices.items()}
        here = tuple(sorted(participants or self.devices))
        self.state, tasks = self.method.plan(self.state, Round(self.number, here), Key.of(self.number))
        self.tasks = {device: through_codec(tasks[device], self.method.task_type) for device in here}
        self.updates = {}
        for device in here:
            self.devices[device], self.updates[device] = self.method.work(
                self.devices[device],
                tasks[device],
                Side(device, self.calm),
                Budget(),
                Key.of(self.number, device),
            )
        if votes:
            self.updates = {device: replace(update, trial=votes) for device, update in self.updates.items()}
        kind = self.method.update_type
        replies = [(device, through_codec(self.updates[device], kind)) for device in replying or here]
        self.state = self.method.aggregate(self.state, iter(replies))
        return self

    def until(self, phase, *participants, limit=60):
        while self.state.phase != phase:
            self.round(*participants)
            assert self.number < limit, f"no {phase} within {limit} rounds"
        return self

    def groups(self):
        grouping = self.state.grouping
        return {frozenset(grouping.members(place)) for place in range(len(grouping.groups))}

    def bytes(self):
        down = sum(len(codec.encode(task, SPEC)) for task in self.tasks.values())
        return down, sum(len(codec.encode(update, SPEC)) for update in self.updates.values())


@pytest.fixture
def fleet(weights):
    return lambda **settings: Fleet(weights, **{**QUICK, **settings})


# the loss curve


def test_the_rapid_decrease_ends_at_the_bend_of_a_broken_line():
    losses = [10 - t for t in range(8)] + [2.9 - 0.01 * t for t in range(6)]
    radii = radius(smooth(losses, 1), 1)
    assert rapid_decrease_end(radii, 2) == (9, 11)
    assert rapid_decrease_end(radii[:10], 2) is None


def test_a_short_or_straight_curve_has_no_end():
    assert smooth([], 5).size == 0
    assert np.isnan(radius([1.0, 0.5], 5)).all()
    assert rapid_decrease_end(radius(smooth(range(20, 0, -1), 3), 3), 2) is None


# pairs and groups


def test_a_pair_takes_its_first_rounds_only():
    one = np.array([[0.0, 1.0], [1.0, 0.0]])
    pairs = PairMeans().add(["x", "y"], one, 2).add(["y", "x"], 3 * one, 2)
    assert not pairs.lacks(["x", "y"], 2)
    assert pairs.add(["x", "y"], 99 * one, 2).between(["y", "x"])[0, 1] == pytest.approx(2.0)


def test_a_pair_that_never_met_is_as_far_as_by_way_of_its_best_common_partner():
    def apart(distance):
        return np.array([[0.0, distance], [distance, 0.0]])

    pairs = PairMeans().add(["x", "k"], apart(0.2), 5).add(["k", "y"], apart(0.3), 5)
    assert pairs.between(["x", "y"])[0, 1] == pytest.approx(0.3)
    pairs = pairs.add(["u", "v"], apart(0.7), 5)
    assert pairs.between(["x", "u"])[0, 1] == pytest.approx((0.2 + 0.3 + 0.7) / 3)
    assert pairs.add(["z"], np.zeros((1, 1)), 5).compared() == ("x", "k", "y", "u", "v")


def test_no_device_and_one_device_make_a_tree_without_height():
    assert groups_at(np.zeros((0, 0)), 1.0)[0].size == 0
    assert groups_at(np.zeros((1, 1)), 0.5)[0].tolist() == [0]


def test_gamma_falls_through_levels_that_change_nothing():
    far = np.array([[0, 0.1, 1], [0.1, 0, 1], [1, 1, 0]], dtype=float)
    gamma, labels = next_gamma(far, [0, 0, 1], 0.8, 0.2)
    assert (gamma, labels.tolist()) == (0.0, [0, 1, 2])


# a run with everybody there


def test_a_run_starts_with_one_group_that_is_fedavg(fleet, weights):
    run = fleet().round()
    sent = np.mean([state.weights[PARAMETERS] for state in run.devices.values()], axis=0)
    assert run.method.shared_model(run.state)[PARAMETERS] == pytest.approx(sent, abs=1e-6)
    assert len(run.groups()) == 1


def test_the_first_task_brings_no_weights_because_the_enrolment_did(fleet):
    run = fleet().round()
    assert all(task.patch.values.size == 0 for task in run.tasks.values())
    run.round()
    assert all(task.patch.values.size == SPEC.num_parameters for task in run.tasks.values())


def test_groups_split_by_data_after_a_trial_that_is_won(fleet):
    run = fleet(observe=2).until("trial")
    assert len(run.groups()) == 1
    run.round()
    votes = np.array([update.trial for update in run.updates.values()])
    assert votes.mean(axis=0)[1] < votes.mean(axis=0)[0]
    assert run.groups() == HALVES
    assert run.state.phase == "settle"
    assert run.state.curve == ()


def test_a_trial_sends_two_models_down_and_none_up_and_then_one_up_and_none_down(fleet):
    run = fleet().until("trial")
    plain = run.bytes()
    run.round()
    trial = run.bytes()
    assert all(task.trial.values.size == SPEC.num_parameters for task in run.tasks.values())
    assert all(update.patch.values.size == 0 for update in run.updates.values())
    run.round()
    settled = run.bytes()
    assert all(task.patch.values.size == 0 and task.adopt for task in run.tasks.values())
    assert run.state.curve == ()
    assert trial[1] + settled[1] < 2 * plain[1]
    assert trial[0] + settled[0] <= 2 * plain[0] + 6 * 60


def test_the_winner_goes_on_from_what_the_trial_made_of_it(fleet):
    run = fleet().until("trial").round()
    rivals = {device: state.rival for device, state in run.devices.items()}
    run.round()
    for device, state in run.devices.items():
        fit = Side(device).fit(rivals[device], FitPlan(), Key.of(run.number, device))
        assert np.array_equal(state.weights, fit.weights)
        assert state.rival is None


def test_after_a_trial_everything_goes_up_whether_due_or_not(fleet):
    run = fleet(calm="b", alpha=4).until("settle").round()
    assert run.number % 4
    assert all(update.patch.selection == Everything() for update in run.updates.values())


def test_whoever_would_be_alone_tries_its_own_model(fleet):
    run = fleet()
    while run.groups() != HALVES:
        run.round()
    run.until("trial")
    own = run.devices["a0"].weights
    run.round()
    assert run.tasks["a0"].trial.values.size == 0
    fit = Side("a0").fit(own, FitPlan(), Key.of(run.number, "a0"))
    assert np.array_equal(run.devices["a0"].rival, fit.weights)


def on_trial(run, *labels):
    """Put groups of our choice on trial, one label for each of NAMES."""
    sent, method = run.updates, run.method
    trial = method.averaging.split(run.state.grouping, 0.1, NAMES, np.array(labels), sent, run.number)
    run.state = replace(run.state, trial=trial, phase="trial")
    return trial


def test_a_group_that_a_trial_leaves_as_it_is_goes_on_as_usual(fleet):
    run = fleet(dynamic=False, gamma=0.5).round().round().round()
    on_trial(run, 0, 0, 0, 1, 2, 2)
    run.round(votes=(2.0, 1.0))
    assert [run.tasks[device].trial is None for device in NAMES] == [True] * 3 + [False] * 3
    assert run.groups() == {frozenset(NAMES[:3]), frozenset({"b0"}), frozenset({"b1", "b2"})}
    group = run.state.grouping.groups[run.state.grouping.placed["a0"]]
    sent = np.mean([run.devices[device].weights[PARAMETERS] for device in NAMES[:3]], axis=0)
    assert group.weights[PARAMETERS] == pytest.approx(sent, abs=1e-6)


def test_a_new_group_counts_as_new_for_all_its_layers(fleet):
    run = fleet(dynamic=False, gamma=0.5).round().round().round()
    run.updates = {}
    assert all((group.averaged == 3).all() for group in on_trial(run, 0, 1, 1, 0, 1, 1).groups)
    run.number = 4
    assert all((group.averaged == 4).all() for group in on_trial(run, 0, 1, 1, 0, 1, 1).groups)


def test_weights_that_come_with_a_vote_are_not_averaged(fleet):
    run = fleet().until("trial")
    before = run.method.shared_model(run.state)
    patch = Patch.of(np.ones(SPEC.size, np.float32), Everything(), SPEC)
    update = Update(patch, 10, 1.0, (1.0, 1.0))
    state, _ = run.method.plan(run.state, Round(run.number + 1, NAMES), Key.of(0))
    after = run.method.aggregate(state, [("a0", update)])
    assert np.array_equal(run.method.shared_model(after), before)


def test_a_lost_trial_is_held_and_then_tried_again_at_the_same_gamma(fleet):
    run = fleet(hold_rounds=4).until("trial")
    tried, lost_at = run.state.trial, run.number + 1
    run.round(votes=(1.0, 2.0))
    assert len(run.groups()) == 1
    assert run.state.held_until == lost_at + 4
    own = {device: state.weights for device, state in run.devices.items()}
    run.round()
    assert not any(task.adopt or task.patch.values.size for task in run.tasks.values())
    for device, state in run.devices.items():
        fit = Side(device).fit(own[device], FitPlan(), Key.of(run.number, device))
        assert np.array_equal(state.weights, fit.weights)
    run.until("trial")
    assert run.number == lost_at + 4
    assert run.state.trial.gamma == tried.gamma
    assert run.state.trial.placed == tried.placed


def test_equal_losses_lose_a_trial(fleet):
    run = fleet().until("trial").round(votes=(1.0, 1.0))
    assert len(run.groups()) == 1


def test_in_the_end_every_device_is_alone_and_nothing_comes_down(fleet):
    run = fleet(tau=2)
    while len(run.groups()) < len(NAMES):
        run.round()
        assert run.number < 200
    run.round()
    for _ in range(12):
        run.round()
        assert all(task.patch.values.size == 0 for task in run.tasks.values())
        whole = run.number % 6 == 0
        assert all((u.patch.values.size > 0) == whole for u in run.updates.values())


def test_devices_that_are_alone_do_not_hold_up_the_others_trials(fleet):
    run, seen = fleet(alpha=7, devices=(*NAMES, "c0")), []
    while len(run.groups()) < 7:
        run.round()
        seen.append((run.state.phase, run.groups()))
        assert run.number < 200
    assert ("trial", {*HALVES, frozenset({"c0"})}) in seen
    assert "gather" not in [phase for phase, _ in seen]


# layer intervals


def test_low_discrepancy_layers_go_up_and_down_less_often(fleet):
    run = fleet(dynamic=False, start_rounds=3, calm="b")
    for _ in range(12):
        run.round()
        sent = {u.patch.selection for u in run.updates.values()}
        down = {task.patch.selection for task in run.tasks.values()}
        if run.number > 3:
            assert sent == ({Everything()} if run.number % 3 == 0 else {Layers(("a", "n"))})
        if run.number > 4:
            assert down == ({Everything()} if run.number % 3 == 1 else {Layers(("a", "n"))})


def test_alpha_1_sends_every_layer_every_round(fleet):
    run = fleet(dynamic=False, alpha=1, calm="b")
    for _ in range(8):
        run.round()
        assert all(u.patch.selection == Everything() for u in run.updates.values())


def test_every_layer_below_the_mean_waits_when_low_discrepancy_is_1(fleet):
    run = fleet(dynamic=False, low_discrepancy=1, start_rounds=1)
    run.round()
    every = run.state.grouping.groups[0].every
    assert set(every.tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("apart", "sizes", "share", "calm"),
    [
        # lenet-dcpfl's layers with a round's measured D_l / D_g: out, fc2 and conv1 hold 5.4 % of it
        ([0.31, 0.61, 1.05, 0.78, 2.26], [416, 12832, 188280, 10164, 850], 0.07, [0, 1, 1, 0, 0]),
        ([0.31, 0.81, 2.50, 0.78, 2.26], [416, 12832, 188280, 10164, 850], 0.07, [0, 0, 1, 1, 0]),
        ([0.31, 0.61, 1.05, 0.78, 2.26], [416, 12832, 188280, 10164, 850], 0.0, [1, 1, 1, 1, 0]),
        ([0.31, 0.61, 1.05, 0.78, 2.26], [416, 12832, 188280, 10164, 850], 1.0, [0, 0, 0, 0, 0]),
        ([1.0, 2.0, 2.0], [10, 10, 10], 0.07, [1, 0, 1]),
        ([1.0, 2.0, 2.0], [10, 10, 10], 1 / 3, [1, 0, 1]),
        ([0.0], [10], 0.07, [0]),
    ],
)
def test_the_most_discrepant_layers_that_fit_go_every_round(apart, sizes, share, calm):
    assert calm_layers(np.array(apart), np.array(sizes), share).tolist() == [bool(one) for one in calm]


def sent_up(run, rounds):
    """Entries that a device sent, bytes that all did, and the layers that went in each round."""
    entries, num_bytes, layers = 0, 0, []
    for _ in range(rounds):
        run.round()
        entries += run.updates["a0"].patch.values.size
        num_bytes += run.bytes()[1]
        (selection,) = {update.patch.selection for update in run.updates.values()}
        layers.append("abn" if selection == Everything() else "".join(sorted(selection.names)))
    return entries, num_bytes, layers


AUTO = {"dynamic": False, "low_discrepancy": "auto", "frequent_share": 0.5}


def test_auto_lets_the_calm_layers_wait_and_the_bytes_fall(fleet):
    run, every_round = fleet(calm="a", **AUTO), fleet(calm="a", layer_intervals=False, **AUTO)
    entries, up, layers = sent_up(run, 12)
    assert layers == ["abn", "abn", "abn", "bn", "bn", "abn", "bn", "bn", "abn", "bn", "bn", "abn"]
    all_entries, all_up, layers = sent_up(every_round, 12)
    assert set(layers) == {"abn"}
    assert (entries, all_entries) == (6 * 57 + 6 * 27, 12 * 57)
    assert up < all_up - 6 * len(NAMES) * 30 * 2  # 30 entries less, compressed, in 6 rounds
    own, plain = (
        np.array([s.weights[PARAMETERS] for s in one.devices.values()]) for one in (run, every_round)
    )
    assert own == pytest.approx(plain, abs=0.05)


def test_layers_wait_in_a_run_that_leaves_everything_open(weights):
    section = with_defaults_of_run({"name": "dc-pfl"}, 20)
    run = Fleet(weights, **{key: value for key, value in section.items() if key != "name"})
    _, _, layers = sent_up(run, 9)
    assert layers[:6] == ["abn"] * 6  # the first five, and the sixth is a full sync
    assert "abn" not in layers[6:8]
    assert layers[8] == "abn"


def test_a_run_that_began_with_the_printed_threshold_keeps_it():
    assert create("dc-pfl", SPEC, {}).low_discrepancy == 0.1
    said = {"name": "dc-pfl", "low_discrepancy": 0.1}
    assert with_defaults_of_run(said, 20) == said


@pytest.mark.parametrize("share", [0.0, 0.07, 0.2, 0.5])
def test_auto_always_has_layers_that_wait_and_layers_that_do_not(fleet, share):
    run = fleet(**{**AUTO, "frequent_share": share})
    run.round().round()
    assert set(run.state.grouping.groups[0].every.tolist()) == {1, 3}


def test_layers_that_have_waited_are_not_measured_against_those_that_have_not(fleet):
    run = fleet(calm="a", **AUTO)
    sent_up(run, 3)
    first = run.state.grouping.groups[0].apart
    sent_up(run, 9)
    assert np.array_equal(run.state.grouping.groups[0].apart, first)


def test_layers_wait_in_a_fleet_of_small_ratios_too(fleet):
    run = fleet(**{**AUTO, "frequent_share": 0.15}, ratios=dict.fromkeys(NAMES, 0.5))
    _, _, layers = sent_up(run, 6)
    assert layers == ["bn", "bn", "bn", "n", "n", "bn"]
    run.join("c0")
    sent = [sorted(run.round().updates["c0"].patch.selection.mask(SPEC).nonzero()[0].tolist()) for _ in "123"]
    assert [len(one) for one in sent] == [6, 6, 57]


def test_new_groups_measure_their_layers_anew(fleet):
    run = fleet(low_discrepancy="auto", frequent_share=0.5)
    while run.groups() != HALVES:
        run.round()
    before = [group.apart for group in run.state.grouping.groups]
    run.round()
    after = [group.apart for group in run.state.grouping.groups]
    assert not any(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert not np.array_equal(*after)


def test_a_split_that_is_due_between_full_syncs_waits_for_a_whole_round(fleet):
    run = fleet(alpha=4, observe=2, calm="b").until("gather")
    assert any(u.patch.selection != Everything() for u in run.updates.values())
    run.round()
    assert all(u.patch.selection == Everything() for u in run.updates.values())
    assert run.state.phase == "trial"


# fixed groups


def test_without_dynamic_clustering_the_groups_of_gamma_stay(fleet):
    run = fleet(dynamic=False, gamma=0.5)
    run.round().round()
    assert run.groups() == HALVES
    for _ in range(20):
        run.round()
        assert run.state.trial is None
    assert run.groups() == HALVES


def test_without_dynamic_clustering_and_gamma_there_is_one_group(fleet):
    run = fleet(dynamic=False)
    for _ in range(15):
        run.round()
    assert len(run.groups()) == 1


# who is not there


def test_whoever_missed_rounds_gets_every_layer_averaged_since(fleet):
    run = fleet(dynamic=False, start_rounds=1, calm="b")
    for _ in range(4):
        run.round()
    others = [device for device in NAMES if device != "a0"]
    run.round(*others)
    run.round("a0", "a1")
    assert run.tasks["a0"].patch.selection == Layers(("a", "n"))
    run.round(*others).round()
    assert run.tasks["a0"].patch.selection == Everything()
    assert run.tasks["a0"].since == 6


def test_an_update_that_never_arrived_costs_a_second_download_and_nothing_else(fleet):
    run = fleet(dynamic=False).round().round()
    run.round(replying=[device for device in NAMES if device != "b2"])
    run.round()
    assert run.tasks["b2"].since == 2
    assert np.array_equal(run.tasks["b2"].patch.values, run.tasks["b1"].patch.values)


def test_a_late_joiner_while_there_is_one_group_starts_from_its_model(fleet):
    run = fleet(dynamic=False).round().round()
    run.join("c0")
    run.round()
    assert run.tasks["c0"].patch.selection == Everything()
    assert np.array_equal(run.tasks["c0"].patch.values, run.tasks["a0"].patch.values)
    assert run.groups() == {frozenset({*NAMES, "c0"})}


def test_a_late_joiner_is_a_guest_once_and_then_in_the_nearest_group(fleet):
    run = fleet(dynamic=False, gamma=0.5, calm="b")
    for _ in range(6):
        run.round()
    run.join("a9")
    before = run.state.grouping.mean_model()
    groups = run.round().state.grouping
    assert np.array_equal(run.tasks["a9"].patch.values, before[PARAMETERS])
    assert groups.peers("a9") == {"a0", "a1", "a2", "a9"}
    run.round()
    assert run.tasks["a0"].patch.selection == Layers(("a", "n"))
    assert run.tasks["a9"].patch.selection == Everything()
    layer_a = SPEC.layers["a"]
    assert np.array_equal(run.tasks["a9"].patch.values[layer_a], run.tasks["a0"].patch.values[layer_a])


def test_absentees_of_a_trial_get_their_new_group_whole(fleet):
    run = fleet().until("trial")
    run.round("a0", "a1", "b0", "b1")
    assert run.groups() == HALVES
    run.round()
    assert run.tasks["a0"].adopt
    assert not run.tasks["a2"].adopt
    assert run.tasks["a2"].patch.values.size == SPEC.num_parameters


def test_absentees_of_the_settling_round_do_not_keep_the_trials_result(fleet):
    run = fleet().until("trial").round()
    run.round("a1", "a2", "b0", "b1", "b2").round()
    start = run.tasks["a0"].patch
    assert start.selection == Everything()
    assert np.array_equal(start.values, run.tasks["a1"].patch.values)
    assert run.devices["a0"].rival is None


def test_a_trial_without_a_vote_is_held_again(fleet):
    run = fleet(devices=("a0", "a1", "b0", "b1", "c0")).until("trial", "a0", "a1", "b0", "b1")
    run.round("c0")
    assert run.updates["c0"].trial is None
    assert run.state.phase == "trial"
    run.round("a0", "b0")
    assert run.state.phase == "settle"


def test_whoever_was_never_compared_becomes_a_guest_when_groups_split(fleet):
    present = ("a0", "a1", "b0", "b1")
    run = fleet(devices=(*present, "b2")).until("settle", *present)
    assert "b2" not in run.state.grouping.placed
    run.round()
    assert run.state.grouping.peers("b2") == {"b0", "b1", "b2"}


def test_slices_of_the_fleet_find_the_groups_too(fleet):
    run = fleet(start_rounds=3, observe=2)
    while len(run.groups()) < 2:
        run.round(*[NAMES[i] for i in Key.of(run.number).sample(4, 6)])
        assert run.number < 80
    assert run.groups() == HALVES


def test_a_device_that_lost_its_state_says_so_and_gets_the_whole_model(fleet):
    run = fleet(dynamic=False).round().round().round()
    run.devices["a0"] = run.method.init_device(run.weights)
    others = run.state.losses
    run.round()
    assert run.updates["a0"].lost
    assert run.updates["a0"].patch.values.size == 0
    assert run.state.losses["a0"] == others["a0"]
    run.round()
    assert run.tasks["a0"].patch.selection == Everything()
    assert not run.updates["a0"].lost


def test_an_agent_needs_no_scipy():
    code = "import sys, fleetune.protocols.methods.dcpfl.dcpfl; sys.exit('scipy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ratios


def test_a_ratio_bounds_what_is_exchanged_to_the_smallest_layers(fleet):
    run = fleet(ratios={"a0": 0.5})
    run.round().round()
    assert run.tasks["a0"].patch.selection == Layers(("n", "b"))
    assert run.updates["a0"].patch.selection == Layers(("n", "b"))
    assert run.updates["a1"].patch.selection == Everything()


def test_devices_with_less_than_the_whole_model_are_grouped_by_what_they_send(fleet):
    run = fleet(ratios={"a0": 0.5, "b0": 0.5, "b1": 0.2}).until("settle")
    assert run.groups() == HALVES


def test_a_new_ratio_brings_the_layers_it_adds(fleet):
    run = fleet(dynamic=False, ratios={"a0": 0.5}).round().round()
    run.join("a0", 1.0)
    run.round()
    assert run.tasks["a0"].patch.selection == Everything()


def test_choices_are_whole_layers():
    choices = DCPFL(SPEC).choices(DeviceReport("d"))
    assert [choice.cost.bytes_up for choice in choices] == [estimate_bytes(n) for n in (6, 27, 57)]
    assert [choice.cost.bytes_down for choice in choices] == [estimate_bytes(n) for n in (6, 27, 57)]
    assert {choice.cost.memory_bytes for choice in choices} == {2 * 4 * SPEC.size}
    assert all(choice.cost.bytes_vary for choice in choices)
    assert choices[-1].ratio == 1.0


def test_no_round_but_a_trial_takes_more_than_its_price(fleet):
    entries = {"a0": 6, "a1": 27, "b0": 27}
    ratios = {device: count / 57 for device, count in entries.items()}
    run, trials, most = fleet(low_discrepancy="auto", frequent_share=0.5, ratios=ratios), 0, {}
    offered = [choice.ratio for choice in run.method.choices(DeviceReport("d"))]
    assert offered == [6 / 57, 27 / 57, 1.0]
    for _ in range(30):
        run.round()
        for device in NAMES:
            task, update, priced = run.tasks[device], run.updates[device], entries.get(device, 57)
            most[device] = max(most.get(device, 0), update.patch.values.size)
            trials += task.trial is not None
            assert task.patch.values.size <= priced
            assert update.patch.values.size <= priced * (task.trial is None)
            assert task.trial is None or task.trial.values.size <= priced
    assert trials
    assert most == {device: entries.get(device, 57) for device in NAMES}


def test_a_final_evaluation_holds_no_trial_and_sends_nothing_up(fleet):
    run = fleet().until("trial")
    _, tasks = run.method.plan(run.state, Round(run.number + 1, ("a0",), final_evaluation=True), Key.of(1))
    assert tasks["a0"].trial is None
    assert tasks["a0"].upload == Layers(())


# what is told of its inner workings


def seen(run):
    updates = {device: run.method.diagnose_update(update) for device, update in run.updates.items()}
    return updates, run.method.diagnose_round(run.state)


def test_it_tells_what_it_declares_and_nothing_else(fleet):
    run, told = fleet(low_discrepancy="auto", frequent_share=0.5), set()
    for _ in range(20):
        updates, state = seen(run.round())
        told |= {("round", name) for name in state}
        told |= {("update", name) for update in updates.values() for name in update}
    assert told == {(one.of, one.name) for one in run.method.diagnostics}


def test_it_tells_which_layers_wait_and_what_is_sent(fleet):
    updates, state = seen(fleet(calm="a", **AUTO).round().round().round().round())
    assert updates["a0"] == {"sent": 27 / 57}
    assert state["interval"] == {"a": 3.0, "n": 1.0, "b": 1.0}
    assert state["layer_apart"]["a"] == 0.0
    assert sum(state["layer_apart"].values()) == pytest.approx(3.0)


def test_it_tells_trials_and_that_groups_are_of_those_who_are_alike(fleet):
    run = fleet()
    while run.groups() != HALVES:
        assert seen(run)[1]["groups"] == 1
        assert list(seen(run)[1].get("pairs_apart", ())) in ([], ["in one group"])
        run.round()
    updates, state = seen(run)
    assert all(update["sent"] == 0 and update["trial_gain"] > 0 for update in updates.values())
    assert (state["groups"], state["trials_won"], state["trials_lost"]) == (2, 1, 0)
    assert state["gamma"] < 1
    assert state["pairs_apart"]["in one group"] < 0.5
    assert state["pairs_apart"]["in two groups"] > 1
    run.until("trial").round(votes=(1.0, 2.0))
    assert [seen(run)[1][name] for name in ("groups", "trials_won", "trials_lost")] == [2, 1, 1]
    assert seen(run)[0]["a0"]["trial_gain"] == -1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0}, "method.alpha"),
        ({"gamma": 1.5}, "method.gamma"),
        ({"gamma_step": 0}, "method.gamma_step"),
        ({"observe": 0}, "method.observe"),
        ({"window": "five"}, "method.window"),
        ({"low_discrepancy": "automatic"}, "method.low_discrepancy"),
        ({"frequent_share": 1.5}, "method.frequent_share"),
        ({"layers": 2}, "method.layers: dc-pfl has no such setting"),
    ],
)
def test_bad_settings_name_the_key(settings, message):
    with pytest.raises(SettingError, match=message):
        create("dc-pfl", SPEC, settings)
