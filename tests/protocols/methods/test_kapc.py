"""KAPC and BLS: the paper's round in small cases, and who is absent, late or selective."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit, FitPlan
from fleetune.protocols.methods import create
from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.methods.kapc.bls import Visit
from fleetune.protocols.methods.kapc.kapc import KAPC, KAPCwithBLS, Update
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

SPEC = tiny_spec()
LAYERS = {"a": SPEC.layers["a"], "b": SPEC.layers["b"]}
NORM = SPEC.layers["n"]
DEVICES = ("d0", "d1", "d2")


def weights_of(device):
    return Key.of("own", device).uniform(SPEC.size).astype(np.float32) - np.float32(0.5)


def admitted(method, weights, devices=DEVICES):
    state = method.init_coordinator(weights)
    for device in devices:
        state = method.admit(state, DeviceReport(device))
    return state


def heard(method, state, devices=DEVICES):
    """After each device has sent all of its own layers."""
    updates = [(device, Update(Patch.of(weights_of(device), Layers(("a", "b")), SPEC))) for device in devices]
    return method.aggregate(state, updates)


def plan(method, state, participants=DEVICES, number=1):
    return method.plan(state, Round(number, participants), Key.of("plan"))


def mix(shares, layer, devices=DEVICES):
    return sum(
        share * weights_of(device)[LAYERS[layer]] for share, device in zip(shares, devices, strict=True)
    )


@dataclass
class Watching(PullToTarget):
    """Notes what it is asked to train."""

    spec: ModelSpec = SPEC
    asked: list[tuple[np.ndarray, FitPlan]] = field(default_factory=list)

    def __post_init__(self):
        PullToTarget.__init__(self, self.spec, "watching")

    def fit(self, weights: np.ndarray, plan: FitPlan, key: Key) -> Fit:
        self.asked.append((weights, plan))
        return super().fit(weights, plan, key)


def work(method, device, task, trainer=None, budget=Budget()):  # noqa: B008 - frozen
    return method.work(device, task, trainer or Watching(), budget, Key.of("work"))


# The coordinator's half


def test_everybody_starts_equal_and_is_sent_the_common_layers(weights):
    method = KAPC(SPEC)
    state, tasks = plan(method, admitted(method, weights))
    assert np.allclose(state.cube, 1 / 3)
    assert tasks["d1"].patch.selection == Layers(("a", "b"))
    for where, values in zip(
        LAYERS.values(), np.split(tasks["d1"].patch.values, [LAYERS["a"].stop]), strict=True
    ):
        assert values == pytest.approx(weights[where])


def test_the_cube_takes_one_step_and_targets_are_mixes_of_the_participants(weights):
    """Eq. (12) and (15) entry by entry, as printed."""
    method = KAPC(SPEC, coaching=0.7, equal_sharing=0.3, relation_rate=0.05)
    state, tasks = plan(method, heard(method, admitted(method, weights)))
    for layer, (name, where) in enumerate(LAYERS.items()):
        own = [weights_of(device)[where].astype(float) for device in DEVICES]
        for i, device in enumerate(DEVICES):
            away = sum(own) / 3 - own[i]
            raw = [1 / 3 - 0.05 * (2 * 0.7 * own[j] @ away + 0.3 * (1 / 3 - 1 / 3)) for j in range(3)]
            shares = np.maximum(raw, 0) / np.maximum(raw, 0).sum()
            assert state.cube[i, layer] == pytest.approx(shares)
            sent = tasks[device].patch.apply(weights, SPEC)[where]
            assert sent == pytest.approx(mix(shares, name), abs=1e-6)


def test_devices_that_are_alike_come_to_coach_each_other(weights):
    method = KAPC(SPEC, relation_rate=0.1)
    state = admitted(method, weights, names := ("cat0", "cat1", "dog0", "dog1"))
    devices = {name: method.init_device(weights) for name in names}
    for number in range(1, 17):
        state, tasks = plan(method, state, names, number)
        updates = {}
        for name in names:
            trainer = PullToTarget(SPEC, name[:3])
            devices[name], updates[name] = work(method, devices[name], tasks[name], trainer)
        state = method.aggregate(state, updates.items())
    for layer in range(2):
        assert state.cube[0, layer, 1] > 1.3 * state.cube[0, layer, 2:].max()
        assert state.cube[3, layer, 2] > 1.3 * state.cube[3, layer, :2].max()


def test_a_slice_leaves_the_others_rows_alone_and_does_not_use_their_layers(weights):
    method = KAPC(SPEC)
    before, _ = plan(method, heard(method, admitted(method, weights)))
    after, tasks = plan(method, before, ("d0", "d2"), 2)
    assert np.array_equal(after.cube[1], before.cube[1])
    assert not np.array_equal(after.cube[0], before.cube[0])
    assert np.allclose(after.cube.sum(axis=-1), 1)
    elsewhere = replace(before, latest={**before.latest, "d1": weights + np.float32(9)})
    _, same = plan(method, elsewhere, ("d0", "d2"), 2)
    assert np.array_equal(same["d0"].patch.values, tasks["d0"].patch.values)
    assert set(tasks) == {"d0", "d2"}


def test_a_device_back_after_rounds_counts_with_its_latest_layers(weights):
    method = KAPC(SPEC)
    state = heard(method, admitted(method, weights))
    state = heard(method, plan(method, state, ("d0", "d2"), 2)[0], ("d0", "d2"))
    assert np.array_equal(state.latest["d1"][LAYERS["a"]], weights_of("d1")[LAYERS["a"]])
    shares, tasks = plan(method, state, ("d0", "d1"), 3)
    row = shares.cube[0, 0, [0, 1]] / shares.cube[0, 0, [0, 1]].sum()
    sent = tasks["d0"].patch.apply(weights, SPEC)[LAYERS["a"]]
    assert sent == pytest.approx(mix(row, "a", ("d0", "d1")), abs=1e-6)


def test_a_late_joiner_gets_its_share_of_every_row_and_the_rest_keep_their_proportions(weights):
    method = KAPC(SPEC)
    state, _ = plan(method, heard(method, admitted(method, weights, ("d0", "d2"))), ("d0", "d2"))
    late = method.admit(state, DeviceReport("d1"))
    assert method.admit(late, DeviceReport("d1")) is late
    grown, tasks = plan(method, late, ("d0",), 2)
    assert grown.related == DEVICES
    assert np.allclose(grown.cube[2, :, 1], 1 / 3)
    assert np.allclose(grown.cube[2][:, [0, 2]], state.cube[1] * 2 / 3)
    assert np.allclose(grown.cube[1], 1 / 3)
    _, tasks = plan(method, grown, DEVICES, 3)
    assert np.isfinite(tasks["d1"].patch.values).all()


def test_the_order_of_admission_does_not_matter(weights):
    method = KAPC(SPEC)
    one, other = admitted(method, weights), admitted(method, weights, DEVICES[::-1])
    for number in (1, 2):
        one, other = (plan(method, heard(method, state), DEVICES, number)[0] for state in (one, other))
    assert codec.encode(one, SPEC) == codec.encode(other, SPEC)


def test_a_late_joiner_grows_a_learned_cube_like_one_that_was_there(weights):
    assert np.allclose(relationship_cube.grow(np.empty((0, 2, 0)), [], 4), 1 / 4)
    cube = relationship_cube.normalise(Key(1).uniform(18).reshape(3, 2, 3))
    grown = relationship_cube.grow(cube, [0, 2, 3], 4)
    assert np.allclose(grown.sum(axis=-1), 1)
    assert np.allclose(relationship_cube.slice_participants(grown, [0, 2, 3]), cube)


def test_an_update_with_norm_parameters_changes_nothing_for_anybody(weights):
    method = KAPC(SPEC)
    state = heard(method, admitted(method, weights))
    foreign = Update(Patch.of(weights_of("d0"), Everything(), SPEC))
    hostile = method.aggregate(state, [("d0", foreign)])
    assert np.array_equal(method.shared_model(hostile), method.shared_model(state))
    assert np.array_equal(method.shared_model(state)[NORM], weights[NORM])
    mean = np.mean([weights_of(device)[LAYERS["b"]] for device in DEVICES], axis=0)
    assert method.shared_model(state)[LAYERS["b"]] == pytest.approx(mean, abs=1e-6)
    tasks, same = plan(method, hostile)[1], plan(method, state)[1]
    assert np.array_equal(tasks["d1"].patch.values, same["d1"].patch.values)


@pytest.mark.parametrize("rows", ["clip", "simplex"])
def test_many_safe_steps_at_any_rate_end_in_shares(weights, rows):
    method = KAPC(SPEC, relation_rate=1e6, relation_steps=50, safe_step=True, rows=rows)
    state, _ = plan(method, heard(method, admitted(method, weights)))
    assert (state.cube >= 0).all()
    assert np.allclose(state.cube.sum(axis=-1), 1)
    self_shares = state.cube[np.arange(3), :, np.arange(3)]
    assert (self_shares > 0.9).all(), "without a penalty to speak of, everybody is its own best coach"


@pytest.mark.parametrize("rows", ["clip", "simplex"])
def test_rows_that_ran_away_become_uniform(weights, rows):
    method = KAPC(SPEC, relation_rate=1e6, relation_steps=1000, rows=rows)
    state, tasks = plan(method, heard(method, admitted(method, weights)))
    assert np.allclose(state.cube, 1 / 3)
    assert np.isfinite(tasks["d0"].patch.values).all()


def test_no_steps_mean_equal_shares_for_ever(weights):
    method = KAPC(SPEC, relation_steps=0)
    state, _ = plan(method, heard(method, admitted(method, weights)))
    assert np.allclose(state.cube, 1 / 3)


def test_gram_in_chunks_is_exact_on_layers_of_any_size():
    layer = Key(5).uniform(3 * 20_000).reshape(3, 20_000).astype(np.float32)
    wide = layer.astype(np.float64)
    assert np.allclose(relationship_cube.gram(list(layer)), wide @ wide.T, rtol=1e-12)


# The device's half


def test_a_device_trains_from_its_own_weights_and_norm_layers_are_not_pulled(weights):
    method, trainer = KAPC(SPEC, coaching=0.25), Watching()
    _, tasks = plan(method, heard(method, admitted(method, weights)))
    own = method.init_device(weights_of("elsewhere"))
    after, update = work(method, own, tasks["d0"], trainer)
    [(start, asked)] = trainer.asked
    assert start is own.weights
    assert asked.trainable is None
    assert asked.pull.strength == 0.25
    assert not asked.pull.mask[NORM].any()
    assert not asked.pull.mask[SPEC.num_parameters :].any()
    assert np.array_equal(asked.pull.target[LAYERS["b"]], tasks["d0"].patch.apply(weights, SPEC)[LAYERS["b"]])
    assert update.patch.selection == Layers(("a", "b"))
    assert np.array_equal(update.patch.apply(weights, SPEC)[LAYERS["a"]], after.weights[LAYERS["a"]])


def test_a_layer_that_did_not_come_pulls_towards_the_weights_before_the_round(weights):
    method, trainer = KAPCwithBLS(SPEC), Watching()
    state = heard(method, admitted(method, weights))
    cube = np.full((3, 2, 3), 1 / 3)
    cube[0, 1] = [0.98, 0.01, 0.01]
    state = replace(plan(method, state)[0], cube=cube)
    after, tasks = plan(method, state)
    assert after.cube[0, 1, 0] > 0.7
    assert tasks["d0"].patch.selection == Layers(("a",))
    assert tasks["d1"].patch.selection == Layers(("a", "b"))
    assert len(codec.encode(tasks["d0"], SPEC)) + 40 < len(codec.encode(tasks["d1"], SPEC))
    device = method.init_device(weights_of("elsewhere"))
    work(method, device, tasks["d0"], trainer)
    target = trainer.asked[0][1].pull.target
    assert np.array_equal(target[LAYERS["b"]], device.weights[LAYERS["b"]])
    assert trainer.asked[0][1].pull.mask[LAYERS["b"]].all()


def test_a_layer_that_did_not_go_up_gets_no_target_the_next_time(weights):
    """Eq. (20); as Algorithm 5 prints it, the mix of what is known is sent all the same."""
    for targets, sent in (("uploaded", ("a",)), ("all", ("a", "b"))):
        method = KAPCwithBLS(SPEC, targets=targets)
        state, tasks = plan(method, admitted(method, weights))
        assert tasks["d0"].patch.selection == Layers(("a", "b"))
        _, update = work(method, method.init_device(weights), tasks["d0"])
        state = method.aggregate(state, [("d0", update)])
        _, tasks = plan(method, state, DEVICES, 2)
        assert tasks["d0"].patch.selection == Layers(sent)
        assert tasks["d1"].patch.selection == Layers(("a", "b"))


def test_a_single_participant_is_sent_nothing_with_bls(weights):
    method = KAPCwithBLS(SPEC)
    _, tasks = plan(method, heard(method, admitted(method, weights)), ("d1",))
    assert tasks["d1"].patch.values.size == 0
    _, update = work(method, method.init_device(weights), tasks["d1"])
    assert update.patch.selection == Layers(("a",))


# BLS


def test_layers_that_did_not_go_up_keep_their_latest_value(weights):
    method = KAPCwithBLS(SPEC)
    state = heard(method, admitted(method, weights))
    _, tasks = plan(method, state)
    after, update = work(method, method.init_device(weights), tasks["d0"])
    assert after.visit.uploaded == 1
    assert update.patch.selection == Layers(("a",))
    whole = work(KAPC(SPEC), method.init_device(weights), tasks["d0"])[1]
    assert len(codec.encode(update, SPEC)) + 40 < len(codec.encode(whole, SPEC))
    merged = method.aggregate(state, [("d0", update)])
    assert np.array_equal(merged.latest["d0"][LAYERS["a"]], after.weights[LAYERS["a"]])
    assert np.array_equal(merged.latest["d0"][LAYERS["b"]], weights_of("d0")[LAYERS["b"]])


SHAPES = [(6, 25), (16, 150), (12, 16), (8, 12), (10, 8)]


def layers_of(name, scale):
    return [Key.of(name, i).uniform(n * d) * scale for i, (d, n) in enumerate(SHAPES)]


def select(last, scale=1.0, mode="largest"):
    return bls.select(last, layers_of("w", 1), layers_of("s", scale), SHAPES, 4, mode)


def test_bounds_are_those_of_the_first_visit_until_all_layers_went_up():
    first = select(None)
    assert first.uploaded == 4
    kept = select(first, scale=2)
    assert np.array_equal(kept.distances, first.distances)
    wide = select(replace(first, uploaded=5), scale=2)
    assert wide.uploaded == 4
    assert (wide.distances >= first.distances).all()
    assert (wide.distances > first.distances).any()


def test_a_budget_bounds_the_layers_that_go_up_but_not_what_the_method_remembers(weights):
    spec = chain(4)
    method = KAPCwithBLS(spec)
    start = np.full(spec.size, np.float32(0.5))
    task = plan(method, admitted(method, start))[1]["d0"]
    trainer = Watching(spec)
    for ratio, sent in ((1.0, 3), (0.5, 2), (0.01, 1)):
        after, update = work(method, method.init_device(start), task, trainer, Budget(ratio))
        assert len(update.patch.selection.names) == sent
        assert after.visit.uploaded == 3
    choices = method.choices(DeviceReport("d0"))
    assert [choice.ratio for choice in choices] == [0.25, 0.5, 0.75, 1.0]


def chain(length):
    tensors = [TensorSpec(f"{i}.weight", (5, 5), "weight", f"{i}", ((), ())) for i in range(length)]
    return ModelSpec("chain", tuple(tensors), (), (5,), 5)


def test_a_model_of_one_layer_always_sends_it():
    spec = chain(1)
    method = KAPCwithBLS(spec)
    device = method.init_device(np.ones(spec.size, np.float32))
    task = plan(method, admitted(method, device.weights))[1]["d0"]
    for _ in range(3):
        device, update = work(method, device, task, Watching(spec))
        assert update.patch.values.size == 25


flags = st.lists(st.booleans(), min_size=1, max_size=8)


@given(flags, st.integers(1, 8), st.booleans(), st.sampled_from(["largest", "literal"]))
def test_search_stays_within_the_layers_and_starts_below_the_last(table, previous, first, mode):
    previous = min(previous, len(table))
    found = bls.search(previous, len(table), lambda o: table[o - 1], first=first, mode=mode)
    assert 1 <= found <= len(table)
    if first or previous == len(table):
        assert found == max(1, len(table) - 1)


@given(st.integers(0, 8), st.integers(1, 7))
def test_search_finds_the_largest_of_a_prefix_from_anywhere(prefix, previous):
    found = bls.search(previous, 8, lambda o: o <= prefix, first=False, mode="largest")
    assert found == max(1, prefix)


def test_the_literal_search_goes_down_from_what_is_satisfied():
    assert bls.search(3, 5, lambda o: o <= 4, first=False, mode="literal") == 1
    assert bls.search(3, 5, lambda o: o == 3, first=False, mode="literal") == 2
    assert bls.search(2, 5, lambda o: o == 4, first=False, mode="literal") == 4


def test_the_criterion_of_a_deep_network_stays_finite_and_holds_for_a_prefix():
    """ResNet-18 of 21 layers: the paper's Fig. 8 shows 19 of them sent."""
    widths = [64] * 5 + [128] * 5 + [256] * 5 + [512] * 5
    outputs, inputs = [*widths, 10], [27, *(9 * width for width in widths[:-1]), 512]
    full = np.full(21, 10.0), np.full(21, 0.5)
    held = [bls.criterion(o, full, full, outputs, inputs, 3)[2] for o in range(1, 22)]
    assert held == sorted(held, reverse=True)
    assert 15 <= sum(held) <= 20
    left, right, _ = bls.criterion(20, full, full, outputs, inputs, 3)
    assert np.isfinite([left, right]).all()


