"""What holds for every method: one test file runs over the whole registry."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.errors import raises
from tests.helpers.every_method import SETTINGS
from tests.helpers.nightly import of_methods

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.model.compute_cost import compute_cost, work_with_lower
from fleetune.protocols.model.spec import Backbone, FrozenTensor
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import run_key, work_key

SPEC = tiny_spec()
DEVICES = ("d0", "d1", "d2", "d3")
RUN_EPOCHS = 7
DRAW_NOTHING = {"steps": 2, "approximation": "first-order"}  # Per-FedAvg with exact gradients


def through_codec(value, kind):
    return codec.decode(codec.encode(value, SPEC), kind, SPEC, finite=False)


class Counting:
    """A trainer that counts the full epochs asked of it, where the run has `RUN_EPOCHS`."""

    def __init__(self, trainer):
        self._trainer, self.epochs = trainer, 0.0

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def fit(self, weights, plan, key):
        loss_terms = len(plan.loss_term.models) if plan.loss_term else 0
        work = 1.0 if plan.trainable is None else compute_cost(SPEC, plan.trainable)
        if plan.lower is not None:
            work = work_with_lower(SPEC, plan.lower.stop, plan.lower.share)
        epochs = RUN_EPOCHS if plan.epochs is None else plan.epochs
        self.epochs += work * epochs + loss_terms * EVALUATION_EPOCHS
        return self._trainer.fit(weights, plan, key)

    def gradient(self, weights, rows=None):
        self.epochs += 1 if rows is None else rows.size / self._trainer.num_samples
        return self._trainer.gradient(weights, rows)

    def loss(self, weights, part="train", rows=None):
        share = 1 if rows is None else rows.size / self._trainer.num_samples
        self.epochs += (part == "train") * share * EVALUATION_EPOCHS
        return self._trainer.loss(weights, part, rows)

    def accuracy(self, weights, part):
        self.epochs += (part == "train") * EVALUATION_EPOCHS
        return self._trainer.accuracy(weights, part) if part == "train" else None


class Run:
    """A run without engine or wire; everything that travels or is stored goes through the codec."""

    def __init__(self, name, settings, weights, seed=0):
        self.name, self.settings = name, settings
        self.method = create(name, SPEC, settings)
        self.seed = seed
        self.state = self.method.init_coordinator(weights)
        for i, device in enumerate(DEVICES):
            self.state = self.method.admit(
                self.state, DeviceReport(device, num_samples=12 + 6 * i, ratio=(i + 1) / 4)
            )
        self.devices = {device: self.method.init_device(weights) for device in DEVICES}
        self.bytes = []
        self.worked = []

    def round(self, number, *, participants=DEVICES, replying=None, order=None):
        method = self.method
        key = run_key(self.seed).child("plan", number, 1)
        self.state, tasks = method.plan(self.state, Round(number, participants), key)
        updates = {}
        for device in order or participants:
            task = through_codec(tasks[device], method.task_type)
            trainer = Counting(PullToTarget(SPEC, device, 12 + 6 * DEVICES.index(device)))
            self.devices[device], update = method.work(
                self.devices[device], task, trainer, Budget(), work_key(self.seed, number, 1, device)
            )
            self.worked.append((device, trainer.epochs))
            self.bytes += [codec.encode(tasks[device], SPEC), codec.encode(update, SPEC)]
            updates[device] = through_codec(update, method.update_type)
        replied = sorted(replying or participants)
        self.state = method.aggregate(self.state, ((device, updates[device]) for device in replied))

    def through_disk(self):
        self.state = through_codec(self.state, self.method.state_type)
        self.devices = {d: through_codec(s, self.method.device_state_type) for d, s in self.devices.items()}

    def content(self):
        models = [self.method.shared_model(self.state)]
        models += [self.method.personal_model(state) for state in self.devices.values()]
        return b"".join(model.tobytes() for model in models)


@pytest.fixture(params=of_methods(SETTINGS, as_one=True), ids=lambda param: "-".join([param[0], *param[1]]))
def make(request, weights):
    return lambda seed=0: Run(*request.param, weights, seed)


def test_any_subset_of_updates_aggregates(make):
    for replying in (("d0",), ("d1", "d3"), DEVICES):
        run = make()
        run.round(1, replying=replying)
        run.round(2, participants=("d0", "d2"))
        assert np.isfinite(run.method.shared_model(run.state)).all()
        assert run.method.shared_model(run.state).shape == (SPEC.size,)


HEAD = replace(
    SPEC,
    tensors=tuple(tensor for tensor in SPEC.tensors if tensor.layer == "b"),
    backbone=Backbone(
        tuple(FrozenTensor(one.name, one.shape, one.uses) for one in SPEC.tensors if one.layer != "b"),
        digest="0" * 32,
    ),
)
PARTING = {"fedper", "fedrep", "fedbabu", "lg-fed", "perfedmask"}


@pytest.mark.parametrize(("name", "settings"), of_methods(SETTINGS))
def test_a_head_alone_is_trained_or_refused_in_one_line(name, settings, monkeypatch):
    """Of a model whose body is frozen: methods that part a model into head and body have nothing to part."""
    monkeypatch.setitem(globals(), "SPEC", HEAD)
    weights = Key.of("head").uniform(HEAD.size).astype(np.float32)
    if name in PARTING:
        with raises(SettingError, "'b'", remedy="model.trainable"):
            Run(name, settings, weights)
        return
    run = Run(name, settings, weights)
    run.round(1)
    run.round(2, replying=("d0", "d2"))
    assert run.method.shared_model(run.state).shape == (HEAD.size,)
    assert np.isfinite(run.method.shared_model(run.state)).all()
    costs = [choice.cost for choice in run.method.choices(DeviceReport("d0", num_samples=9))]
    assert all(0 < cost.bytes_up < 10_000 for cost in costs if name != "local-only")


def test_a_restart_in_the_middle_changes_nothing(make):
    calm, shaken = make(), make()
    for number in (1, 2, 3):
        calm.round(number)
        shaken.through_disk()
        shaken.round(number)
        shaken.through_disk()
    assert shaken.content() == calm.content()


def test_the_same_seed_gives_the_same_bytes_in_any_order_of_work(make):
    one, other = make(seed=3), make(seed=3)
    for number in (1, 2):
        one.round(number)
        other.round(number, order=DEVICES[::-1])
    assert sorted(one.bytes) == sorted(other.bytes)
    assert one.content() == other.content()


def test_another_seed_gives_other_bytes(make):
    one, other = make(seed=3), make(seed=4)
    one.round(1)
    other.round(1)
    assert (one.content() != other.content()) == (one.settings != DRAW_NOTHING)


def test_inputs_are_not_mutated(make):
    run = make()
    run.round(1)
    state, devices = run.state, dict(run.devices)
    before = copy.deepcopy((state, devices))
    run.round(2)
    for old, new in zip((state, *devices.values()), (before[0], *before[1].values()), strict=True):
        assert codec.encode(old, SPEC) == codec.encode(new, SPEC)


def test_running_statistics_never_leave_a_device(make, weights):
    run = make()
    run.round(1)
    stats = slice(SPEC.num_parameters, SPEC.size)
    assert np.array_equal(run.method.shared_model(run.state)[stats], weights[stats])
    for state in run.devices.values():
        own = run.method.personal_model(state)[stats]  # followed its own data, in one fit or two
        assert any(np.allclose(own, weights[stats] * np.float32(0.9**fits)) for fits in (1, 2))


def test_choices_are_ascending_and_cost_more_with_the_ratio(make):
    choices = make().method.choices(DeviceReport("d0"))
    ratios = [choice.ratio for choice in choices]
    sizes = [choice.cost.bytes_up for choice in choices]
    assert ratios == sorted(ratios)
    assert ratios[0] > 0
    assert ratios[-1] <= 1
    assert sizes == sorted(sizes)


def test_the_cost_of_a_round_is_the_training_that_the_method_asks_for(make):
    run = make()
    run.round(1)
    run.worked.clear()  # a first round may be another one: no teacher yet, neurons to choose
    for number in range(2, 10):
        run.round(number)
    [*_, choice] = run.method.choices(DeviceReport("d3"))
    counted = [epochs for device, epochs in run.worked if device == "d3"]
    expected = choice.cost.epochs(RUN_EPOCHS)
    if run.name == "dc-pfl":
        trial = 2 * RUN_EPOCHS + 3 * EVALUATION_EPOCHS
        counted = [epochs for epochs in counted if epochs != pytest.approx(trial)]
    assert max(counted) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedsup", {}, "did you mean 'fedspu'"),
        ("fedspu", {"early_stoping": True}, "method.early_stoping: fedspu has no such setting"),
        ("fedspu", {"loss_weight": 2}, "method.loss_weight: expected `float` <= 1"),
        ("fedprox", {"proximal": -1}, "method.proximal: expected `float` >= 0"),
        ("fedbn", {"proximal": 1}, "fedbn has no such setting; it has: none"),
        ("nowhere:Method", {}, "cannot load 'nowhere:Method'"),
    ],
)
def test_bad_settings_name_the_key(name, settings, message):
    with pytest.raises(SettingError, match=message):
        create(name, SPEC, settings)


def test_a_device_that_comes_with_its_own_model_uses_it(make, weights):
    run, own = make(), np.linspace(-1, 1, SPEC.size, dtype=np.float32)
    state = run.method.start_from(run.method.init_device(weights), own)
    run.devices["d0"] = through_codec(state, run.method.device_state_type)
    np.testing.assert_array_equal(run.method.personal_model(run.devices["d0"]), own)
    run.round(1)
    run.round(2)
    assert np.isfinite(run.method.shared_model(run.state)).all()


def test_a_forgotten_device_leaves_no_trace_and_the_others_go_on(make):
    for whole in (True, False):
        run = make()
        for number in (1, 2, 3):
            run.round(number, participants=DEVICES if whole else DEVICES[number % 2 :: 2])
        state = run.method.forget(run.state, "d1")
        assert "'d1'" not in repr(state)
        again = run.method.forget(state, "d1")
        assert codec.encode(again, SPEC) == codec.encode(state, SPEC)
        run.state = state
        run.through_disk()
        for number in (4, 5, 6):
            run.round(number, participants=("d0", "d2", "d3"))
            assert "'d1'" not in repr(run.state)
        assert np.isfinite(run.method.shared_model(run.state)).all()


def test_the_last_device_can_be_forgotten_and_come_back(make):
    run = make()
    run.round(1)
    for device in DEVICES:
        run.state = run.method.forget(run.state, device)
    for device in DEVICES:
        run.state = run.method.admit(run.state, DeviceReport(device, num_samples=12, ratio=0.5))
    run.round(2)
    assert np.isfinite(run.method.shared_model(run.state)).all()
