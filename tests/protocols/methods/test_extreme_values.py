"""Numbers at the edges of float32, through whole rounds of every method: a device declines by name, or what
it sends is finite; what a coordinator makes of that is finite, always.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.every_method import SETTINGS
from tests.helpers.nightly import of_methods

from fleetune.edge_agent.run.session import Session
from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.finite import check_finite, not_finite
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import create
from fleetune.protocols.methods.clusterfl import k_means
from fleetune.protocols.methods.dcpfl.discrepancy import discrepancy, scale
from fleetune.protocols.methods.fedamp import attention, cosine_attention
from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply, run_key

SPEC = tiny_spec()
DEVICES = ("d0", "d1", "d2")
LARGEST = np.finfo(np.float32).max
EDGES = np.array([0, 1e-45, -1e-45, 1, -1, 1e19, -1e19, 1e38, -1e38, LARGEST, -LARGEST], np.float32)


def weights_of(kind):
    """A vector of one number, of two in turn, or of any of the edges (a seed)."""
    if isinstance(kind, int):
        return EDGES[(Key(kind).uniform(SPEC.size) * EDGES.size).astype(int)]
    return np.resize(np.asarray(kind, np.float32), SPEC.size)


class OnTheEdge(PullToTarget):
    """A trainer whose weights after training are finite, as every trainer's; all else may be anything."""

    def __init__(self, name, told):
        kind, self.said, self.slope, num_samples = told
        super().__init__(SPEC, name, num_samples)
        self.after = weights_of(kind)

    def fit(self, weights, plan, key):
        after = self.after if plan.trainable is None else np.where(plan.trainable, self.after, weights)
        after[SPEC.num_parameters :] = weights[SPEC.num_parameters :]
        return Fit(after.copy(), 0.5, 1, self.gradient(weights) if plan.keep_last_gradient else None)

    def loss(self, weights, part="train", rows=None):
        return self.said

    def batches(self, key):
        return [np.arange(2)] * min(3, self.num_samples)

    def gradient(self, weights, rows=None):
        return weights_of([self.slope, -1])

    def accuracy(self, weights, part="test"):
        return 0.9


class Box:
    plain = False

    def __init__(self):
        self.data = None

    def read(self):
        return self.data

    def write(self, data):
        self.data = data


def session(name, options, weights, device, told, memory):
    enrolment = Enrolment(
        "r", 0, SPEC, {"name": name, **options}, TrainingSection(), 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, weights
    )
    method = create(name, SPEC, options)
    return Session(enrolment, device, method, OnTheEdge(device, told), memory)


edges = st.sampled_from([float(edge) for edge in EDGES])
kinds = st.lists(edges, min_size=1, max_size=2) | st.integers(0, 20)
numbers = st.sampled_from([0.0, 1e-45, 2.3, 1e29, 1e31, 3e38, 1e300, float("inf"), float("nan")])
told = st.tuples(kinds, numbers, numbers, st.sampled_from([0, 1, 10, 2**40]))
rounds = st.lists(st.dictionaries(st.sampled_from(DEVICES), told, min_size=1), min_size=3, max_size=4)


def play(name, options, initial, story):
    """A run; each round is what its participants' trainers say. Returns why tasks were declined."""
    method, weights = create(name, SPEC, options), weights_of(initial)
    state, declined = method.init_coordinator(weights), []
    for device in DEVICES:
        state = method.admit(state, DeviceReport(device, ratio=0.5))
    memories = {device: Box() for device in DEVICES}
    for number, trainers in enumerate(story, start=1):
        participants = tuple(sorted(trainers))
        state, tasks = method.plan(state, Round(number, participants), run_key(0).child("plan", number, 1))
        updates = {}
        for device in participants:
            assert not_finite(tasks[device], "task") is None
            assignment = codec.encode(Assignment(device, number, 1, False, tasks[device]), SPEC)
            here = session(name, options, weights, device, trainers[device], memories[device])
            before = memories[device].data
            try:
                reply = here.reply(assignment, Budget())
            except ModelError as problem:
                declined.append(str(problem))
                assert memories[device].data == before
                continue
            assert not_finite(here.personal_model, "model") is None
            updates[device] = codec.decode(reply, Reply[method.update_type], SPEC).update
            assert not_finite(updates[device], "update") is None
        if updates:
            state = method.aggregate(state, updates.items())
        assert not_finite(state, "state") is None
        assert not_finite(method.shared_model(state), "shared") is None
    return declined


