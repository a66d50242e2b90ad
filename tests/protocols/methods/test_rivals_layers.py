"""The rivals that mix, split or freeze layers: pFedLA, CD2-pFed and PerFedMask, against worked numbers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.methods import create, pfedla
from fleetune.protocols.methods.cd2_pfed import CD2pFed, shared_entries
from fleetune.protocols.methods.perfedmask import PerFedMask, choose, unevenness
from fleetune.protocols.methods.pfedla import Hypernetwork, PFedLA
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.skeletons.averaging import Update
from fleetune.protocols.skeletons.choice import Budget, DeviceReport
from fleetune.protocols.skeletons.method import Round
from fleetune.protocols.skeletons.submodels import cut
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

SPEC = tiny_spec()
PARAMETERS = np.arange(SPEC.size) < SPEC.num_parameters
KEY = Key.of("test", "layers")


class Recorder(PullToTarget):
    """Notes what it is asked to fit, and what came out."""

    def __init__(self, name="d", **kwargs):
        super().__init__(SPEC, name, **kwargs)
        self.fits = []

    def fit(self, weights, plan, key):
        fit = super().fit(weights, plan, key)
        self.fits.append((weights.copy(), plan, fit.weights.copy()))
        return fit


def deep_spec():
    """Two hidden layers of 4 and 2 neurons: 3 inputs, 2 classes."""
    first, second = (Span(0, 0, 4),), (Span(1, 0, 2),)
    tensors = (
        TensorSpec("a.weight", (4, 3), "weight", "a", (first, ())),
        TensorSpec("a.bias", (4,), "bias", "a", (first,)),
        TensorSpec("b.weight", (2, 4), "weight", "b", (second, first)),
        TensorSpec("c.weight", (2, 2), "weight", "c", ((), second)),
        TensorSpec("c.bias", (2,), "bias", "c", ((),)),
    )
    return ModelSpec("deep", tensors, (4, 2), (3,), 2)


def layered(*values):
    """Weights with one value in each of the layers a, n and b."""
    weights = np.zeros(SPEC.size, np.float32)
    for where, value in zip(SPEC.layers.values(), values, strict=True):
        weights[where] = value
    return weights


def mask_of(*layers):
    return Layers(layers).mask(SPEC)


def work(method, device, task, trainer):
    return method.work(device, task, trainer, Budget(), KEY.child("work"))


# --- pFedLA


def random_network(layers=2, devices=3):
    network = Hypernetwork.drawn(8, 12, layers, KEY)
    heads = KEY.child("heads").uniform(layers * devices * 13).reshape(layers, devices, 13) - 0.5
    return replace(network, heads=heads)


def test_a_hypernetworks_step_is_the_gradient_by_finite_differences():
    network, gradient = random_network(), KEY.child("g").uniform(6).reshape(2, 3)
    stepped = network.stepped(gradient, 1.0)

    def loss(**changed):
        return float((gradient * replace(network, **changed).shares()).sum())

    def difference(values, rebuilt):
        slopes = np.zeros(values.size)
        for at in range(values.size):
            moved = np.zeros(values.size)
            moved[at] = 1e-6
            up, down = (values + sign * moved.reshape(values.shape) for sign in (1, -1))
            slopes[at] = (loss(**rebuilt(up)) - loss(**rebuilt(down))) / 2e-6
        return slopes.reshape(values.shape)

    def hidden(at):
        return lambda values: {"hidden": (*network.hidden[:at], values, *network.hidden[at + 1 :])}

    parts = [
        (network.embedding, stepped.embedding, lambda values: {"embedding": values}),
        (network.heads, stepped.heads, lambda values: {"heads": values}),
        *((network.hidden[at], stepped.hidden[at], hidden(at)) for at in range(len(network.hidden))),
    ]
    for before, after, rebuilt in parts:
        wanted = difference(before, rebuilt)
        np.testing.assert_allclose(before - after, wanted, rtol=1e-5, atol=1e-9)
        assert np.abs(wanted).max() > 1e-4


def test_shares_are_equal_at_first_and_a_newcomer_scores_nothing():
    fresh = Hypernetwork.drawn(4, 5, 2, KEY).knowing(4)
    assert fresh.shares() == pytest.approx(np.full((2, 4), 0.25))
    heads = np.zeros((1, 2, 6))
    heads[0, :, -1] = np.log([2, 3])  # the constant input alone
    grown = replace(fresh, heads=heads).knowing(3)
    assert grown.shares() == pytest.approx(np.array([[2, 3, 1]]) / 6)


def heard(method, **models):
    """The coordinator after these devices sent these models."""
    state, _ = method.plan(method.init_coordinator(layered(0, 0, 0)), Round(1, tuple(models)), KEY)
    updates = [(name, pfedla.Update(Patch.of(model, Everything(), SPEC))) for name, model in models.items()]
    return method.aggregate(state, updates)


def scored(state, device, scores):
    """The state with these scores, shape (layers, devices), in the device's hypernetwork."""
    network = state.networks[device].knowing(len(state.devices))
    heads = np.zeros_like(network.heads)
    heads[:, :, -1] = scores
    return replace(state, networks={**state.networks, device: replace(network, heads=heads)})


