"""A sweep ranks by validation samples where devices hold some out, else by test samples, and says which."""

import pytest
from rich.console import Console

import fleetune
from fleetune.coordinator.extensions.reply_claims import check_scores
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, VALIDATION_MEAN
from fleetune.coordinator.metrics.summary import Accuracies, Summary
from fleetune.coordinator.reports.tables import device_table, run_table
from fleetune.protocols.errors import PacketOverclaimed
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.compare.comparison import Comparison, Configuration
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.tables import comparison_tables, sweep_table

RUN = {
    "run": {"name": "r", "rounds": 1},
    "data": {"source": "digits", "validation_fraction": 0.3},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
    "training": {"epochs": 5},
    "fleet": {"devices": 3},
}


def compared(**scores):
    """Combinations by their (test, validation) scores."""
    runs, configurations = [], []
    for name, (test, validation) in scores.items():
        given = {} if validation is None else {"validation_mean": validation}
        judged = Accuracies(personal_mean=test, **given)
        configurations.append(Configuration(name, {"name": name}))
        runs.append(FinishedRun(name, 0, Summary(method=name, accuracy=judged), ()))
    return Comparison("r", tuple(configurations), (0,), tuple(runs), None, ("method.name",))


def shown(table):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_validation_samples_decide_where_all_have_them():
    found = compared(a=(0.9, 0.5), b=(0.7, 0.8), c=(0.8, 0.6)).ranked
    assert [one.label for one in found.shown] == ["b", "c", "a"]
    assert "ranked by validation samples" in shown(sweep_table(found))
    assert found.ranked_by == VALIDATION_MEAN


def test_without_them_test_samples_do_and_it_is_said():
    found = compared(a=(0.9, 0.5), b=(0.7, None)).ranked
    assert [one.label for one in found.shown] == ["a", "b"]
    assert "ranked by test samples, so the best score is optimistic" in shown(sweep_table(found))
    assert found.ranked_by == PERSONAL_MEAN


def test_devices_tell_validation_scores_and_tables_show_them(tmp_path):
    found = fleetune.sweep(RUN, {"training.learning_rate": [0.0001, 0.1]}, runs=tmp_path)
    means = found.frame["accuracy_validation_mean"]
    assert means.iloc[0] == max(means) > min(means)
    assert "best on validation samples" in repr(found)
    summary = found.comparison.runs[0].summary
    rows = summary.by_device.values()
    assert summary.accuracy.validation_mean == pytest.approx(sum(row.validation for row in rows) / 3)
    assert any(row.validation != row.personal for row in rows)
    for table in (run_table(summary), device_table(summary), comparison_tables(found.comparison)):
        assert "validation" in shown(table)


def test_a_search_ranks_by_validation_samples_too(tmp_path):
    optuna = pytest.importorskip("optuna")
    found = fleetune.sweep(RUN, {"training.learning_rate": "0.001..0.2:log"}, search=2, runs=tmp_path)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(found.folder / "search.journal"))
    )
    [study] = optuna.get_all_study_summaries(storage)
    assert study.best_trial.value == max(found.frame["accuracy_validation_mean"])


def test_a_validation_score_that_cannot_be_is_refused():
    with pytest.raises(PacketOverclaimed, match="validation is 2"):
        check_scores(Measures(3, 3, validation=2.0), task_of(TaskSection()))