CALM = ([0.5, -0.5], 2.3, 1.0, 10)
TORN = ([float(LARGEST), -float(LARGEST)], 2.3, 1.0, 2**40)
NOWHERE = ([0.0], float("nan"), float("inf"), 0)


@pytest.mark.parametrize(
    ("name", "options"),
    of_methods(SETTINGS),
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
@settings(max_examples=12)
@given(initial=kinds, story=rounds)
@example(initial=[0.0], story=[dict.fromkeys(DEVICES, CALM)] * 3)
@example(initial=[1.0], story=[{"d0": CALM, "d1": TORN, "d2": NOWHERE}] * 4)
@example(initial=[1.0], story=[dict.fromkeys(DEVICES, TORN), {"d1": TORN}, dict.fromkeys(DEVICES, NOWHERE)])
def test_nothing_that_travels_or_is_kept_is_ever_infinite(name, options, initial, story):
    play(name, options, initial, story)


@pytest.mark.parametrize(
    ("name", "options", "told", "line"),
    [
        ("fedspu", {"early_stopping": True}, NOWHERE, "fedspu: the loss that early stopping goes by is not"),
        ("srp-pfed", {}, NOWHERE, "srp-pfed: the training loss before training is nan"),
        ("srp-pfed", {}, ([0.0], 1e31, 1.0, 5), "srp-pfed: the training loss before training is 1e+31"),
        ("dc-pfl", {}, NOWHERE, "dc-pfl: the training loss before training is nan"),
        ("dc-pfl", {}, ([0.0], 3e38, 1.0, 5), "dc-pfl: the training loss before training is 3e+38"),
        ("prunefl", {}, NOWHERE, "PruneFL: the neurons' importance is not finite"),
        ("fedpurin", {}, NOWHERE, "fedpurin: the score |gradient * weight| is not finite"),
        ("per-fedavg", {}, NOWHERE, "training diverged: lower method.meta_rate"),
        ("fedavg", {}, ([float("nan")], 2.3, 1.0, 5), "method fedavg: update.patch.values is not finite"),
        ("local-only", {}, ([float("nan")], 2.3, 1.0, 5), "method local-only: state.weights is not finite"),
    ],
)
def test_a_device_declines_by_method_and_step(name, options, told, line):
    [why] = play(name, options, [0.5, -0.25], [{"d0": told}])
    assert why.startswith(line)
    assert "\n" not in why


def test_where_a_number_is_not_finite():
    inner = {"a": (np.ones(2), [0.0, {"b": np.array([1, np.inf])}])}
    assert not_finite(inner, "state") == "state[a][1][1][b]"
    assert not_finite({"a": (np.ones(2), "text", None, 2**70)}, "state") is None
    assert not_finite(Fit(np.ones(2, np.float32), float("nan"), 1), "fit") == "fit.loss"
    check_finite([0.0, 1e308], "all")
    with pytest.raises(ModelError, match=r"^x: y is not finite: lower training.learning_rate$"):
        check_finite([0.0, np.nan], "x: y")


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        ([1, np.inf, 3], [0.25, 0, 0.75]),
        ([np.inf, np.inf, np.inf], [1 / 3] * 3),
        ([-1, np.inf, 0], [1 / 3] * 3),
        ([np.nan, 1, 1], [0, 0.5, 0.5]),
        ([1e308, 1e308, 0], [1 / 3] * 3),
        ([5e-324, 0, 0], [1, 0, 0]),
    ],
)
def test_an_infinite_share_counts_as_none(row, shares):
    assert relationship_cube.normalise(np.array([[row, [1, 1, 2]]], float)) == pytest.approx(
        np.array([[shares, [0.25, 0.25, 0.5]]])
    )


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        ([1e17, 1e17 - 64, 0], [1, 0, 0]),
        ([1e308, 1e308, -1e308], [0.5, 0.5, 0]),
        ([0.75, np.inf, 0.25], [0.75, 0, 0.25]),
        ([np.nan] * 3, [1 / 3] * 3),
        ([0.5, 0.25, 0.0], [7 / 12, 1 / 3, 1 / 12]),
    ],
)
def test_a_row_of_any_size_is_projected_to_shares(row, shares):
    assert relationship_cube.project_simplex(np.array([[row]], float)) == pytest.approx(np.array([[shares]]))


