"""What no other test noticed when a rival method was changed on purpose."""

import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.helpers.exact_rounds import SPEC, Exact, Fleet

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.protocols.errors import SettingError, TrainingDiverged
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import create
from fleetune.protocols.methods.clusterfl import k_means
from fleetune.protocols.methods.fedamp import cosine_attention
from fleetune.protocols.methods.lotteryfl import prune
from fleetune.protocols.methods.perfedmask import improve
from fleetune.protocols.methods.pfedla import Hypernetwork
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

LARGEST = np.float32(3e38)


def test_cosines_below_0_are_shared_out_alike():
    own, other = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
    assert cosine_attention(own, [other, other], self_share=0.4, sigma=3.0) == pytest.approx([0.3, 0.3])


def test_the_sharpest_cosine_attention_is_for_the_nearest_alone():
    own, others = np.array([1.0, 0.0]), [np.array([-1.0, 0.0]), np.array([1.0, 1.0])]
    assert cosine_attention(own, others, self_share=0.4, sigma=1000.0) == pytest.approx([0, 0.6])


def test_a_model_of_zeros_has_the_cosine_0():
    own, others = np.array([1.0, 0.0]), [np.zeros(2), np.array([0.0, 1.0])]
    assert cosine_attention(own, others, self_share=0.4, sigma=3.0) == pytest.approx([0.3, 0.3])


def test_fedamps_pull_is_finite_with_2_alpha():
    with pytest.raises(SettingError, match="infinite"):
        create("fedamp", tiny_spec(), {"alpha": 1e-300, "pull": 4.5e8})


def test_k_means_puts_each_point_to_the_nearest_centre():
    points = np.array([[0.0], [4.0], [10.0]])
    assert k_means(points @ points.T, 2).tolist() == [1, 1, 0]
    assert k_means((points + 5) @ (points + 5).T, 2).tolist() == [1, 1, 0]


def test_clusterfl_groups_whose_moves_are_partly_beyond_float32():
    method = create("clusterfl", SPEC, {"num_groups": 3})
    models = {
        name: np.full(SPEC.size, size, np.float32)
        for name, size in {"a": 0, "b": 1, "c": LARGEST, "d": -LARGEST}.items()
    }
    state = method.init_coordinator(np.zeros(SPEC.size, np.float32))
    updates = [(name, method.update_type(Patch.of(one, Everything(), SPEC))) for name, one in models.items()]
    groups = method.aggregate(state, updates).groups
    assert groups["a"] == groups["b"]
    assert len(set(groups.values())) == 3


def test_lotteryfl_rounds_down_what_it_prunes():
    spec = tiny_spec(6)  # 24 and 18 weights
    weights = np.arange(spec.size, dtype=np.float32) + 1
    kept = prune(np.ones(spec.size, dtype=bool), weights, spec, 0.33)
    assert int((~kept).sum()) == 7 + 5


def test_per_fedavg_counts_four_gradients_of_an_exact_step():
    few, many = (
        create("per-fedavg", tiny_spec(), {"approximation": "hessian-free", "steps": steps}).extra_epochs
        for steps in (2, 5)
    )
    assert many - few == pytest.approx(3 * 4)


@pytest.mark.parametrize("part", ["shared", "personal"])
def test_per_fedavg_refuses_a_model_of_which_an_entry_is_infinite(part):
    class Breaking(Exact):
        def gradient(self, weights, rows=None):
            gradient = super().gradient(weights, rows)
            if (rows is None) == (part == "personal"):
                gradient[0] = np.inf
            return gradient

    fleet = Fleet("per-fedavg", {"adaptation_rate": 0.0} if part == "shared" else {})
    fleet.trainer["a"] = Breaking("a")
    with np.errstate(invalid="ignore"), pytest.raises(TrainingDiverged, match="meta_rate"):
        fleet.round()


def test_perfedmasks_search_exchanges_a_layer_for_another():
    sizes = np.array([4, 4])
    masks = np.array([[True, False], [False, True]])
    assert improve(masks, {1: 4.0}, sizes).tolist() == [[True, False], [True, False]]


def test_perfedmasks_search_knows_sums_that_leave_no_room_for_a_tolerance():
    sizes = np.array([4, 4]) * 10**12
    masks = np.array([[True, False], [False, True]])
    assert improve(masks, {1: 4e12}, sizes).tolist() == [[True, False], [True, False]]


def test_perfedmask_sends_at_least_the_smallest_layer_and_at_most_its_ratio():
    spec, _ = draw("cnn-kapc", (1, 28, 28), 10, Key.of("survivors"))
    method = create("perfedmask", spec, {})
    sizes = [layers.count(spec) for layers in method.maskable]
    body, smallest = sum(sizes), min(sizes)
    assert len(sizes) > 1
    for choice in method.choices(DeviceReport("d")):
        assert choice.cost.bytes_up == estimate_bytes(max(int(choice.ratio * body + 1e-6), smallest))


def network(hidden, heads):
    return Hypernetwork(np.ones(1), (np.asarray(hidden, float),), np.asarray(heads, float))


def test_a_hypernetwork_with_an_infinite_number_is_broken_whatever_its_shares():
    broken = network([[-np.inf, 0], [1, 0]], [[[1, 1, 0], [2, 1, 0]]])
    assert np.isfinite(broken.shares()).all()
    assert not broken.is_finite
    assert network([[-1, 0], [1, 0]], broken.heads).is_finite


@pytest.mark.parametrize("height", [-1000.0, 0.0, 1000.0])
def test_shares_of_layers_do_not_depend_on_how_high_the_scores_are(height):
    found = network([[1, 0]], [[[0, height], [0, height]]]).shares()
    assert found == pytest.approx(np.array([[0.5, 0.5]]))


def test_fedcac_sends_a_bit_for_each_parameter_beside_the_model():
    spec = tiny_spec(4000)
    [choice] = create("fedcac", spec, {}).choices(DeviceReport("d"))
    marks = spec.num_parameters // 8
    assert choice.cost.bytes_up - choice.cost.bytes_down == marks
