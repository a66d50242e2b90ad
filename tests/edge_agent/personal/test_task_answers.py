"""What a personal model's file answers for every task, against its trainer; and how that is told."""

import json

import numpy as np
import onnx
import pytest
from tests.edge_agent.training.test_tasks import SECTIONS, SHAPE, data_for, name_of
from tests.helpers.errors import raises
from tests.helpers.nightly import sooner
from typer.testing import CliRunner

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.extensions.extension import RoundAttempt, RunStart, TrainingResult, TrainingRound
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.personal.inference_graph import Predictor, write_inference
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.device_data import check_fits
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import DataError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of

OUTPUTS = {
    "classification": {"logits", "probabilities", "label"},
    "multi-label": {"logits", "probabilities", "present"},
    "regression": {"numbers"},
    "forecast": {"numbers"},
    "reconstruction": {"reconstruction", "error", "anomaly"},
}


def trained(section):
    """A trainer, the weights it came to, the bundle, and the test samples' raw labels."""
    task = task_of(section)
    data = data_for(task)
    bundle = make_bundle("mlp", SHAPE, task.num_outputs(SHAPE, data.y_train), Key(3), section)
    settings = TrainingSection(epochs=3, batch_size=7, learning_rate=0.1)
    backend = TorchBackend.from_spec(bundle.spec, task)
    trainer = LocalTrainer(backend, check_fits(data, bundle.spec, task), settings)
    weights = trainer.fit(backend.weights.copy(), FitPlan(), Key(7)).weights
    return trainer, weights, bundle, data


@pytest.mark.parametrize(
    "section", sooner([one for one in SECTIONS if ":" not in one.loss], kept=5), ids=name_of
)
def test_the_file_answers_and_is_judged_as_the_trainer_is(section):
    trainer, weights, bundle, data = trained(section)
    written = write_inference(bundle, weights, {}, threshold=trainer.threshold(weights))
    onnx.checker.check_model(onnx.load_from_string(written), full_check=True)
    predictor = Predictor.of(written)
    answers = predictor.answers(data.x_test)
    wanted = OUTPUTS[section.kind] | ({"quantiles"} if section.loss == "quantile" else set())
    assert answers.keys() == wanted
    assert predictor.task.section == section
    figures = predictor.figures(answers, data.y_test, "test")
    expected = trainer.scores(weights)
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-4, atol=1e-6)
    if section.kind == "reconstruction":
        losses = trainer.losses(weights, "test")
        np.testing.assert_allclose(answers["error"], losses, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(answers["anomaly"], losses > predictor.threshold)
    if section.kind == "multi-label":
        chances = 1 / (1 + np.exp(-answers["logits"].astype(np.float64)))
        np.testing.assert_allclose(answers["probabilities"], chances, rtol=1e-5)
        np.testing.assert_array_equal(answers["present"], chances > 0.5)
    if "quantiles" in answers:
        middle = answers["quantiles"][:, :, len(section.quantiles) // 2]
        np.testing.assert_array_equal(answers["numbers"], middle)


def test_a_score_by_the_threshold_is_told_before_training_too():
    trainer, weights, *_ = trained(TaskSection(kind="reconstruction", score="recall", anomaly_quantile=0.5))
    assert trainer.score(weights) == trainer.scores(weights)["recall"]


def test_only_what_is_asked_of_such_a_task_is_answered():
    _, weights, bundle, data = trained(TaskSection(kind="regression"))
    predictor = Predictor.of(write_inference(bundle, weights, {}))
    with pytest.raises(DataError, match="a regression, which has no probabilities"):
        predictor.probabilities(data.x_test)
    with raises(DataError, "2 numbers", "3 outputs"):
        predictor.figures(predictor.answers(data.x_test), data.y_test[:, :2], "test")


def test_the_served_models_threshold_is_of_the_devices_own_normal_samples():
    section = TaskSection(kind="reconstruction", anomaly_quantile=0.75)
    trainer, weights, _, data = trained(section)
    model = {"name": "mlp", "input_shape": list(SHAPE), "num_classes": 12}
    run = {"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}}
    task = {"task": {"kind": "reconstruction", "anomaly_quantile": 0.75}}

    class Memory:
        data, plain = None, False

        def read(self):
            return self.data

        def write(self, data):
            self.data = data

    memory = Memory()
    enrolment, files = prepare(parse_run(run | task)), DeployedFiles(memory, None, None, None)
    round_ = TrainingRound(RoundAttempt(1, 1), trainer, Key(0), {})
    extensions_of(RunStart(enrolment, trainer, files)).after_training(round_, TrainingResult(weights))
    threshold = read_deployed(memory.data, trainer.spec).record.threshold
    found = trainer.threshold(weights)
    assert threshold == found.error
    normal = np.sort(trainer.losses(weights, "test")[data.y_test == 0])
    rank = int(np.ceil(0.75 * (normal.size + 1)))
    assert threshold == pytest.approx(normal[rank - 1], rel=2e-4)  # of samples that nothing was trained on
    assert (normal > threshold).sum() == normal.size - rank
    assert read_deployed(memory.data, trainer.spec).record.false_alarms == found.false_alarms
    assert found.false_alarms.num_samples == normal.size
    assert found.false_alarms.of == "test"
    assert found.false_alarms.expected == (normal.size + 1 - rank) / (normal.size + 1)


SAID = {
    "classification": (["taken for", "right: "], {"labels", "names", "probabilities", "accuracy"}),
    "multi-label": (["probabilities", "macro F1", "exact match"], {"probabilities", "present"}),
    "regression": (["prediction", "RMSE", "R²"], {"numbers"}),
    "forecast": (["prediction", "MAE"], {"numbers"}),
    "reconstruction": (
        ["anomaly", "anomalies: ", "errors above", "expected false alarms ", "by ", " test samples", "AUROC"],
        {"error", "anomaly", "threshold", "false_alarms"},
    ),
}


@pytest.mark.parametrize("kind", SAID)
def test_predict_says_what_the_task_asks(kind, tmp_path):
    trainer, weights, bundle, data = trained(TaskSection(kind=kind))
    model, samples = tmp_path / "m.onnx", tmp_path / "s.npz"
    model.write_bytes(write_inference(bundle, weights, {}, threshold=trainer.threshold(weights)))
    np.savez(samples, x=data.x_test, y=data.y_test)

    def said(*more):
        result = CliRunner().invoke(app, ["predict", "--model", str(model), "--data", *more])
        assert result.exit_code == 0, result.output
        return result.output

    words, keys = SAID[kind]
    shown = said(f"npz:{samples}")
    assert all(word in shown for word in [*words, "... and 10 more"])
    answer = json.loads(said(f"npz:{samples}", "--json"))
    assert answer.keys() == keys | {"scores", "model"}
    assert answer["scores"] == pytest.approx(trainer.scores(weights), rel=1e-4)
    np.save(tmp_path / "x.npy", data.x_test)
    assert json.loads(said(str(tmp_path / "x.npy"), "--json"))["scores"] == {}