@pytest.mark.parametrize("uploaded", [1, 2, 3])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("distance", [0.0, 1.0])
def test_a_layer_of_zeros_never_satisfies_the_criterion(uploaded, layer, distance):
    """B = 0: the left side divides by it. NaN is no verdict."""
    norms, distances, now = np.ones(3), np.ones(3), (np.ones(3), np.ones(3))
    norms[layer], distances[layer] = 0, distance
    for partial in ((norms, distances), now):
        sides = bls.criterion(uploaded, (norms, distances), partial, [2] * 3, [2] * 3, 2)
        assert sides == (np.inf, np.inf, False)


def test_a_model_as_wide_as_float32_is_scaled_like_any_other():
    torn = weights_of([float(LARGEST), -float(LARGEST), 0.0])[:6]
    assert scale(torn).tolist() == [1, 0, 0.5, 1, 0, 0.5]
    assert discrepancy([torn, np.float32([1, 0, 0.5, 1, 0, 0.5])])[0, 1] == 0


def test_likeness_of_large_models_is_that_of_small_ones():
    small = [np.float32([1, 2, -3]), np.float32([2, 2, 1]), np.float32([-1, 0, 3])]
    own, *others = (one * np.float32(1e38) for one in small)
    assert cosine_attention(own, others, 0.5, 3.0) == pytest.approx(
        cosine_attention(small[0], small[1:], 0.5, 3.0)
    )
    assert attention(own, [own, others[0]], 1.0, 10.0).tolist() == [0.1, 0]


def _groups(method, initial, models):
    """Of ClusterFL, when it heard these models."""
    updates = [(device, method.update_type(_whole(model))) for device, model in models.items()]
    return method.aggregate(method.init_coordinator(initial), updates).groups


def test_groups_of_large_models_are_those_of_small_ones():
    method = create("clusterfl", SPEC, {"num_groups": 2})
    small = {f"d{i}": weights_of([value, -value]) for i, value in enumerate((1.0, 0.9, -1.0, -0.9))}
    large = {name: one * np.float32(3e38) for name, one in small.items()}
    start = weights_of([-0.4]) * np.float32(1e38)
    groups = [_groups(method, *heard) for heard in ((start, large), (weights_of([-0.1]), small))]
    assert groups[0] == groups[1]
    assert len(set(groups[0].values())) == 2
    assert k_means(np.zeros((3, 3)), 2).tolist() == [0, 0, 0]


def test_a_hypernetwork_keeps_its_place_where_a_step_leaves_the_range_of_numbers():
    method = create("pfedla", SPEC, {})
    state = method.init_coordinator(weights_of([0.5]))
    for number in (1, 2):
        state, _ = method.plan(state, Round(number, DEVICES[:2]), Key(number))
        before = state
        torn = {"d0": weights_of([LARGEST, -LARGEST]), "d1": weights_of([-LARGEST, LARGEST])}
        updates = [(device, method.update_type(_whole(torn[device]))) for device in DEVICES[:2]]
        state = method.aggregate(state, updates)
    assert np.array_equal(state.networks["d0"].hidden[0], before.networks["d0"].hidden[0])
    assert np.array_equal(state.networks["d0"].embedding, before.networks["d0"].embedding)


def _whole(weights):
    return Patch.of(weights, Everything(), SPEC)


@pytest.mark.parametrize(
    "options", [{"sigma": 1e-300, "alpha": 1e10}, {"alpha": 1e-308, "pull": 10.0}, {"sigma": 5e-324}]
)
def test_fedamp_refuses_settings_beyond_the_range_of_numbers(options):
    with pytest.raises(SettingError, match=r"method\.alpha: "):
        create("fedamp", SPEC, options)
