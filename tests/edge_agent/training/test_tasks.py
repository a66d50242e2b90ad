"""Every task and loss: all trainers take the same steps and judge alike, over a local fit."""

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from tests.helpers.nightly import sooner

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.edge_agent.training.device_data import DeviceData, check_fits
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import DataError, ModelError, SettingError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import TASKS, task_of

SHAPE, NUM_TRAIN, NUM_TEST = (1, 3, 4), 24, 20
SECTIONS = [
    TaskSection(label_smoothing=0.1),
    TaskSection(class_weights=(1.0, 2.0, 0.5)),
    TaskSection(loss="tests.edge_agent.training.test_tasks:focal"),
    TaskSection(kind="multi-label", class_weights=(1.0, 2.0, 0.5)),
    *(
        TaskSection(kind=kind, loss=loss)
        for kind in ("regression", "forecast")
        for loss in TASKS[kind].losses
    ),
    TaskSection(kind="forecast", loss="quantile", quantiles=(0.1, 0.5, 0.9)),
    *(TaskSection(kind="reconstruction", loss=loss) for loss in TASKS["reconstruction"].losses),
]


def focal(outputs, labels):
    """A user's loss: cross-entropy that forgets what is easy."""
    logs = outputs.log_softmax(1)
    hot = (labels[:, None] == outputs.new_tensor(range(3))).to(outputs.dtype)
    chance = (logs.exp() * hot).sum(1)
    return -((1 - chance) ** 2) * (logs * hot).sum(1)


def name_of(section):
    more = "weighted" if section.class_weights else ""
    return f"{section.kind}-{section.loss.rpartition(':')[2]}{more}{len(section.quantiles)}"


def data_for(task):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(NUM_TRAIN + NUM_TEST, *SHAPE)).astype(np.float32)
    teacher = x.reshape(len(x), -1) @ draw.normal(size=(12, 3)).astype(np.float32)
    y = {
        "classification": teacher.argmax(axis=1),
        "multi-label": (teacher > 0).astype(np.float32),
        "reconstruction": (np.arange(len(x)) % 5 == 0).astype(np.int64),
    }.get(task.kind, teacher)
    held_out = x[:0], y[:0]
    return DeviceData(x[:NUM_TRAIN], y[:NUM_TRAIN], *held_out, x[NUM_TRAIN:], y[NUM_TRAIN:])


