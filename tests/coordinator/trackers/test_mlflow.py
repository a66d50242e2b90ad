"""MLflow has what a run came to, each round once, in a database of its own."""

import logging

import pytest
from tests.coordinator.trackers.test_follow import simulate
from tests.coordinator.trackers.test_tensorboard import Stop, stop_after

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow's and SQLAlchemy's own, which change often


@pytest.fixture(autouse=True)
def _database(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fleetune.coordinator.reports.report.can_paint", lambda: False)


def runs():
    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.get_experiment_by_name("fleetune")
    return client, client.search_runs([found.experiment_id])


def steps(client, run, name):
    return [point.step for point in client.get_metric_history(run.info.run_id, name)]


def test_a_run_that_was_stopped_goes_on_in_the_same_one(tmp_path):
    with pytest.raises(Stop):
        simulate(tmp_path, "mlflow", on_round=stop_after(2))
    client, (run,) = runs()
    assert run.info.status == "KILLED"
    assert sorted(steps(client, run, "score/accuracy_after")) == [1, 2]
    result = simulate(tmp_path, "mlflow")
    client, (run,) = runs()
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert sorted(steps(client, run, "score/accuracy_after")) == [1, 2, 3, 4]
    history = {
        point.step: point.value for point in client.get_metric_history(run.info.run_id, "cost/bytes_up")
    }
    assert history == pytest.approx(result.rounds["bytes_up"].to_dict())
    assert run.data.metrics["summary/accuracy_personal_mean"] == result.summary.accuracy.personal_mean
    assert run.data.params["method.name"] == "fedspu"
    assert run.data.params["run.rounds"] == "4"
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept == {"summary.json", "rounds.jsonl"}


def test_a_server_that_is_gone_costs_a_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert simulate(tmp_path, "mlflow").finished
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(told) == 2
    assert all(line.startswith("mlflow does not follow the run: MlflowException") for line in told)
