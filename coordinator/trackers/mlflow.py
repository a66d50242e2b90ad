"""MLflow: adds runs to the experiment `fleetune`, at MLFLOW_TRACKING_URI or else in ./mlflow.db.

A continued run is found by its id. Only its missing rounds are added.
"""

import logging
import os
import re
import time
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from fleetune.coordinator.trackers.tracker import Outcome, RoundFigures, TrackedRun

EXPERIMENT = "fleetune"
ID = "fleetune.run"  # tag that identifies a continued run
MARK = "round/replies"  # every round has this metric, and it is sent last, so it marks complete rounds
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # limits of one batch in MLflow's API
_UPLOADED = (".json", ".jsonl", ".html", ".png", ".csv")


class MLflow:
    """Sends one run to an MLflow server, or to MLflow's database in a file."""

    def __init__(self, run: TrackedRun) -> None:
        _be_brief()
        self._client = MlflowClient()
        self._folder = run.folder
        self._finished = False
        experiment = _experiment(self._client)
        found = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._begin(experiment, run)
        marks = self._client.get_metric_history(self._run, MARK) if found else []
        there = {mark.step for mark in marks}
        for figures_of_round in run.before:
            if figures_of_round.number not in there:
                self.hear(figures_of_round)

    def hear(self, figures_of_round: RoundFigures) -> None:
        """Send a round's figures."""
        figures = {name: value for name, value in figures_of_round.figures.items() if name != MARK}
        self._log({**figures, MARK: figures_of_round.figures[MARK]}, figures_of_round.number)

    def finish(self, outcome: Outcome) -> None:
        """Send the run's result and its files."""
        there = self._client.get_run(self._run).data.metrics
        self._log(
            {name: one for name, one in outcome.figures.items() if there.get(_name(name)) != one},
            outcome.rounds,
        )
        for path in outcome.files:
            if path.suffix in _UPLOADED:
                inside = path.parent.relative_to(self._folder).as_posix()
                self._client.log_artifact(self._run, str(path), None if inside == "." else inside)
        self._finished = True

    def close(self) -> None:
        """Release the client: the run is over or was stopped."""
        self._client.set_terminated(self._run, "FINISHED" if self._finished else "KILLED")

    def _begin(self, experiment: str, run: TrackedRun) -> str:
        tags = {ID: run.id, "mlflow.source.name": "fleetune", "fleetune.folder": str(run.folder.resolve())}
        run_id: str = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [
            Param(_name(key), str(value)[:_LONGEST_PARAM]) for key, value in sorted(run.parameters.items())
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
        return run_id

    def _log(self, figures: dict[str, float], step: int) -> None:
        now_ms = time.time_ns() // 10**6
        metrics = [Metric(_name(name), value, now_ms, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS])


def _experiment(client: Any) -> str:
    """Return the id of the experiment, which several processes may create at the same moment."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            made: str = client.create_experiment(name)
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
        else:
            return made
    known: str = found.experiment_id
    return known


def _name(name: str) -> str:
    """Return the name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _be_brief() -> None:
    """Give up an unreachable server within seconds, and silence the logs of MLflow's libraries."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    for talker in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(talker).setLevel(logging.ERROR)
