"""The rivals of the papers' tables: what travels, what stays personal, what is frozen, and worked numbers."""

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.errors import raises

from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.method.averaging import Task, Update
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create, fedamp, fedcac
from fleetune.protocols.methods.per_fedavg import meta_gradient
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything, Layers, split_at_head

SPEC = tiny_spec()
STATS = slice(SPEC.num_parameters, SPEC.size)
SHARED = {
    "fedper": ("a", "n"),
    "fedrep": ("a", "n"),
    "fedbabu": ("a", "n"),
    "fedbn": ("a", "b"),
    "lg-fed": ("b",),
}
KEY = Key.of(5)


class Recorder(PullToTarget):
    """Notes what it is asked to fit, and what came out."""

    def __init__(self, spec, name="d", **kwargs):
        super().__init__(spec, name, **kwargs)
        self.fits = []

    def fit(self, weights, plan, key):
        fit = super().fit(weights, plan, key)
        self.fits.append((weights.copy(), plan, fit.weights.copy()))
        return fit


def mask_of(*layers):
    return Layers(layers).mask(SPEC)


def shifted(weights, by):
    """Another shared model; statistics as they were."""
    return np.where(np.arange(weights.size) < SPEC.num_parameters, weights + np.float32(by), weights)


def task_of(method, weights, device="d"):
    _, tasks = method.plan(method.init_coordinator(weights), Round(1, (device,)), KEY)
    return tasks[device]


def flat(size):
    return ModelSpec("flat", (TensorSpec("w", (size,), "weight", "w", ((),)),), (), (1,), 2)


@pytest.mark.parametrize("name", SHARED)
def test_only_the_shared_layers_travel(name, weights):
    method = create(name, SPEC, {})
    task = task_of(method, weights)
    _, update = method.work(method.init_device(weights), task, Recorder(SPEC), Budget(), KEY)
    assert task.patch.selection == update.patch.selection == Layers(SHARED[name])
    assert task.patch.values.size == update.patch.values.size == mask_of(*SHARED[name]).sum()


@pytest.mark.parametrize("name", SHARED)
def test_bytes_are_saved_as_the_choices_say(name):
    spec = tiny_spec(4000)
    weights = Key.of("w").uniform(spec.size).astype(np.float32)
    method, whole = create(name, spec, {}), create("fedavg", spec, {})
    cost, sent = method.choices(DeviceReport("d"))[0].cost, {}
    for each in (method, whole):
        task = task_of(each, weights)
        _, update = each.work(each.init_device(weights), task, PullToTarget(spec, "d"), Budget(), KEY)
        sent[each] = len(codec.encode(task, spec)), len(codec.encode(update, spec))
    share = method.shared.count(spec) / spec.num_parameters
    assert np.divide(sent[method], sent[whole]) == pytest.approx(share, abs=0.02)
    assert sent[method] == pytest.approx((cost.bytes_down, cost.bytes_up), rel=0.15)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbn", "lg-fed"])
def test_what_is_not_shared_stays_as_the_device_left_it(name, weights):
    method, trainer = create(name, SPEC, {}), Recorder(SPEC)
    own, shared = shifted(weights, 1), shifted(weights, -1)
    device, _ = method.work(method.init_device(own), task_of(method, shared), trainer, Budget(), KEY)
    start = trainer.fits[0][0]
    travels = mask_of(*SHARED[name])
    assert np.array_equal(start[travels], shared[travels])
    assert np.array_equal(start[~travels], own[~travels])
    assert np.array_equal(method.personal_model(device), trainer.fits[-1][2])


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("fedper", 3.25),
        ("fedbabu", 3.25),
        ("lg-fed", 3.25),
        ("fedrep", 2.5),
        ("fedbn", 2.5),
        ("ditto", 2.5),
        ("per-fedavg", 2.5),
    ],
)
def test_who_counts_how_much(name, mean, weights):
    """1 of 10 samples, 4 of 30, 9 of none; what is not shared is not taken from an update that has it."""
    method = create(name, SPEC, {})
    everything = Everything().mask(SPEC)
    updates = [
        (f"d{n}", Update(Patch.of(np.full(SPEC.size, value, np.float32), Everything(), SPEC), n))
        for value, n in ((1, 10), (4, 30), (9, 0))
    ]
    merged = method.shared_model(method.aggregate(method.init_coordinator(weights), updates))
    shared = mask_of(*SHARED[name]) if name in SHARED else everything
    assert merged[shared] == pytest.approx(mean)
    assert np.array_equal(merged[~shared], weights[~shared])