def test_pfedla_mixes_each_layer_by_its_own_shares():
    method = PFedLA(SPEC)
    state = heard(method, a=layered(1, 2, 3), b=layered(5, 6, 7))
    state = scored(state, "a", np.log([[3, 1], [1, 1], [1, 3]]))
    state, tasks = method.plan(state, Round(2, ("a", "late")), KEY)
    mixed = tasks["a"].patch.apply(layered(0, 0, 0), SPEC)
    np.testing.assert_allclose(mixed, layered(2, 4, 6), rtol=1e-6)
    newcomer = tasks["late"].patch.apply(layered(0, 0, 0), SPEC)
    np.testing.assert_allclose(newcomer, layered(3, 4, 5), rtol=1e-6)
    np.testing.assert_allclose(method.shared_model(state), layered(3, 4, 5), rtol=1e-6)


def test_pfedla_learns_from_how_training_moved_what_it_mixed():
    """w = (3, 4, 5); back come (4, 4, 4), so that layer a goes towards b, n to nobody, b towards a."""
    method = PFedLA(SPEC, rate=0.001, hidden=1, embedding=1)
    state = heard(method, a=layered(1, 2, 3), b=layered(5, 6, 7))
    state, _ = method.plan(state, Round(2, ("a",)), KEY)
    update = pfedla.Update(Patch.of(layered(4, 4, 4), Everything(), SPEC))
    after = method.aggregate(state, [("a", update)])
    constant = after.networks["a"].heads[:, :, -1]
    sizes = [where.stop - where.start for where in SPEC.layers.values()]
    # -score = share * (g_j - mean g), g_j = -theta_j * moved * size: of b 1/2 * (5 - 3) * moved * size
    moves = 0.001 * np.array([1, 0, -1]) * sizes
    np.testing.assert_allclose(constant, np.stack([-moves, moves], axis=1), rtol=1e-5)
    assert np.array_equal(after.latest["a"], layered(4, 4, 4))
    assert after.networks["b"] is state.networks["b"]


@pytest.mark.parametrize(("kept", "sent"), [(1, ("a", "b")), (2, ("a",)), (3, ()), (9, ())])
def test_heurpfedla_leaves_a_device_the_layers_it_weighs_most(kept, sent):
    method = PFedLA(SPEC, kept_layers=kept, rate=0.1)
    state = heard(method, a=layered(1, 2, 3), b=layered(5, 6, 7))
    state = scored(state, "a", [[0, 0], [1, 0], [0, 0]])  # of a and b, which are equal, the later is kept
    state, tasks = method.plan(state, Round(2, ("a", "late")), KEY)
    assert tasks["a"].patch.selection == Layers(sent)
    assert tasks["late"].patch.selection == Layers(("a", "n", "b"))
    update = pfedla.Update(Patch.of(layered(9, 9, 9), Everything(), SPEC))
    heads = [kind.networks["a"].heads for kind in (state, method.aggregate(state, [("a", update)]))]
    changed = [name for at, name in enumerate(SPEC.layers) if not np.array_equal(heads[0][at], heads[1][at])]
    assert changed == list(sent)


