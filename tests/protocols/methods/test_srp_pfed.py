"""SRP-pFed's steps in small cases, and its rules for devices that come late or stay away."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PullToTarget, tiny_spec

from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.methods import create
from fleetune.protocols.methods.srp_pfed import (
    RatedUpdate,
    SRPpFed,
    Task,
    Update,
    choose,
    distinct,
    draw,
    increment,
    num_shared,
    probabilities,
    reinforce,
    shared_mask,
)
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

SPEC = tiny_spec()
STATS = slice(SPEC.num_parameters, SPEC.size)
PARAMETERS = slice(0, SPEC.num_parameters)


class Wells(PullToTarget):
    """Also counts what it is asked; loss by the distance of the parameters alone."""

    def __init__(self, name="d", **settings):
        super().__init__(SPEC, name, **settings)
        self.losses, self.rows = [], []

    def loss(self, weights, part="train", rows=None):
        self.rows.append(None if rows is None else rows.tolist())
        self.losses.append(float(np.mean((weights - self.target)[PARAMETERS] ** 2)))
        return self.losses[-1]


@dataclass(frozen=True)
class EarlierUpdate:
    """As agents sent it that did not say their rate."""

    patch: Patch
    num_samples: int
    loss: float


class Fleet:
    """Rounds without engine or wire."""

    def __init__(self, weights, **settings):
        self.method = SRPpFed(SPEC, **settings)
        self.state = self.method.init_coordinator(weights)
        self.devices, self.weights = {}, weights

    def round(self, number, names):
        for name in names:
            if name not in self.devices:
                self.state = self.method.admit(self.state, DeviceReport(name))
                self.devices[name] = self.method.init_device(self.weights)
        self.state, tasks = self.method.plan(self.state, Round(number, names), Key.of(number))
        replies = {}
        for name in names:
            self.devices[name], replies[name] = self.method.work(
                self.devices[name], tasks[name], Wells(name), Budget(), Key.of(number, name)
            )
        self.state = self.method.aggregate(self.state, replies.items())
        return tasks


def task(weights, *rates):
    return Task(Patch.of(weights, Everything(), SPEC), rates)


def update(weights, mask, num_samples=1, loss=1.0):
    return RatedUpdate(Patch(Entries(mask), weights[PARAMETERS][mask]), num_samples, loss)


def shared_by(reply):
    return reply.patch.selection.bitmap


@pytest.mark.parametrize(
    ("rate", "size", "expected"), [(0.5, 5, 3), (0.3, 10, 3), (0.04, 10, 1), (1.0, 7, 7), (0.99, 7, 7)]
)
def test_number_shared_is_rounded_half_up_and_never_none(rate, size, expected):
    assert num_shared(rate, size) == expected


@given(
    magnitudes=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    rate=st.floats(0.01, 1, exclude_min=False),
)
def test_the_smallest_are_shared_and_ties_go_to_the_first(magnitudes, rate):
    weights = np.array(magnitudes, np.float32)
    order = np.argsort(np.abs(weights), kind="stable")[: num_shared(rate, weights.size)]
    assert np.flatnonzero(shared_mask(weights, rate)).tolist() == sorted(order.tolist())


def test_a_rate_is_drawn_as_often_as_its_memory_says():
    u = 1 - Key.of("u").uniform(20_000)
    shares = np.bincount(draw(probabilities(np.array([1.0, 0.0, 3.0])), u), minlength=3) / u.size
    assert shares == pytest.approx([0.25, 0, 0.75], abs=0.01)


def test_the_draw_stays_inside_when_probabilities_sum_to_less_than_one():
    assert draw(np.array([0.5, 0.5 - 1e-16]), np.array([1.0, 0.5, 0.5 + 1e-9])) == [1, 0, 1]
    assert distinct([3, 0, 3]) == (3, 0)


@pytest.mark.parametrize("memory", [[0.0, 0.0], [np.inf, 1.0], [1e308, 1e308]])
def test_a_memory_that_cannot_be_normalised_is_uniform(memory):
    with np.errstate(over="ignore"):
        assert probabilities(np.array(memory)).tolist() == [0.5, 0.5]


def test_low_loss_counts_more_and_a_sum_of_losses_saturates():
    losses = [2.3] * 10
    assert increment(losses, "mean") == pytest.approx(1 - 1 / (1 + math.exp(-2.3)))
    assert increment(losses, "sum") == pytest.approx(math.exp(-23), rel=1e-6)
    assert increment([0.1], "mean") > increment([2.0], "mean")
    assert increment([1e308, 1e308], "mean") == 0.0
    assert increment([], "mean") == 0.5


def test_memory_decays_and_is_reinforced_once_for_each_rate():
    assert reinforce(np.ones(3), (1, 1, 2), 0.25, 0.5).tolist() == [0.5, 0.75, 0.75]


def test_the_least_finite_loss_wins_and_the_first_of_equals():
    assert choose([2.0, 1.0, 1.0]) == 1
    assert choose([math.nan, math.inf, 5.0]) == 2
    assert choose([math.nan, math.inf]) is None


def test_large_weights_stay_personal_and_what_was_shared_comes_back(weights):
    method, trainer = SRPpFed(SPEC), Wells()
    device = replace(method.init_device(weights), trained=True)
    after, reply = method.work(device, task(weights + 1, 0.4), trainer, Budget(), Key.of(1))
    shared = shared_by(reply)
    assert np.array_equal(shared, shared_mask(weights[PARAMETERS], 0.4))
    assert np.abs(weights[PARAMETERS][shared]).max() <= np.abs(weights[PARAMETERS][~shared]).min()
    start = np.where(np.append(shared, [False] * 6), weights + 1, weights)
    expected = trainer.fit(start, FitPlan(), Key.of(1)).weights
    assert np.array_equal(after.weights, expected)
    assert np.array_equal(reply.patch.values, expected[PARAMETERS][shared])
    assert reply.loss == trainer.losses[0]


def test_the_mixture_of_least_training_loss_is_trained(weights):
    method, trainer = SRPpFed(SPEC), Wells()
    device = replace(method.init_device(weights), trained=True)
    _, good = method.work(device, task(trainer.target, 0.2, 0.9), trainer, Budget(), Key.of(1))
    assert shared_by(good).sum() == num_shared(0.9, SPEC.num_parameters)
    assert good.loss == min(trainer.losses[:2])
    _, bad = method.work(device, task(weights - 100, 0.9, 0.2), trainer, Budget(), Key.of(1))
    assert shared_by(bad).sum() == num_shared(0.2, SPEC.num_parameters)


def test_a_shared_model_beyond_all_bounds_leaves_the_device_its_own(weights):
    method, trainer = SRPpFed(SPEC), Wells()
    device = replace(method.init_device(weights), trained=True)
    huge = np.full(SPEC.size, 3e38, np.float32)
    with np.errstate(over="ignore"):
        after, reply = method.work(device, task(huge, 0.3, 0.6), trainer, Budget(), Key.of(1))
    assert np.abs(after.weights).max() < 10
    assert shared_by(reply).sum() == num_shared(0.3, SPEC.num_parameters)
    assert math.isfinite(reply.loss)


def test_a_device_new_to_training_starts_from_the_model_it_is_sent(weights):
    method = SRPpFed(SPEC)
    late, reply = method.work(method.init_device(weights), task(weights + 1, 0.1), Wells(), Budget(), Key(1))
    fresh, _ = method.work(
        replace(method.init_device(weights + 1), trained=True),
        task(weights + 1, 1.0),
        Wells(),
        Budget(),
        Key(1),
    )
    assert np.array_equal(late.weights[PARAMETERS], fresh.weights[PARAMETERS])
    assert late.trained
    assert shared_by(reply).sum() == num_shared(0.1, SPEC.num_parameters)


def test_a_device_that_was_away_goes_on_from_its_own_model(weights):
    run = Fleet(weights)
    run.round(1, ("a", "b"))
    kept = run.devices["b"].weights.copy()
    for number in (2, 3, 4):
        run.round(number, ("a",))
    assert np.array_equal(run.devices["b"].weights, kept)
    _, tasks = run.method.plan(run.state, Round(5, ("b",)), Key.of(5))
    _, reply = run.method.work(run.devices["b"], tasks["b"], Wells("b"), Budget(), Key.of(5))
    rate = shared_by(reply).sum() / SPEC.num_parameters
    assert np.array_equal(shared_by(reply), shared_mask(kept[PARAMETERS], rate))


def test_the_rates_drawn_are_reinforced_and_forgotten(weights):
    method = SRPpFed(SPEC, num_rates=4, decay=0.5)
    state, tasks = method.plan(method.init_coordinator(weights), Round(1, ("a",)), Key.of(1))
    assert tasks["a"].rates == tuple(method.rates[index] for index in state.drawn)
    assert 1 <= len(state.drawn) <= 2
    mask = np.ones(SPEC.num_parameters, bool)
    after = method.aggregate(state, [("a", update(weights, mask, loss=0.0))])
    assert after.memory.tolist() == [1.0 if index in state.drawn else 0.5 for index in range(4)]
    assert after.drawn == ()


def test_a_rate_that_went_with_low_loss_is_drawn_more_often(weights):
    method = SRPpFed(SPEC, draws=1, decay=0.9)
    state, mask, seen = method.init_coordinator(weights), np.ones(SPEC.num_parameters, bool), []
    for number in range(400):
        state, _ = method.plan(state, Round(number + 1, ("a",)), Key.of(number))
        seen += state.drawn
        loss = 0.0 if state.drawn == (6,) else 20.0
        state = method.aggregate(state, [("a", update(weights, mask, loss=loss))])
    assert np.bincount(seen, minlength=10).argmax() == 6
    assert seen[-50:].count(6) > 25


def test_what_is_credited_is_what_was_used(weights):
    method = SRPpFed(SPEC, num_rates=4, decay=0.5, credit="used")
    state = replace(method.init_coordinator(weights), drawn=(0, 2))
    mask = np.ones(SPEC.num_parameters, bool)

    def credited(*used, method=method):
        told = {str(i): replace(update(weights, mask, loss=0.0), rate=rate) for i, rate in enumerate(used)}
        after = method.aggregate(state, told.items())
        assert after.used == tuple(np.flatnonzero(after.memory > 0.5))
        return after.used

    assert credited(0.5, 0.5) == (1,)  # capped, or planned in an earlier round; once
    assert credited(0.25, 1.0) == (0, 3)
    assert credited(0.33) == ()  # of another run's candidates
    assert credited(0.5, None) == (0, 1, 2)  # one that does not say stands for all that were drawn
    assert credited(0.5, method=SRPpFed(SPEC, num_rates=4, decay=0.5)) == (0, 2)  # as the paper prints it


def test_an_update_says_the_rate_it_used_and_one_of_an_earlier_release_is_read(weights):
    told = {}
    for credit in ("used", "drawn"):
        method, trainer = SRPpFed(SPEC, credit=credit), Wells()
        device = replace(method.init_device(weights), trained=True)
        _, good = method.work(device, task(trainer.target, 0.2, 0.9), trainer, Budget(), Key.of(1))
        told[credit] = codec.encode(good, SPEC)
    assert codec.decode(told["used"], SRPpFed.update_type, SPEC).rate == 0.9
    earlier = codec.encode(EarlierUpdate(good.patch, good.num_samples, good.loss), SPEC)
    assert told["drawn"] == earlier  # a run of an earlier release goes on to the byte
    assert codec.decode(earlier, SRPpFed.update_type, SPEC).rate is None


def test_memory_gathers_on_the_rate_that_devices_use_and_not_on_one_that_only_is_drawn(weights):
    """All devices use the largest drawn: memory learns that, if there is one and the drawn do not count."""
    last = {}
    for name, settings in {
        "used": {"credit": "used"},
        "drawn": {"credit": "drawn"},
        "uniform": {"credit": "used", "memory": False},
    }.items():
        method = SRPpFed(SPEC, draws=3, num_rates=4, **settings)
        state, mask = method.init_coordinator(weights), np.ones(SPEC.num_parameters, bool)
        for number in range(60):
            state, tasks = method.plan(state, Round(number, ("a",)), Key.of("memory", number))
            told = replace(update(weights, mask, loss=0.1), rate=max(tasks["a"].rates))
            state = method.aggregate(state, [("a", told)])
        last[name] = method.diagnose_round(state)["probabilities"]
    assert last["used"]["1"] > 0.9
    assert last["drawn"]["1"] < 0.6
    assert set(last["uniform"].values()) == {0.25}


def test_fixed_rates_are_tried_in_every_round_and_nothing_is_drawn(weights):
    method = create("srp-pfed", SPEC, {"fixed_rates": [0.7, 0.33], "draws": 1, "credit": "used"})
    state = method.init_coordinator(weights)
    for number in range(3):
        state, tasks = method.plan(state, Round(number, ("a",)), Key.of(number))
        assert tasks["a"].rates == (0.33, 0.7)
        _, reply = method.work(method.init_device(weights), tasks["a"], Wells(), Budget(), Key(1))
        state = method.aggregate(state, [("a", reply)])
    assert method.diagnose_round(state)["probabilities"].keys() == {"0.33", "0.7"}


def test_a_device_new_to_training_may_keep_the_initial_weights_that_all_have(weights):
    method, sent = SRPpFed(SPEC, first="own"), weights + 1
    fitted, reply = method.work(method.init_device(weights), task(sent, 0.4), Wells(), Budget(), Key(1))
    shared = shared_mask(weights[PARAMETERS], 0.4)
    assert np.array_equal(shared_by(reply), shared)
    start = np.where(np.append(shared, [False] * 6), sent, weights)
    assert np.array_equal(fitted.weights, Wells().fit(start, FitPlan(), Key(1)).weights)


def test_a_device_that_comes_with_a_model_of_another_run_keeps_it(weights):
    method = SRPpFed(SPEC)
    device = method.start_from(method.init_device(weights), weights + 3)
    _, reply = method.work(device, task(weights, 0.3), Wells(), Budget(), Key(1))
    assert np.array_equal(shared_by(reply), shared_mask((weights + 3)[PARAMETERS], 0.3))


def test_losses_are_taken_on_a_sample_the_same_for_all_mixtures_and_another_each_round(weights):
    method = SRPpFed(SPEC, loss_share=0.4)
    device, seen = replace(method.init_device(weights), trained=True), []
    for number in range(3):
        trainer = Wells()
        method.work(device, task(weights + 1, 0.2, 0.9), trainer, Budget(), Key(number))
        first, second, *_ = trainer.rows
        assert first == second
        assert len(set(first)) == len(first) == 4  # of ten
        seen.append(tuple(first))
    assert len(set(seen)) == 3
    whole, part = (SRPpFed(SPEC, loss_share=s).choices(DeviceReport("a"))[-1].cost for s in (1.0, 0.4))
    assert part.extra_epochs == pytest.approx(0.4 * whole.extra_epochs)
    assert part.extra_epochs > 0


def test_what_is_seen_of_updates_and_rounds(weights):
    run = Fleet(weights, credit="used", num_rates=4)
    run.round(1, ("a", "b"))
    _, tasks = run.method.plan(run.state, Round(2, ("a",)), Key.of(2))
    _, reply = run.method.work(run.devices["a"], tasks["a"], Wells("a"), Budget(), Key.of(2))
    told = run.method.diagnose_update(reply)
    assert told == {"rate": reply.rate, "mixture_loss": reply.loss, "shared": shared_by(reply).mean()}
    told = run.method.diagnose_round(run.state)
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert told["rates_credited"] == len(run.state.used) == 1  # all start alike, the first one drawn wins
    assert {one.name for one in run.method.diagnostics} == {*told, "rate", "mixture_loss", "shared"}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("covered", [1, -10 / 7, 1 / 3, 9]),
        ("delta", [1, 9 - 0.1 * 7 - 0.6 * 11, 9 - 0.3 * 2 - 0.6 * 12, 9]),
        ("literal", [1, -1, 0.3, 0]),
    ],
)
def test_aggregation_of_parts(weights, aggregation, expected):
    method, start = SRPpFed(SPEC, aggregation=aggregation), weights.copy()
    start[:4] = 9
    masks, models = np.zeros((3, SPEC.num_parameters), bool), np.zeros((3, SPEC.size), np.float32)
    masks[:, :4] = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0]]
    models[:, :4] = [[1, 2, 3, 4], [5, 6, 7, 8], [-1, -2, -3, -4]]
    updates = [update(model, mask, n) for model, mask, n in zip(models, masks, (10, 30, 60), strict=True)]
    merged = method.aggregate(method.init_coordinator(start), zip("abc", updates, strict=True)).weights
    assert merged.dtype == np.float32
    assert np.array_equal(merged[STATS], start[STATS])
    assert merged[:4] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", ["covered", "delta", "literal"])
def test_devices_without_samples_change_nothing(weights, aggregation):
    method = SRPpFed(SPEC, aggregation=aggregation)
    state = method.init_coordinator(weights)
    mask = np.ones(SPEC.num_parameters, bool)
    after = method.aggregate(state, [("a", update(weights + 1, mask, num_samples=0))])
    assert np.array_equal(after.weights, weights)


def test_equation_4_as_printed_shrinks_the_shared_model(weights):
    norms = {}
    for aggregation in ("covered", "literal"):
        run = Fleet(weights, aggregation=aggregation)
        for number in range(1, 21):
            run.round(number, ("a", "b", "c"))
        norms[aggregation] = np.linalg.norm(run.state.weights[PARAMETERS])
    assert norms["literal"] < norms["covered"] / 2


def test_ranking_within_layers_shares_the_same_part_of_each(weights):
    uneven = weights.copy()
    uneven[SPEC.layers["a"]] *= 100
    for ranking, parts in (("model", [0, 1]), ("layer", [0.5, 0.5])):
        method = SRPpFed(SPEC, ranking=ranking)
        device = replace(method.init_device(uneven), trained=True)
        _, reply = method.work(device, task(uneven, 0.45), Wells(), Budget(), Key.of(1))
        shares = [shared_by(reply)[SPEC.layers[layer]].mean() for layer in ("a", "b")]
        assert shares == pytest.approx(parts, abs=0.16)


def test_a_device_tries_the_drawn_rates_that_it_can_afford(weights):
    method, drawn = SRPpFed(SPEC, draws=40), set()
    state = method.init_coordinator(weights)
    for name, ratio in (("small", 0.3), ("large", 1.0)):
        state = method.admit(state, DeviceReport(name, ratio=ratio))
    state, tasks = method.plan(state, Round(1, ("large", "small")), Key.of(1))
    drawn = tasks["large"].rates
    assert tasks["small"].rates == tuple(rate for rate in drawn if rate <= 0.3)
    assert 0 < len(tasks["small"].rates) < len(drawn)


def test_a_device_that_can_afford_none_of_them_takes_its_largest(weights):
    method = SRPpFed(SPEC, draws=1)
    state = method.admit(method.init_coordinator(weights), DeviceReport("a", ratio=0.35))
    for number in range(30):
        _, tasks = method.plan(state, Round(1, ("a",)), Key.of(number))
        (rate,) = tasks["a"].rates
        assert rate in {0.1, 0.2, 0.3}
    assert method.plan(replace(state, memory=np.eye(10)[9]), Round(1, ("a",)), Key(1))[1]["a"].rates == (0.3,)


def test_cost_grows_with_the_rate_upwards_only():
    costs = [choice.cost for choice in SRPpFed(SPEC, num_rates=5).choices(DeviceReport("a"))]
    assert len({cost.bytes_down for cost in costs}) == 1
    assert sorted({cost.bytes_up for cost in costs}) == [cost.bytes_up for cost in costs]


@pytest.mark.parametrize("rates", [(), (0.0,), (1.5,), (math.nan,)])
def test_a_task_with_impossible_rates_is_refused(weights, rates):
    data = codec.encode(task(weights, *rates), SPEC)
    with pytest.raises(PacketCorrupt):
        codec.decode(data, Task, SPEC)


def test_an_update_with_an_impossible_loss_is_refused(weights):
    mask = np.ones(SPEC.num_parameters, bool)
    for loss in (math.nan, -1.0):
        data = codec.encode(update(weights, mask, loss=loss), SPEC)
        with pytest.raises(PacketCorrupt):
            codec.decode(data, Update, SPEC)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rates": 0}, "method.num_rates: expected `int` >= 1"),
        ({"draws": 0}, "method.draws: expected `int` >= 1"),
        ({"decay": 1}, "method.decay: expected `float` < 1"),
        ({"aggregation": "mean"}, "method.aggregation: invalid enum value 'mean'"),
        ({"loss": "max"}, "method.loss: invalid enum value 'max'"),
        ({"ranking": "tensor"}, "method.ranking: invalid enum value 'tensor'"),
    ],
)
def test_bad_settings_name_the_key(settings, message):
    with pytest.raises(SettingError, match=message):
        create("srp-pfed", SPEC, settings)
