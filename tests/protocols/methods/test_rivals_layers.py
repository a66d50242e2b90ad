"""The rivals that mix or split layers: pFedLA and CD2-pFed, against worked numbers."""

from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.submodels import cut
from fleetune.protocols.methods import pfedla
from fleetune.protocols.methods.cd2_pfed import CD2pFed, shared_entries
from fleetune.protocols.methods.pfedla import Hypernetwork, PFedLA
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
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
    fresh = Hypernetwork.drawn(4, 5, 2, KEY).with_devices(4)
    assert fresh.shares() == pytest.approx(np.full((2, 4), 0.25))
    heads = np.zeros((1, 2, 6))
    heads[0, :, -1] = np.log([2, 3])  # the constant input alone
    grown = replace(fresh, heads=heads).with_devices(3)
    assert grown.shares() == pytest.approx(np.array([[2, 3, 1]]) / 6)


def heard(method, **models):
    """The coordinator after these devices sent these models."""
    state, _ = method.plan(method.init_coordinator(layered(0, 0, 0)), Round(1, tuple(models)), KEY)
    updates = [(name, pfedla.Update(Patch.of(model, Everything(), SPEC))) for name, model in models.items()]
    return method.aggregate(state, updates)


def scored(state, device, scores):
    """The state with these scores, shape (layers, devices), in the device's hypernetwork."""
    network = state.networks[device].with_devices(len(state.devices))
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
    method = PFedLA(SPEC, local_layers=kept, rate=0.1)
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


def test_pfedla_tells_how_much_of_each_layer_is_the_devices_own():
    method = PFedLA(SPEC)
    assert method.diagnose_round(method.init_coordinator(layered(0, 0, 0))) == {}
    state = heard(method, a=layered(1, 2, 3), b=layered(5, 6, 7))
    assert method.diagnose_round(state)["own_share"] == pytest.approx({"a": 0.5, "n": 0.5, "b": 0.5})
    state = scored(state, "a", np.log([[3, 1], [1, 1], [1, 3]]))
    state = scored(state, "b", np.log([[3, 1], [1, 4], [1, 1]]))
    wanted = {"a": (3 / 4 + 1 / 4) / 2, "n": (1 / 2 + 4 / 5) / 2, "b": (1 / 4 + 1 / 2) / 2}
    assert method.diagnose_round(state)["own_share"] == pytest.approx(wanted)


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


def test_cd2_tells_the_share_that_stays_private_and_grows_until_the_runs_last_round(weights):
    spec = deep_spec()
    half = CD2pFed(spec, private_share=0.5, growth_rounds=0)
    sent = Update(Patch.of(np.zeros(spec.size, np.float32), shared_entries(spec, 0.5), spec), 10)
    assert half.diagnose_update(sent) == {"private_share": pytest.approx(1 - (6 + 2 + 4 + 2 + 2) / 30)}
    assert CD2pFed.defaults_of_run(37) == {"growth_rounds": 37}
