"""KAPC's and BLS's mechanisms act: R moves, BLS leaves layers out both ways, ratios bound what travels."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create, with_defaults_of_run
from fleetune.protocols.methods.kapc import relationship_cube
from fleetune.protocols.methods.kapc.kapc import KAPC, THEOREM_RATE, KAPCwithBLS, ServerState, Update
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

SPEC = tiny_spec()
KEY = Key.of("acts")
TENSORS = tuple(TensorSpec(f"{i}.weight", (40, 40), "weight", f"{i}", ((), ())) for i in range(4))
CHAIN = ModelSpec("chain", TENSORS, (), (40,), 40)
FOUR = ("d0", "d1", "d2", "d3")
START = np.full(CHAIN.size, np.float32(0.5))


def own(device, spec=CHAIN):
    return Key.of("own", device).uniform(spec.size).astype(np.float32) - np.float32(0.5)


def known(method, ratios):
    state = method.init_coordinator(START)
    for device, ratio in ratios.items():
        state = method.admit(state, DeviceReport(device, ratio=ratio))
    return state


def plan(method, state, participants=FOUR, number=1):
    return method.plan(state, Round(number, participants), KEY)


def heard(method, state, devices, layers=range(4)):
    names = Layers(tuple(str(layer) for layer in layers))
    return method.aggregate(
        state, [(device, Update(Patch.of(own(device), names, CHAIN))) for device in devices]
    )


def stepped(copies, *, per_layer, rate=0.3, **settings):
    """The shares after one step from equal ones, of one layer: shape (N, N)."""
    cube = np.full((len(copies), 1, len(copies)), 1 / len(copies))
    grams = [relationship_cube.gram(list(copies), centred=per_layer)]
    chosen = {"coaching": 1.0, "equal_sharing": 0.0, **settings}
    return relationship_cube.descend(cube, grams, rate=rate, per_layer=per_layer, **chosen)[:, 0]


def models(num_devices, size=500):
    return Key(7).uniform(num_devices * size).reshape(num_devices, size) - 0.5


# The step


@pytest.mark.parametrize(
    "other",
    [lambda w: 1000 * w, lambda w: w / 1000, lambda w: w + 3.0, lambda w: np.tile(w, 40)],
    ids=["large", "small", "common", "long"],
)
def test_a_step_per_layer_knows_no_scale_and_a_plain_one_does(other):
    small = models(5)
    assert stepped(other(small), per_layer=True) == pytest.approx(stepped(small, per_layer=True), abs=1e-9)
    assert stepped(other(small), per_layer=False) != pytest.approx(stepped(small, per_layer=False), abs=1e-3)


@pytest.mark.parametrize("num_devices", [2, 10, 300])
def test_devices_that_have_nothing_in_common_go_the_share_eta_of_the_way_to_themselves(num_devices):
    """With orthogonal differences the curvature is the same all ways: theorem 1's step is Newton's."""
    shares = stepped(np.eye(num_devices) + 5, per_layer=True, rate=0.3)
    wanted = 0.7 / num_devices + 0.3 * np.eye(num_devices)
    assert shares == pytest.approx(wanted, abs=1e-9)


def test_no_direction_is_stepped_over_however_alike_some_devices_are():
    twins = np.repeat(models(3), 100, axis=0) + models(300) / 100
    shares = stepped(twins, per_layer=True, rate=1.0)
    before, after = (
        np.linalg.norm(rows @ twins - twins, axis=1) for rows in (np.full((300, 300), 1 / 300), shares)
    )
    assert (after <= before + 1e-9).all()
    assert shares[0, :100].sum() > 0.9, "whoever is alike comes to coach each other in one step"


def test_layers_that_are_all_alike_stay_shared_equally():
    alike = np.tile(own("d0").astype(np.float32), (3, 1))
    for penalty in (0.0, 0.5):
        assert np.array_equal(stepped(alike, per_layer=True, equal_sharing=penalty), np.full((3, 3), 1 / 3))


def test_equal_sharing_holds_a_layer_back_by_how_little_it_differs():
    plain, held = (stepped(models(5), per_layer=True, equal_sharing=penalty) for penalty in (0, 50))
    assert (np.diag(held) > 1 / 5 + 0.01).all()
    assert (np.diag(held) < np.diag(plain) - 0.01).all()


def own_share(settings, rounds=6):
    """The mean r_ii after some rounds of devices that keep their own layers."""
    method = KAPC(CHAIN, **settings)
    state = heard(method, known(method, dict.fromkeys(FOUR, 1.0)), FOUR)
    for number in range(1, rounds + 1):
        state, _ = plan(method, state, number=number)
    return np.mean([state.cube[i, :, i] for i in range(4)])


def test_eta_decides_how_far_r_goes_and_zero_stops_it():
    for step in ("plain", "per-layer"):
        assert own_share({"step": step, "relation_rate": 0.0}) == pytest.approx(1 / 4)
    rates = (0.02, 0.1, 0.5)
    shares = [own_share({"step": "per-layer", "relation_rate": rate}) for rate in rates]
    assert shares == sorted(shares)
    assert shares[0] > 0.3
    assert shares[-1] > 0.95


def test_a_rate_that_is_not_given_is_the_steps_own():
    assert own_share({}) == own_share({"relation_rate": 0.01})
    assert own_share({"step": "per-layer"}) == own_share({"step": "per-layer", "relation_rate": THEOREM_RATE})


def test_new_runs_step_per_layer_and_those_of_before_go_on_with_plain_steps():
    for name in ("kapc", "kapc-bls"):
        assert create(name, CHAIN, {}).step == "plain"
        assert with_defaults_of_run({"name": name}, 10)["step"] == "per-layer"
        assert with_defaults_of_run({"name": name, "step": "plain"}, 10)["step"] == "plain"


# BLS both ways


def test_bls_leaves_out_layers_both_ways_as_own_shares_grow():
    """From theorem 1's steps r_ii passes mu; at mu = 1 nothing is left out for that."""
    for threshold, down in ((0.7, [3, 0]), (1.0, [3, 3])):
        method = KAPCwithBLS(CHAIN, step="per-layer", relation_rate=1.0, self_threshold=threshold)
        state = heard(method, known(method, dict.fromkeys(FOUR, 1.0)), FOUR, range(3))
        first = method.diagnose_round(plan(KAPCwithBLS(CHAIN, relation_rate=0.0), state)[0])
        state, tasks = plan(method, state)
        seen = method.diagnose_round(state)
        assert [first["layers_down"], seen["layers_down"]] == down
        assert seen["self_taught"] == (0.75 if threshold < 1 else 0)
        assert seen["entries_down"] == pytest.approx(down[1] / 4)
        assert [len(tasks[device].patch.selection.names) for device in FOUR] == [down[1]] * 4
        _, update = method.work(
            method.init_device(START), tasks["d0"], PullToTarget(CHAIN, "d0"), Budget(), KEY
        )
        assert method.diagnose_update(update) == {"layers_up": 3, "entries_up": 0.75}