def test_the_head_is_counted_in_layers_with_weights():
    norm = TensorSpec("m.weight", (3,), "norm", "m", ((),))
    spec = ModelSpec("normed", (*SPEC.tensors[:-1], norm), (6,), (4,), 3)
    assert split_at_head(spec, 1) == (Layers(("a", "n")), Layers(("b", "m")))
    with raises(SettingError, "2 layers", "'normed'", remedy="1"):
        split_at_head(spec, 2)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fedper", "personal_layers"),
        ("lg-fed", "global_layers"),
        ("fedrep", "head_layers"),
        ("fedbabu", "head_layers"),
    ],
)
def test_a_head_that_is_the_whole_model_is_refused_at_once(name, setting):
    with raises(SettingError, remedy="1"):
        create(name, SPEC, {setting: 2})
    with raises(SettingError, f"method.{setting}", "`int` >= 1"):
        create(name, SPEC, {setting: 0})


@pytest.mark.parametrize(("layers", "shared"), [(5, 3), (4, 3), (3, 2), (2, 1)])
def test_lg_fed_shares_three_layers_in_a_run_that_leaves_it_open_and_fewer_of_short_models(layers, shared):
    names = [f"l{at}" for at in range(layers)]
    tensors = [TensorSpec(f"{name}.weight", (2,), "weight", name, ((),)) for name in names]
    norm = TensorSpec("n.weight", (2,), "norm", "n", ((),))
    spec = ModelSpec("deep", (tensors[0], norm, *tensors[1:]), (), (2,), 2)
    method = create("lg-fed", spec, {})
    assert method.shared == Layers(tuple(names[-shared:]))
    assert create("lg-fed", spec, {"global_layers": 1}).shared == Layers((names[-1],))


def test_a_model_of_nothing_but_norms_has_nothing_to_share():
    tensor = TensorSpec("n.weight", (3,), "norm", "n", ((),))
    with raises(SettingError, "'norms'"):
        create("fedbn", ModelSpec("norms", (tensor,), (), (3,), 3), {})


def test_fedrep_trains_the_head_then_the_body(weights):
    method, trainer = create("fedrep", SPEC, {"head_epochs": 4, "body_epochs": 3}), Recorder(SPEC)
    device, update = method.work(
        method.init_device(weights), task_of(method, weights), trainer, Budget(), KEY
    )
    (_, head, headed), (start, body, end) = trainer.fits
    assert (head.epochs, body.epochs) == (4, 3)
    assert np.array_equal(head.trainable, mask_of("b"))
    assert np.array_equal(body.trainable, mask_of("a", "n"))
    assert np.array_equal(start, headed)
    assert np.array_equal(update.patch.values, end[mask_of("a", "n")])
    assert np.array_equal(device.weights[mask_of("b")], headed[mask_of("b")])
    assert not np.any(headed[mask_of("b")] == weights[mask_of("b")])


@pytest.mark.parametrize("fine_tuned", ["head", "all"])
def test_fedbabu_trains_the_body_under_the_initial_head_and_tunes_beside(fine_tuned, weights):
    method, trainer = create("fedbabu", SPEC, {"fine_tuned": fine_tuned}), Recorder(SPEC)
    device = method.init_device(weights)
    body, head = mask_of("a", "n"), mask_of("b")
    for number in (1, 2):
        shared = shifted(weights, -number)
        trainer.fits.clear()
        device, update = method.work(device, task_of(method, shared), trainer, Budget(), KEY)
        (start, frozen, trained), (tuned_from, tuning, tuned) = trainer.fits
        assert np.array_equal(start[head], weights[head])
        assert np.array_equal(start[body], shared[body])
        assert np.array_equal(frozen.trainable, body)
        assert np.array_equal(update.patch.values, trained[body])
        assert np.array_equal(tuned_from, start)
        assert tuning.epochs == 5
        assert np.array_equal(method.personal_model(device), tuned)
        assert not np.any(tuned[head] == weights[head])
        assert np.array_equal(tuned[body], shared[body]) == (fine_tuned == "head")


def test_ditto_pulls_a_second_model_towards_the_one_that_came(weights):
    method, trainer = create("ditto", SPEC, {"pull": 0.4}), Recorder(SPEC)
    own, shared = shifted(weights, 1), shifted(weights, -1)
    device, update = method.work(method.init_device(own), task_of(method, shared), trainer, Budget(), KEY)
    (start, plain, trained), (from_own, pulled, personal) = trainer.fits
    parameters = Everything().mask(SPEC)
    assert plain.pull is None
    assert np.array_equal(start[parameters], shared[parameters])
    assert np.array_equal(update.patch.values, trained[parameters])
    assert np.array_equal(from_own, own)
    assert pulled.pull.strength == 0.2
    noise = KEY.child("personal").uniform(SPEC.size) * 0.01
    expected = own - 0.3 * ((own - trainer.target) + 0.4 * (own - shared)) - noise
    assert personal[parameters] == pytest.approx(expected[parameters], abs=1e-6)
    assert np.array_equal(method.personal_model(device), personal)


