"""The local training loop: what changes, what stays exactly as it was, and when it stops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer, batch_slices
from fleetune.protocols.errors import ModelError, TrainingStopped
from fleetune.protocols.method.trainer import FitPlan, LowerLayers, Pull
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks import CLASSIFICATION

KEY = Key.of("test", "fit")
FEATURES, CLASSES = 20_000, 3  # more entries than one block of the optimiser


class SoftmaxBackend:
    """Multinomial logistic regression in NumPy, with a running mean of the inputs as its statistic."""

    task = CLASSIFICATION

    def __init__(self, features=FEATURES):
        axes = ((), ())
        self.spec = ModelSpec(
            "softmax",
            (
                TensorSpec("fc.weight", (features, CLASSES), "weight", "fc", axes),
                TensorSpec("fc.bias", (CLASSES,), "bias", "fc", axes[:1]),
                TensorSpec("norm.running_mean", (1,), "stat", "norm", axes[:1]),
            ),
            (),
            (features,),
            CLASSES,
        )
        self.weights = np.zeros(self.spec.size, np.float32)
        self.gradient = np.zeros(self.spec.size, np.float32)
        self.batches, self.wanted = [], []

    def gpu_descent(self, settings, plan, before):
        return None

    def look_at(self, weights):
        self.load(weights)

    def take(self):
        return self.weights.copy()

    def load(self, weights):
        self.weights[:] = weights

    def _probabilities(self, x):
        weight = self.weights[: -CLASSES - 1].reshape(-1, CLASSES)
        logits = (x @ weight + self.weights[-CLASSES - 1 : -1]).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def step(self, x, y, key, *, training=True, extra_loss=None, tensors=None):
        self.batches.append((y.size, key))
        self.wanted.append(tensors)
        p = self._probabilities(x)
        error = (p - np.eye(CLASSES)[y]) / y.size
        self.gradient[:] = np.concatenate([(x.T @ error).ravel(), error.sum(0), [0]])
        for tensor, part in self.spec.views(self.gradient):
            if tensors is not None and tensor.name not in tensors:
                part[...] = 0
        if training:
            self.weights[-1] = 0.9 * self.weights[-1] + 0.1 * x.mean()
        with np.errstate(divide="ignore"):
            return float(-np.log(p[np.arange(y.size), y]).mean())

    def evaluate(self, x, y):
        p = self._probabilities(x)
        return float(-np.log(p[np.arange(y.size), y]).sum()), p


def device_data(features=FEATURES, sizes=(37, 0, 11)):
    rng = KEY.generator()
    parts = []
    for size in sizes:
        parts += [rng.normal(size=(size, features)).astype(np.float32), rng.integers(CLASSES, size=size)]
    return DeviceData(*parts)


def trainer(features=FEATURES, sizes=(37, 0, 11), **settings):
    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, **settings}
    return LocalTrainer(SoftmaxBackend(features), device_data(features, sizes), TrainingSection(**settings))


def start(spec):
    weights = KEY.generator().normal(size=spec.size).astype(np.float32) * 0.05
    weights[5] = -0.0
    return weights


def reference(trainer, weights, plan):
    """The same training in the plainest form, float64, whole vectors."""
    settings, spec = trainer.settings, trainer.spec
    backend, w, v = SoftmaxBackend(spec.input_shape[0]), weights.astype(np.float64), 0
    for epoch in range(settings.epochs):
        order = KEY.child("epoch", epoch).permutation(trainer.num_samples)
        for batch in batch_slices(trainer.num_samples, settings.batch_size):
            backend.load(w.astype(np.float32))
            backend.step(trainer.data.x_train[order[batch]], trainer.data.y_train[order[batch]], KEY)
            g = backend.gradient.astype(np.float64)
            if plan.pull:
                pulled = np.ones(spec.size, bool) if plan.pull.mask is None else plan.pull.mask
                g += np.where(pulled, 2 * plan.pull.strength * (w - plan.pull.target), 0)
            v = settings.momentum * v + g + settings.weight_decay * w
            trainable = np.ones(spec.size, bool) if plan.trainable is None else plan.trainable
            w = np.where(trainable, w - settings.learning_rate * v, w)
            w[-1] = backend.weights[-1]
    return w


@given(n=st.integers(0, 300), size=st.integers(1, 70))
def test_every_sample_is_in_exactly_one_batch_and_none_is_alone(n, size):
    slices = batch_slices(n, size)
    assert [i for part in slices for i in range(n)[part]] == list(range(n))
    lengths = [part.stop - part.start for part in slices]
    assert all(length <= size + 1 for length in lengths)
    if n > 1 and size > 1:
        assert 1 not in lengths


def test_last_batch_of_one_joins_the_one_before():
    assert [s.stop - s.start for s in batch_slices(33, 16)] == [16, 17]
    assert [s.stop - s.start for s in batch_slices(34, 16)] == [16, 16, 2]
    assert [s.stop - s.start for s in batch_slices(1, 16)] == [1]


def test_partial_batch_is_trained_on_and_counted_in_the_loss():
    one = trainer(features=4, sizes=(21, 0, 0), epochs=1, batch_size=16, learning_rate=1e-12)
    weights = start(one.spec)
    fit = one.fit(weights, FitPlan(), KEY)
    assert [size for size, _ in one.backend.batches] == [16, 5]
    assert fit.num_steps == 2
    assert fit.loss == pytest.approx(one.loss(weights), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("pulled", [None, "all", "some"])
@pytest.mark.parametrize("frozen", [False, True])
def test_equals_the_plain_form(momentum, weight_decay, pulled, frozen):
    one = trainer(momentum=momentum, weight_decay=weight_decay)
    weights, rng = start(one.spec), KEY.child("masks").generator()
    mask, target = rng.random((2, one.spec.size)) < 0.5, rng.normal(size=one.spec.size).astype(np.float32)
    pull = Pull(target, 0.7, mask[0] if pulled == "some" else None) if pulled else None
    plan = FitPlan(trainable=mask[1] if frozen else None, pull=pull)
    fit = one.fit(weights, plan, KEY)
    np.testing.assert_allclose(fit.weights, reference(one, weights, plan), atol=1e-6)


def test_frozen_entries_stay_bit_for_bit():
    one = trainer(momentum=0.9, weight_decay=0.5)
    weights = start(one.spec)
    trainable = KEY.child("mask").generator().random(one.spec.size) < 0.3
    trainable[:40_000] = False  # a whole block of the optimiser and part of the next
    trainable[5] = False
    pull = Pull(np.full(one.spec.size, 3, np.float32), 1.0)
    fit = one.fit(weights, FitPlan(trainable=trainable, pull=pull), KEY)
    frozen = ~trainable[:-1]
    assert np.array_equal(fit.weights[:-1][frozen].view(np.int32), weights[:-1][frozen].view(np.int32))
    assert np.all(fit.weights[:-1][~frozen] != weights[:-1][~frozen])


def test_statistics_follow_the_data_even_when_everything_is_frozen():
    one = trainer(features=4, weight_decay=0.5)
    weights = start(one.spec)
    fit = one.fit(weights, FitPlan(trainable=np.zeros(one.spec.size, bool)), KEY)
    assert np.array_equal(fit.weights[:-1], weights[:-1])
    assert fit.weights[-1] != weights[-1]


def test_pull_has_the_gradient_of_its_term():
    """One step from the loss's own gradient and the pull's, against finite differences of the term."""
    one = trainer(features=4, sizes=(8, 0, 0), epochs=1, learning_rate=0.125)
    weights, rng = start(one.spec), KEY.generator()
    pull = Pull(rng.normal(size=one.spec.size).astype(np.float32), 0.3, rng.random(one.spec.size) < 0.5)
    plain, pulled = (one.fit(weights, FitPlan(pull=term), KEY).weights for term in (None, pull))

    def term(w):
        return pull.strength * (np.where(pull.mask, w - pull.target, 0) ** 2).sum()

    size, step = one.spec.num_parameters, 1e-4
    shifts = np.eye(size, one.spec.size) * step
    slope = [(term(weights + s) - term(weights - s)) / (2 * step) for s in shifts]
    np.testing.assert_allclose((plain - pulled)[:size] / 0.125, slope, atol=1e-4)


def test_momentum_starts_at_zero_in_each_fit_and_the_same_key_trains_alike():
    one = trainer(momentum=0.9)
    weights = start(one.spec)
    first, second = (one.fit(weights, FitPlan(), KEY) for _ in range(2))
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.loss == second.loss
    assert one.fit(weights, FitPlan(), Key.of("other")).weights.tobytes() != first.weights.tobytes()


def test_the_order_of_samples_is_the_documented_one():
    one = trainer(features=4, epochs=2)
    seen = []
    plain = one.backend.step
    one.backend.step = lambda x, y, key, **rest: (seen.append(x.copy()), plain(x, y, key, **rest))[1]
    one.fit(start(one.spec), FitPlan(), KEY)
    order = np.concatenate([KEY.child("epoch", e).permutation(37) for e in range(2)])
    np.testing.assert_array_equal(np.concatenate(seen), one.data.x_train[order])
    assert len({key for _, key in one.backend.batches}) == len(one.backend.batches)


def test_inputs_are_not_changed_and_the_result_is_new():
    one = trainer(features=4)
    weights = start(one.spec)
    before, data = weights.copy(), one.data.x_train.copy()
    fit = one.fit(weights, FitPlan(keep_last_gradient=True), KEY)
    kept = fit.weights.copy(), fit.last_gradient.copy()
    one.fit(fit.weights, FitPlan(), KEY)
    assert np.array_equal(weights, before)
    assert np.array_equal(one.data.x_train, data)
    assert np.array_equal(fit.weights, kept[0])
    assert np.array_equal(fit.last_gradient, kept[1])


def test_last_gradient_is_of_the_loss_alone_before_the_last_step():
    rate = 0.25
    one = trainer(features=4, sizes=(10, 0, 0), batch_size=10, epochs=2, learning_rate=rate)
    weights = start(one.spec)
    before = one.fit(weights, FitPlan(epochs=1), KEY).weights
    pull = Pull(weights, 0.0)
    fit = one.fit(weights, FitPlan(keep_last_gradient=True, pull=pull), KEY)
    np.testing.assert_allclose(fit.last_gradient, one.gradient(before), atol=1e-6)
    np.testing.assert_allclose(fit.weights[:-1], (before - rate * fit.last_gradient)[:-1], atol=1e-6)


def test_only_tensors_with_a_trainable_entry_are_asked_for():
    one = trainer(features=4, epochs=1)
    weights = start(one.spec)
    mask = np.zeros(one.spec.size, bool)
    mask[1] = True
    pull = Pull(np.zeros_like(weights), 1.0)
    kept = one.fit(weights, FitPlan(trainable=mask, pull=pull, keep_last_gradient=True), KEY)
    assert one.backend.wanted == [{"fc.weight"}] * 4 + [None]
    assert kept.last_gradient[:-1].all()  # of the frozen entries too
    del one.backend.wanted[:]
    alone = one.fit(weights, FitPlan(trainable=mask, pull=pull), KEY)
    assert one.backend.wanted == [{"fc.weight"}] * 5
    assert alone.weights.tobytes() == kept.weights.tobytes()
    one.fit(weights, FitPlan(), KEY)
    assert one.backend.wanted[5:] == [None] * 5


def test_lower_layers_are_asked_for_in_a_share_of_the_steps_and_stay_in_the_others():
    one = trainer(features=4, epochs=2)
    weights = start(one.spec)
    plan = FitPlan(lower=LowerLayers(one.spec.slices["fc.bias"].start, 0.3))
    fit = one.fit(weights, plan, KEY)
    deep = [plan.lower.train_in(step, KEY) for step in range(10)]
    assert deep.count(True) == 3
    assert one.backend.wanted == [None if both else {"fc.bias"} for both in deep]
    assert (fit.weights != weights)[: one.spec.num_parameters].all()
    key = next(Key(i) for i in range(20) if not plan.lower.train_in(0, Key(i)))
    shallow = one.in_round(1, None, local_work=0.1).fit(weights, plan, key)
    assert shallow.num_steps == 1
    moved = np.flatnonzero(shallow.weights != weights)
    assert set(moved[moved < one.spec.num_parameters]) == {*range(plan.lower.stop, one.spec.num_parameters)}


@pytest.mark.parametrize("share", [0.25, 0.4, 0.9, 1.0])
def test_deep_steps_are_a_share_of_all(share):
    lower, keys = LowerLayers(3, share), [Key(i) for i in range(400)]
    for steps in (1, 7, 10):
        found = [sum(lower.train_in(step, key) for step in range(steps)) for key in keys]
        assert set(found) <= {int(share * steps), int(share * steps) + 1}
        assert np.mean(found) == pytest.approx(share * steps, abs=0.1)
    spread = [step for step in range(100) if lower.train_in(step, Key(1))]
    assert max(np.diff(spread)) <= np.ceil(1 / share)


def test_plan_decides_the_epochs():
    one = trainer(features=4, epochs=3)
    assert one.fit(start(one.spec), FitPlan(epochs=1), KEY).num_steps == 5
    assert one.fit(start(one.spec), FitPlan(), KEY).num_steps == 15
    nothing = one.fit(start(one.spec), FitPlan(epochs=0), KEY)
    assert (nothing.num_steps, nothing.loss) == (0, 0.0)
    assert np.array_equal(nothing.weights, start(one.spec))


def test_a_share_of_the_local_training_is_its_first_steps():
    """On the data as shuffled for all of it, counted in whole steps, at least one."""
    one = trainer(sizes=(37, 0, 11), epochs=3)  # of five batches
    weights, steps = start(one.spec), {}
    for share in (0.01, 0.25, 0.5, 0.75, 1.0):
        steps[share] = one.in_round(1, None, local_work=share).fit(weights, FitPlan(), KEY)
    assert [fit.num_steps for fit in steps.values()] == [1, 4, 8, 11, 15]
    assert np.array_equal(steps[1.0].weights, one.fit(weights, FitPlan(), KEY).weights)
    first = one.fit(weights, FitPlan(epochs=1), KEY)
    third = one.in_round(1, None, local_work=1 / 3)
    assert np.array_equal(third.fit(weights, FitPlan(), KEY).weights, first.weights)
    assert third.fit(weights, FitPlan(), KEY).loss == first.loss
    assert third.fit(weights, FitPlan(epochs=2), KEY).num_steps == 10, (
        "a method's own epochs are not the run's"
    )
    whole, some = list(one.batches(KEY)), list(one.in_round(1, None, local_work=0.5).batches(KEY))
    assert len(whole) == 15
    assert len(some) == 8
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(some, whole, strict=False))
    assert steps[0.5].loss > 0


def test_more_local_training_than_once_goes_on_with_further_epochs():
    one = trainer(sizes=(37, 0, 11), epochs=2)  # of five batches
    weights, twice = start(one.spec), one.in_round(1, None, local_work=2.0)
    assert np.array_equal(
        twice.fit(weights, FitPlan(), KEY).weights, one.fit(weights, FitPlan(epochs=4), KEY).weights
    )
    assert twice.fit(weights, FitPlan(), KEY).local_work == 2.0
    assert len(list(twice.batches(KEY))) == 20
    half_more = one.in_round(1, None, local_work=1.5)
    assert half_more.fit(weights, FitPlan(), KEY).num_steps == 15
    assert len(list(half_more.batches(KEY))) == 15


def test_the_loss_of_a_part_of_an_epoch_is_that_of_its_samples():
    one = trainer(sizes=(40, 0, 11), epochs=2, learning_rate=1e-9).in_round(1, None, local_work=0.7)
    weights = start(one.spec)
    seen = list(one.batches(KEY))[5:]
    assert len(seen) == 2
    expected = one.loss(weights, rows=np.concatenate(seen))
    assert one.fit(weights, FitPlan(), KEY).loss == pytest.approx(expected, rel=1e-3)


def test_when_it_is_enough_training_ends_with_what_it_has():
    one = trainer(sizes=(37, 0, 11), epochs=3)
    weights, asked = start(one.spec), []

    def after(steps):
        def enough():
            asked.append(1)
            return len(asked) >= steps

        asked.clear()
        return one.in_round(1, None, enough=enough)

    fit = after(4).fit(weights, FitPlan(), KEY)
    assert (fit.num_steps, fit.local_work) == (4, 4 / 15)
    same = one.in_round(1, None, local_work=4 / 15).fit(weights, FitPlan(), KEY)
    assert np.array_equal(fit.weights, same.weights)
    assert fit.loss == same.loss
    assert after(1).fit(weights, FitPlan(), KEY).num_steps == 1, "never nothing"
    own = after(2).fit(weights, FitPlan(epochs=1), KEY)
    assert (own.num_steps, own.local_work) == (2, None)
    wanted = after(1).fit(weights, FitPlan(keep_last_gradient=True), KEY)
    assert wanted.num_steps == 15
    assert wanted.last_gradient is not None


def test_stop_is_asked_before_every_batch_and_ends_training():
    one = trainer(features=4)
    asked = []
    stopping = LocalTrainer(
        one.backend,
        one.data,
        one.settings,
        stop=lambda: asked.append(0) or ("hot" if len(asked) == 4 else None),
    )
    weights = start(one.spec)
    before = weights.copy()
    with pytest.raises(TrainingStopped, match="after 3 of 10 steps: hot"):
        stopping.fit(weights, FitPlan(), KEY)
    assert len(one.backend.batches) == 3
    assert np.array_equal(weights, before)


def test_progress_rises_to_one():
    one, seen = trainer(features=4), []
    LocalTrainer(one.backend, one.data, one.settings, progress=seen.append).fit(
        start(one.spec), FitPlan(), KEY
    )
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (10, 1.0)


def test_divergence_is_named_with_its_remedy():
    one = trainer(features=4, learning_rate=1e38, epochs=5)
    with pytest.raises(ModelError, match=r"training diverged .*lower training\.learning_rate \(now 1e\+38\)"):
        one.fit(start(one.spec), FitPlan(), KEY)


def test_divergence_in_the_last_step_is_found_too():
    one = trainer(features=4, sizes=(8, 0, 0), epochs=1, weight_decay=1e38, learning_rate=1e38)
    with pytest.raises(ModelError, match="weights are not finite after 1 steps"):
        one.fit(start(one.spec), FitPlan(), KEY)


def test_gradient_is_of_the_mean_loss_over_all_training_samples():
    one = trainer(features=3, sizes=(300, 0, 0))  # several evaluation batches, the last one partial
    weights = start(one.spec)
    gradient, step = one.gradient(weights), 1e-2
    assert gradient[-1] == 0
    for entry in range(one.spec.num_parameters):
        shift = np.zeros(one.spec.size, np.float32)
        shift[entry] = step
        slope = (one.loss(weights + shift) - one.loss(weights - shift)) / (2 * step)
        assert gradient[entry] == pytest.approx(slope, abs=2e-4)


def test_loss_and_accuracy_of_the_parts():
    one = trainer(features=4, sizes=(200, 0, 150))
    weights = start(one.spec)
    one.backend.load(weights)
    total, outputs = one.backend.evaluate(one.data.x_test, one.data.y_test)
    assert one.loss(weights, "test") == pytest.approx(total / 150)
    assert one.accuracy(weights) == (outputs.argmax(1) == one.data.y_test).mean()
    assert one.loss(weights, "validation") == 0
    assert one.accuracy(weights, "validation") is None
    assert one.num_samples == 200


def test_without_training_samples_nothing_happens():
    one = trainer(features=4, sizes=(0, 0, 5))
    weights = start(one.spec)
    fit = one.fit(weights, FitPlan(), KEY)
    assert np.array_equal(fit.weights, weights)
    assert (fit.loss, fit.num_steps) == (0.0, 0)
    assert not one.gradient(weights).any()


def test_batches_are_those_that_fit_takes():
    one = trainer(batch_size=8, epochs=2)
    rows = list(one.batches(KEY))
    orders = [KEY.child("epoch", epoch).permutation(37) for epoch in range(2)]
    assert np.array_equal(np.concatenate(rows), np.concatenate(orders))
    one.fit(start(one.spec), FitPlan(), KEY)
    assert [batch.size for batch in rows] == [size for size, _ in one.backend.batches]


def test_batches_end_when_the_agent_stops_and_say_how_far_they_are():
    one, seen = trainer(batch_size=8, epochs=2), []
    reasons = iter([None, None, "too hot"])
    stopping = LocalTrainer(
        one.backend, one.data, one.settings, stop=lambda: next(reasons), progress=seen.append
    )
    with pytest.raises(TrainingStopped, match="after 2 of 10 batches: too hot"):
        list(stopping.batches(KEY))
    assert seen == [0.1, 0.2]
    assert list(trainer(sizes=(0, 0, 5)).batches(KEY)) == []


def test_the_gradient_of_some_samples_is_theirs_alone():
    one = trainer()
    weights, rows = start(one.spec), np.array([3, 1, 36, 4])
    one.backend.load(weights)
    one.backend.step(*one.data.batch("train", rows), KEY, training=False)
    expected = one.backend.gradient.copy()
    assert one.gradient(weights, rows) == pytest.approx(expected, abs=1e-7)
    halves = one.gradient(weights, np.arange(18)), one.gradient(weights, np.arange(18, 37))
    assert one.gradient(weights) == pytest.approx((18 * halves[0] + 19 * halves[1]) / 37, abs=1e-6)