def test_what_is_told_is_what_was_sent():
    method = KAPCwithBLS(CHAIN, step="per-layer", relation_rate=0.1, self_threshold=0.5, downlink="share")
    assert method.diagnose_round(known(method, {})) == {}
    state = heard(method, known(method, dict(zip(FOUR, (0.25, 0.5, 1.0, 1.0), strict=True))), FOUR)
    for number in (1, 2, 3):
        state, tasks = plan(method, state, number=number)
    seen = method.diagnose_round(state)
    assert set(seen) == {diagnostic.name for diagnostic in method.diagnostics if diagnostic.of == "round"}
    sent = [len(tasks[device].patch.selection.names) for device in FOUR]
    assert seen["layers_down"] == np.mean(sent)
    assert seen["entries_down"] == np.mean([tasks[device].patch.values.size for device in FOUR]) / CHAIN.size
    shares = np.diagonal(state.cube[:, 0], axis1=0, axis2=1)
    assert seen["own_share"]["0"] == pytest.approx(shares.mean())
    assert seen["own_share_largest"]["0"] == pytest.approx(shares.max())
    exchanged = [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    pairs = [state.coached.own[i, layer] for i, layers in enumerate(exchanged) for layer in layers]
    assert seen["self_taught"] == np.mean(np.array(pairs) > 0.5)
    assert 0 < seen["self_taught"] < 1


def test_layers_that_nobody_exchanges_have_no_figure():
    method = KAPC(CHAIN, downlink="share")
    state, _ = plan(method, known(method, {"d0": 0.5, "d1": 0.25}), ("d0", "d1"))
    assert list(method.diagnose_round(state)["own_share"]) == ["0", "1"]


# Ratios


@pytest.mark.parametrize("name", ["kapc", "kapc-bls"])
def test_a_ratio_bounds_both_ways_from_the_first_visit_on_and_costs_are_what_travels(name):
    method = create(name, CHAIN, {"downlink": "share"})
    choices = method.choices(DeviceReport("d"))
    assert [choice.ratio for choice in choices] == [0.25, 0.5, 0.75, 1.0]
    for count, choice in enumerate(choices, 1):
        state = known(method, {"d0": choice.ratio, "d1": 1.0, "d2": 1.0})
        _, tasks = plan(method, state, ("d0", "d1", "d2"))
        task = tasks["d0"]
        assert task.patch.selection == Layers(tuple("0123"[:count]))
        assert len(tasks["d1"].patch.selection.names) == 4
        device = method.init_device(own("d0"))
        _, update = method.work(device, task, PullToTarget(CHAIN, "d0"), Budget(choice.ratio), KEY)
        up = min(count, 3) if name == "kapc-bls" else count  # all but one at BLS's first visit
        assert update.patch.selection == Layers(tuple("0123"[:up]))
        for message, priced in ((task, choice.cost.bytes_down), (update, choice.cost.bytes_up)):
            mixed = Patch.of(own("d0"), message.patch.selection, CHAIN)  # START alone would shrink well
            if mixed.values.size == CHAIN.layers[str(count - 1)].stop:
                assert len(codec.encode(replace(message, patch=mixed), CHAIN)) == pytest.approx(
                    priced, rel=0.1
                )


@pytest.mark.parametrize(
    ("name", "ratios", "up"), [("kapc", [1.0], 4), ("kapc-bls", [0.25, 0.5, 0.75, 1.0], 2)]
)
def test_with_the_whole_downlink_a_ratio_bounds_blss_uploads_alone(name, ratios, up):
    method, trainer = create(name, CHAIN, {}), Watching()
    choices = method.choices(DeviceReport("d"))
    assert [choice.ratio for choice in choices] == ratios
    assert len({choice.cost.bytes_down for choice in choices}) == 1
    _, tasks = plan(method, known(method, {"d0": 0.5, "d1": 1.0}), ("d0", "d1"))
    assert len(tasks["d0"].patch.selection.names) == 4
    _, update = method.work(method.init_device(START), tasks["d0"], trainer, Budget(0.5), KEY)
    assert trainer.pulled.all()
    assert len(update.patch.selection.names) == up


def test_a_layer_is_mixed_among_those_who_exchange_it():
    """A thin device's upper layers stand at the initial weights: nobody is coached by these."""
    method = KAPC(CHAIN, relation_rate=0.0, downlink="share")
    state = heard(method, known(method, {"d0": 0.5, "d1": 1.0, "d2": 1.0}), ("d1", "d2"))
    state = heard(method, state, ("d0",), range(2))
    after, tasks = plan(method, state, ("d0", "d1", "d2"))
    target = tasks["d1"].patch.apply(START, CHAIN)
    low, high = CHAIN.layers["1"], CHAIN.layers["2"]
    mean = np.mean([own(device) for device in ("d0", "d1", "d2")], axis=0)
    assert target[low] == pytest.approx(mean[low], abs=1e-6)
    mean = np.mean([own(device) for device in ("d1", "d2")], axis=0)
    assert target[high] == pytest.approx(mean[high], abs=1e-6)
    assert method.shared_model(state)[high] == pytest.approx(mean[high], abs=1e-6)
    assert np.array_equal(after.cube[0, 2:], state.related_to_all().cube[0, 2:])
    assert after.coached.reach.tolist() == [2, 4, 4]
    assert after.coached.own[0, 2:].tolist() == [1, 1]


@dataclass
class Watching(PullToTarget):
    """Notes which entries were pulled."""

    def __post_init__(self):
        PullToTarget.__init__(self, CHAIN, "watching")

    def fit(self, weights, plan, key):
        self.pulled = plan.pull.mask.copy()
        return super().fit(weights, plan, key)


@pytest.mark.parametrize("name", ["kapc", "kapc-bls"])
def test_layers_that_a_device_does_not_exchange_train_without_a_pull(name):
    """Those that it could, and that did not come, are pulled to where they were: eq. 20."""
    method, trainer = create(name, CHAIN, {"coaching": 0.5, "downlink": "share"}), Watching()
    _, tasks = plan(method, known(method, {"d0": 0.5, "d1": 1.0}), ("d0", "d1"))
    method.work(method.init_device(START), tasks["d0"], trainer, Budget(0.5), KEY)
    assert trainer.pulled.tolist() == [True] * 3200 + [False] * 3200
    method.work(method.init_device(START), tasks["d1"], trainer, Budget(), KEY)
    assert trainer.pulled.all()


def test_a_changed_ratio_counts_from_the_next_round_and_a_known_one_changes_nothing():
    method = KAPC(CHAIN, downlink="share")
    state = known(method, {"d0": 1.0, "d1": 0.5})
    assert method.admit(state, DeviceReport("d1", ratio=0.5)) is state
    state = method.admit(state, DeviceReport("d1", ratio=1.0))
    _, tasks = plan(method, state, ("d0", "d1"))
    assert len(tasks["d1"].patch.selection.names) == 4


@dataclass(frozen=True)
class OlderState:
    """As releases before ratios were stored wrote it."""

    initial: NDArray[np.float32]
    devices: tuple[str, ...]
    related: tuple[str, ...]
    cube: NDArray[np.float64]
    latest: dict[str, NDArray[np.float32]]
    uploaded: dict[str, int]


def test_a_state_of_an_older_release_goes_on_with_all_layers():
    method = KAPC(CHAIN)
    state = heard(method, known(method, dict.fromkeys(FOUR, 1.0)), FOUR)
    state, _ = plan(method, state)
    older = OlderState(*(getattr(state, field.name) for field in fields(OlderState)))
    again = codec.decode(codec.encode(older, CHAIN), ServerState, CHAIN)
    assert again.ratios == {}
    assert method.diagnose_round(again) == {}
    one, other = (plan(method, of, number=2) for of in (state, again))
    assert np.array_equal(one[0].cube, other[0].cube)
    assert np.array_equal(one[1]["d1"].patch.values, other[1]["d1"].patch.values)


def test_an_update_of_everything_is_all_layers():
    assert KAPC(SPEC).diagnose_update(Update(Patch.of(own("d", SPEC), Everything(), SPEC)))["layers_up"] == 2