def test_ditto_keeps_each_models_own_statistics(weights):
    method, trainer = create("ditto", SPEC, {}), Recorder(SPEC)
    device = method.init_device(weights)
    for _ in range(2):
        trainer.fits.clear()
        before = device
        device, _ = method.work(device, task_of(method, weights), trainer, Budget(), KEY)
    assert np.array_equal(trainer.fits[0][0][STATS], before.copy[STATS])
    assert np.array_equal(trainer.fits[1][0], before.weights)


@pytest.mark.parametrize(("difference", "expected"), [(None, 4.8), (1e-3, 3.84)])
def test_the_meta_gradient_of_a_parabola(difference, expected):
    """f = x^2 at 3 with alpha = 0.1: f' = 2x; adapted x = 2.4; F' = (1 - 0.1 * 2) * 4.8."""
    found = meta_gradient(np.array([3.0]), [lambda x: 2 * x] * (2 + bool(difference)), 0.1, difference)
    assert found == pytest.approx([expected])


@pytest.mark.parametrize(("approximation", "factor"), [("first-order", 0.8), ("hessian-free", 0.64)])
def test_per_fedavg_sends_the_meta_step_and_keeps_the_adapted_model(approximation, factor, weights):
    settings = {"steps": 2, "adaptation_rate": 0.2, "meta_rate": 0.5, "approximation": approximation}
    method, trainer = create("per-fedavg", SPEC, settings), Recorder(SPEC)
    shared = shifted(weights, 1)
    device, update = method.work(method.init_device(weights), task_of(method, shared), trainer, Budget(), KEY)
    gap = (shared - trainer.target)[: SPEC.num_parameters]
    parameters = slice(0, SPEC.num_parameters)
    adapted = trainer.target[parameters] + 0.8 * gap
    assert device.weights[parameters] == pytest.approx(adapted, abs=1e-6)
    stepped = trainer.target[parameters] + (1 - 0.5 * factor) ** 2 * gap
    assert update.patch.values == pytest.approx(stepped, abs=1e-3)
    assert device.weights[STATS] == pytest.approx(weights[STATS] * 0.9)
    assert len(trainer.fits) == 1


def test_per_fedavg_that_diverges_says_what_to_lower(weights):
    method = create("per-fedavg", SPEC, {"meta_rate": 1e30})
    with np.errstate(all="ignore"), pytest.raises(ModelError, match=r"method.meta_rate .*1e\+30"):
        method.work(method.init_device(weights), task_of(method, weights), Recorder(SPEC), Budget(), KEY)


def test_attention_falls_with_the_squared_distance():
    own, others = np.zeros(2), [np.array([1.0, 0.0]), np.array([0.0, 2.0])]
    shares = fedamp.attention(own, others, alpha=1.0, sigma=2.0)
    assert shares == pytest.approx([0.30326533, 0.06766764])
    assert fedamp.message(own, others, shares) == pytest.approx([0.30326533, 0.13533528])
    assert fedamp.message(np.ones(2), others, shares) == pytest.approx([0.93233236, 0.76440231])
    assert fedamp.attention(own, others, alpha=100.0, sigma=2.0).sum() == pytest.approx(1.0)
    assert fedamp.attention(own, [], alpha=1.0, sigma=2.0).size == 0


def test_cosine_attention_is_a_softmax_beside_a_fixed_share():
    own, others = np.array([2.0, 0.0]), [np.array([1.0, 0.0]), np.array([0.0, 5.0])]
    shares = fedamp.cosine_attention(own, others, self_share=0.4, sigma=1.0)
    assert shares == pytest.approx([0.6 * 0.73105858, 0.6 * 0.26894142])
    assert fedamp.cosine_attention(own, [], self_share=0.4, sigma=1.0).size == 0
    assert fedamp.cosine_attention(own, [np.zeros(2)], self_share=0.4, sigma=1.0) == pytest.approx([0.6])