@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_that_is_all_zero_is_never_satisfied(which):
    norms, distances = np.ones(3), np.ones(3)
    (norms, distances)[which][1] = 0
    if which == 0:
        assert not bls.criterion(2, (norms, distances), (norms, distances), [2] * 3, [2] * 3, 2)[2]
    else:
        assert np.isfinite(bls.criterion(2, (norms, distances), (norms, distances), [2] * 3, [2] * 3, 2)[0])


def test_what_bls_remembers_survives_the_codec(weights):
    visit = Visit(np.array([1.0, 1e-300]), np.array([0.0, 0.1]), 1)
    state = replace(KAPCwithBLS(SPEC).init_device(weights), visit=visit)
    again = codec.decode(codec.encode(state, SPEC), type(state), SPEC)
    assert np.array_equal(again.visit.norms, visit.norms)
    assert again.visit.uploaded == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("kapc", {"coaching": -1}, "method.coaching: expected `float` >= 0"),
        ("kapc", {"rows": "softmax"}, "method.rows: invalid enum value 'softmax'"),
        ("kapc", {"self_threshold": 0.5}, "kapc has no such setting"),
        ("kapc-bls", {"self_threshold": 1.5}, "method.self_threshold: expected `float` <= 1"),
        ("kapc-bls", {"search": "smallest"}, "method.search: invalid enum value 'smallest'"),
        ("kapc-bls", {"targets": "some"}, "method.targets: invalid enum value 'some'"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(SettingError, match=message):
        create(name, SPEC, settings)