@pytest.mark.parametrize("section", sooner(SECTIONS, kept=6), ids=name_of)
def test_both_trainers_take_the_same_steps_and_judge_alike(section):
    task = task_of(section)
    data = data_for(task)
    num_outputs = task.num_outputs(SHAPE, data.y_train)
    bundle = make_bundle("mlp", SHAPE, num_outputs, Key(3), section)
    data = check_fits(data, bundle.spec, task)
    trainers = [
        LocalTrainer(backend, data, TrainingSection(epochs=2, batch_size=7, learning_rate=0.05, momentum=0.5))
        for backend in (TorchBackend.from_spec(bundle.spec, task), OnnxBackend(bundle))
    ]
    weights = trainers[0].backend.weights.copy()
    before = trainers[0].loss(weights)
    ours, theirs = (trainer.fit(weights, FitPlan(keep_last_gradient=True), Key(7)) for trainer in trainers)
    assert_allclose(theirs.weights, ours.weights, rtol=1e-5, atol=1e-5)
    assert_allclose(theirs.last_gradient, ours.last_gradient, rtol=1e-4, atol=1e-5)
    assert_allclose(theirs.loss, ours.loss, rtol=1e-5)
    assert trainers[0].loss(ours.weights) < before
    scores = [trainer.scores(ours.weights) for trainer in trainers]
    assert scores[0].keys() == scores[1].keys()
    assert set(scores[0]) <= {one.name for one in task.scores}
    for name, value in scores[0].items():
        assert_allclose(scores[1][name], value, rtol=1e-4, atol=1e-6)
    assert scores[0][task.score.name] == trainers[0].score(ours.weights)
    losses = [trainer.losses(ours.weights, "test") for trainer in trainers]
    assert losses[0].shape == (data.size("test"),)
    assert_allclose(losses[0].mean(), trainers[0].loss(ours.weights, "test"), rtol=1e-5)
    assert_allclose(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_anomalies_are_tested_on_and_never_trained_on():
    task = task_of(TaskSection(kind="reconstruction"))
    bundle = make_bundle("mlp", SHAPE, 12, Key(3), task.section)
    data = check_fits(data_for(task), bundle.spec, task)
    assert not data.y_train.any()
    assert data.size("train") == NUM_TRAIN - 5
    assert data.y_test.sum() == 4


def test_the_threshold_is_found_on_validation_samples_where_they_are_enough():
    task = task_of(TaskSection(kind="reconstruction", anomaly_quantile=0.8))
    whole = data_for(task)
    bundle = make_bundle("mlp", SHAPE, 12, Key(3), task.section)
    weights = None
    for num_validation, of in ((3, "validation and test"), (20, "validation"), (0, "test")):
        held_out = replace(
            whole,
            x_validation=whole.x_train[:num_validation],
            y_validation=np.zeros(num_validation, np.int64),
        )
        data = check_fits(held_out, bundle.spec, task)
        trainer = LocalTrainer(TorchBackend.from_spec(bundle.spec, task), data, TrainingSection())
        weights = trainer.backend.weights.copy() if weights is None else weights
        found = trainer.threshold(weights)
        normal = {part: trainer.losses(weights, part) for part in ("validation", "test")}
        normal["test"] = normal["test"][data.y_test == 0]
        used = np.concatenate([normal[part] for part in of.split(" and ")])
        assert found.false_alarms.of == of
        assert found.false_alarms.num_samples == len(used)
        rank = min(len(used), int(np.ceil(0.8 * (len(used) + 1))))
        assert_allclose(found.error, np.sort(used)[rank - 1], rtol=2e-4)
    without = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
    assert replace(trainer, data=without).threshold(weights).false_alarms is None


def test_held_out_anomalies_score_models_and_have_no_part_in_their_loss():
    task = task_of(TaskSection(kind="reconstruction"))
    whole = data_for(task)
    cut = NUM_TRAIN // 2
    held_out = replace(
        whole,
        x_train=whole.x_train[:cut],
        y_train=whole.y_train[:cut],
        x_validation=whole.x_train[cut:],
        y_validation=whole.y_train[cut:],
    )
    bundle = make_bundle("mlp", SHAPE, 12, Key(3), task.section)
    data = check_fits(held_out, bundle.spec, task)
    normal = np.flatnonzero(data.y_validation == 0)
    assert data.y_validation.sum() > 0
    assert data.compared.tolist() == normal.tolist()
    trainer = LocalTrainer(TorchBackend.from_spec(bundle.spec, task), data, TrainingSection())
    weights = trainer.backend.weights.copy()
    losses = trainer.losses(weights, "validation")
    assert len(losses) == len(normal)
    assert_allclose(trainer.loss(weights, "validation"), losses.mean(), rtol=1e-6)
    assert_allclose(trainer.loss(weights, "validation", normal[:2]), losses[:2].mean(), rtol=1e-6)
    tested = replace(data, x_test=data.x_validation, y_test=data.y_validation)
    assert trainer.score(weights, "validation") == replace(trainer, data=tested).score(weights, "test")
    alone = data.without_validation()
    assert len(alone.y_train) == data.size("train") + len(normal)
    assert not alone.y_train.any()
    assert alone.never_trained is None


@pytest.mark.parametrize(
    ("section", "labels", "words"),
    [
        (TaskSection(), np.zeros((4, 0), np.float32), "have no labels"),
        (TaskSection(), np.zeros((4, 2), np.float32), "classes are whole numbers"),
        (TaskSection(), np.array([0, 1, 2, 3]), r"label 3; the model has 0\.\.2"),
        (TaskSection(kind="multi-label"), np.full((4, 3), 0.5, np.float32), "labels other than 0 and 1"),
        (
            TaskSection(kind="regression"),
            np.zeros((4, 2), np.float32),
            "2 numbers a label",
        ),
        (TaskSection(kind="regression"), np.full((4, 3), np.nan, np.float32), "NaN or infinite labels"),
        (TaskSection(kind="reconstruction"), np.array([0, 1, 2, 0]), r"0 \(normal\) and 1 \(anomaly\)"),
    ],
)
def test_labels_of_another_task_are_named(section, labels, words):
    x = np.zeros((4, *SHAPE), np.float32)
    spec = make_spec(3 if section.kind != "reconstruction" else 12)
    with pytest.raises(DataError, match=words):
        check_fits(DeviceData(x, labels, x[:0], labels[:0], x[:0], labels[:0]), spec, task_of(section))


def make_spec(num_outputs):
    from fleetune.coordinator.spec.spec_from_torch import draw

    return draw("mlp", SHAPE, num_outputs, Key(0))[0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (TaskSection(loss="squared"), "task.loss: classification has no 'squared'; choose cross-entropy"),
        (
            TaskSection(kind="forecast", score="accuracy"),
            "task.score: forecast has no 'accuracy'; choose mae",
        ),
        (
            TaskSection(kind="regression", class_weights=(1.0,)),
            "task.class_weights: regression has no classes",
        ),
        (TaskSection(kind="reconstruction", loss="a:b"), "task.loss: reconstruction"),
    ],
)
def test_a_task_that_makes_no_sense_is_one_line(section, words):
    with pytest.raises(SettingError, match=re.escape(words)):
        task_of(section)


def wrong_shape(outputs, _):
    return outputs.mean()


@pytest.mark.parametrize("function", ["wrong_shape", "nobody"])
def test_a_users_loss_that_fails_is_one_line(function):
    section = TaskSection(loss=f"tests.edge_agent.training.test_tasks:{function}")
    backend = TorchBackend.from_spec(make_spec(3), task_of(section))
    x, y = np.zeros((2, *SHAPE), np.float32), np.array([0, 1])
    with pytest.raises(ModelError, match=r"task\.loss") as caught:
        backend.step(x, y, Key(0))
    assert "\n" not in str(caught.value)