def test_fedamp_mixes_the_latest_of_those_heard_from():
    method = create("fedamp", flat(1), {"alpha": 1.0, "sigma": 2.0})
    state = method.init_coordinator(np.zeros(1, np.float32))

    def sends(state, **values):
        patches = {d: Patch(Everything(), np.array([v], np.float32)) for d, v in values.items()}
        return method.aggregate(state, [(d, fedamp.Update(patch)) for d, patch in patches.items()])

    def target(state, device):
        _, tasks = method.plan(state, Round(2, (device,)), KEY)
        return float(tasks[device].patch.values[0])

    assert target(state, "a") == 0
    state = sends(state, a=1.0)
    assert target(state, "a") == 1  # nobody else was heard of
    assert target(state, "b") == pytest.approx(0.5 * np.exp(-0.5))  # a newcomer stands at the start
    state = sends(state, b=2.0)  # a is away and keeps its place
    assert target(state, "b") == pytest.approx(2 - 0.5 * np.exp(-0.5))
    assert method.shared_model(state) == pytest.approx([1.5])


def test_fedamp_trains_from_its_own_model_towards_the_message(weights):
    method, trainer = create("fedamp", SPEC, {"alpha": 4.0, "pull": 2.0}), Recorder(SPEC)
    own = shifted(weights, 1)
    device, update = method.work(method.init_device(own), task_of(method, weights), trainer, Budget(), KEY)
    ((start, plan, end),) = trainer.fits
    parameters = Everything().mask(SPEC)
    assert np.array_equal(start, own)
    assert np.array_equal(plan.pull.target[parameters], weights[parameters])
    assert plan.pull.strength == 0.25
    assert np.array_equal(update.patch.values, end[parameters])
    assert np.array_equal(method.personal_model(device), end)


def fedcac_after(number, beta=2):
    """A coordinator after round `number`: devices a and b mark alike, c marks the rest."""
    spec = flat(4)
    method = create("fedcac", spec, {"beta": beta})
    state = method.init_coordinator(np.zeros(4, np.float32))
    state, _ = method.plan(state, Round(number, ("a", "b", "c")), KEY)
    marks = {"a": [1, 1, 0, 0], "b": [1, 1, 0, 0], "c": [0, 0, 1, 1]}
    values = {"a": 2, "b": 4, "c": 9}
    updates = [
        (d, fedcac.Update(Patch(Everything(), np.full(4, v, np.float32)), np.array(marks[d], bool)))
        for d, v in values.items()
    ]
    return method, method.aggregate(state, updates)


def next_start(method, state, device, own):
    _, tasks = method.plan(state, Round(9, (device,)), KEY)
    return tasks[device].patch.apply(np.full(4, own, np.float32), method.spec).tolist()


def test_fedcac_averages_critical_entries_with_those_who_mark_alike():
    """Overlaps: 1 between a and b, else 0; T = 1/3 + 1/2 * (1 - 1/3)."""
    method, state = fedcac_after(1)
    assert method.shared_model(state).tolist() == [5, 5, 5, 5]
    assert next_start(method, state, "a", own=2) == [3, 3, 5, 5]
    assert next_start(method, state, "b", own=4) == [3, 3, 5, 5]
    assert next_start(method, state, "c", own=9) == [5, 5, 9, 9]
    assert next_start(method, state, "late", own=0) == [5, 5, 5, 5]


def test_fedcac_beyond_beta_sends_no_critical_entries_back():
    method, state = fedcac_after(3)
    _, tasks = method.plan(state, Round(4, ("a",)), KEY)
    assert tasks["a"].patch.selection.count(method.spec) == 2
    assert next_start(method, state, "a", own=2) == [2, 2, 5, 5]


def test_fedcac_marks_the_entries_whose_change_weighs_most():
    """|(end - start) * end| with tau = 0.5; the whole model travels with the marks."""

    class Given(PullToTarget):
        def fit(self, weights, plan, key):
            fit = super().fit(weights, plan, key)
            fit.weights[:] = [5, -3, 2, 1]
            return fit

    method = create("fedcac", flat(4), {})
    start = np.array([5, -2, 2, 9], np.float32)
    device, update = method.work(
        method.init_device(start), Task(Patch(Everything(), start)), Given(flat(4), "d"), Budget(), KEY
    )
    assert update.critical.tolist() == [False, True, False, True]  # 0, 3, 0, 8
    assert update.patch.values.tolist() == [5, -3, 2, 1]
    assert device.weights.tolist() == [5, -3, 2, 1]


def test_fedcac_takes_marks_of_another_model_for_none(weights):
    method = create("fedcac", SPEC, {})
    state, _ = method.plan(method.init_coordinator(weights), Round(1, ("d",)), KEY)
    update = fedcac.Update(Patch.of(weights + 1, Everything(), SPEC), np.ones(3, bool))
    state = method.aggregate(state, [("d", update)])
    _, tasks = method.plan(state, Round(2, ("d",)), KEY)
    assert isinstance(tasks["d"].patch.selection, Entries)
    assert tasks["d"].patch.selection.bitmap.all()