def test_pfedla_finds_who_is_alike():
    """Two pairs of devices with the same target each: after 30 rounds the partner weighs more than others."""
    method = PFedLA(SPEC, rate=0.3)
    trainers = {"a": "x", "b": "x", "c": "y", "d": "y"}
    state = method.init_coordinator(layered(0, 0, 0))
    devices = {name: method.init_device(layered(0, 0, 0)) for name in trainers}
    for number in range(1, 31):
        state, tasks = method.plan(state, Round(number, tuple(trainers)), KEY.child(number))
        updates = []
        for name, target in trainers.items():
            devices[name], update = work(method, devices[name], tasks[name], PullToTarget(SPEC, target))
            updates.append((name, update))
        state = method.aggregate(state, updates)
    for name, (partner, strangers) in {"a": ("b", "cd"), "d": ("c", "ab")}.items():
        shares = state.networks[name].shares().mean(axis=0)
        of = dict(zip(state.devices, shares, strict=True))
        assert of[partner] > 1.2 * max(of[stranger] for stranger in strangers)


# --- CD2-pFed


def test_cd2_entries_belong_to_their_output_neuron():
    """Half of 4 and 2 neurons: rows of a and b, of the last layer the columns, and its bias."""
    spec = deep_spec()
    shared = shared_entries(spec, 0.5).mask(spec).astype(int)
    views = {tensor.name: view.tolist() for tensor, view in spec.views(shared)}
    assert views == {
        "a.weight": [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]],
        "a.bias": [1, 1, 0, 0],
        "b.weight": [[1, 1, 1, 1], [0, 0, 0, 0]],
        "c.weight": [[1, 0], [1, 0]],
        "c.bias": [1, 1],
    }
    assert shared_entries(spec, 0).mask(spec).all()
    assert shared_entries(spec, 0.99).mask(spec).sum() == 3 + 1 + 4 + 2 + 2  # one neuron of each layer


def test_cd2_private_share_grows_linearly():
    growing = CD2pFed(SPEC, private_share=0.8, growth_rounds=4)
    assert [growing.private_at(n) for n in (1, 2, 3, 4, 5, 99)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert CD2pFed(SPEC, private_share=0.8, growth_rounds=0).private_at(1) == 0.8


def cd2_round(weights, number, **settings):
    """Own weights, task and recorded fits of a device's round."""
    method = CD2pFed(SPEC, private_share=0.5, growth_rounds=2, **settings)
    state = method.init_coordinator(weights)
    _, tasks = method.plan(state, Round(number, ("d",)), KEY)
    own, trainer = np.where(PARAMETERS, weights + np.float32(1), weights), Recorder()
    device, update = work(method, method.init_device(own), tasks["d"], trainer)
    return own, device, update, trainer


def test_cd2_parts_teach_each_other_in_turn_before_the_whole_is_trained(weights):
    settings = {"strength": 0.6, "temperature": 2.0, "distillation_epochs": 3}
    own, device, update, trainer = cd2_round(weights, 3, **settings)
    shared = shared_entries(SPEC, 0.5).mask(SPEC)
    private = PARAMETERS & ~shared
    assert 0 < private.sum() < shared.sum()
    (first, one, after), (second, other, later), (whole, last, end) = trainer.fits
    start = np.where(shared, weights, own)
    assert np.array_equal(first, cut(start, shared, SPEC))
    assert np.array_equal(one.loss_term.teacher, cut(start, private, SPEC))
    assert np.array_equal(second, cut(start, private, SPEC))
    assert np.array_equal(other.loss_term.teacher, np.where(shared, after, cut(start, shared, SPEC)))
    for plan, part in ((one, shared), (other, private)):
        assert np.array_equal(plan.trainable, part)
        assert (plan.loss_term.strength, plan.loss_term.temperature, plan.epochs) == (0.3, 2.0, 3)
    assert np.array_equal(whole, np.select([shared, private], [after, later], own))
    assert (last.trainable, last.loss_term, last.epochs) == (None, None, None)
    assert np.array_equal(device.weights, end)
    assert np.array_equal(update.patch.values, end[shared])


@pytest.mark.parametrize(("number", "settings"), [(1, {}), (3, {"strength": 0})])
def test_cd2_only_trains_where_nothing_is_private_or_to_be_taught(weights, number, settings):
    _, device, update, trainer = cd2_round(weights, number, **settings)
    assert len(trainer.fits) == 1
    assert update.patch.selection.count(SPEC) == (
        SPEC.num_parameters if number == 1 else 3 * 4 + 3 + 3 + 9 + 3
    )
    assert np.array_equal(device.weights, trainer.fits[0][2])


# --- PerFedMask


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
