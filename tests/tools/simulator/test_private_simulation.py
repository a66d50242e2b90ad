"""Simulations with [privacy]: they can be repeated, end in time, and epsilon stands in every result."""

import json

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from fleetune.coordinator.extensions.privacy.accountant import epsilon_of
from fleetune.coordinator.queries import queries
from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.reports.tables import run_table
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.research.result import read_result
from fleetune.tools.simulator.runner import simulate, write_results


def settings(noise="central", *, seed=0, samples=60, rounds=6, **privacy):
    section = {"clip": 0.5, "noise_multiplier": 4.0, "delta": 1e-3, "noise": noise, "scores": True, **privacy}
    return parse_run(
        {
            "run": {"name": "private", "rounds": rounds, "seed": seed},
            "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
            "method": {"name": "fedavg"},
            "data": {"source": "digits", "partition": {"kind": "iid", "samples": samples}},
            "training": {"batch_size": 10},
            "fleet": {"devices": 4},
            **({} if noise is None else {"privacy": section}),
        }
    )


@pytest.mark.parametrize("noise", ["central", "local"])
def test_a_private_simulation_is_the_same_again_and_another_with_another_seed(noise, tmp_path):
    models = []
    for number, seed in enumerate((0, 0, 1)):
        rule = settings(noise, seed=seed, rounds=2)
        run, _ = simulate(rule, tmp_path / str(number), workers=0, fresh=True)
        models.append(run.controller.shared_model.copy())
        run.store.close()
    assert np.array_equal(models[0], models[1])
    assert not np.array_equal(models[0], models[2])


def test_epsilon_stands_in_summary_status_lines_report_and_data_frames(tmp_path):
    limit = 1.5
    rule = settings(max_epsilon=limit)
    run, summary = simulate(rule, tmp_path, workers=0, fresh=True)
    most = summary.privacy.most_tasks
    spent = epsilon_of(rule.privacy, most)
    assert 1 < most < 6
    assert spent <= limit < epsilon_of(rule.privacy, most + 1)
    assert summary.ended == "a further round would exceed privacy.max_epsilon = 1.5"
    assert (summary.privacy.epsilon, summary.privacy.tasks) == (spent, most)
    assert {row.epsilon for row in summary.by_device.values()} == {spent}
    records = run.controller.records()
    write_results(run, summary)
    run.store.close()
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"]["epsilon"] == spent
    words = (
        f"epsilon {spent:.3g} of 1.5, delta 0.001; {most} of {most} tasks, central noise, scores outside it"
    )
    status = queries.status(tmp_path)
    assert status.privacy.words == words
    assert words in "".join(str(part) for part in LiveView(status).render(width=200).renderables)
    assert words in run_table(summary).caption
    training = [record for record in records if not record.final_evaluation]
    assert [one.epsilon for one in training] == [epsilon_of(rule.privacy, n + 1) for n in range(most)]
    assert f"epsilon {training[0].epsilon:.3g}" in plain_line(training[0], rule)
    assert "Epsilon" in (tmp_path / "report.html").read_text()
    result = read_result(tmp_path)
    assert result.rounds["epsilon"].tolist() == [one.epsilon for one in training]
    assert set(result.devices["epsilon"]) == {spent}


def test_without_scores_no_evaluation_follows_and_few_samples_are_named(tmp_path):
    run, summary = simulate(settings(scores=False, samples=30), tmp_path, workers=0, fresh=True)
    assert not any(record.final_evaluation for record in run.controller.records())
    assert summary.accuracy.best_round is None
    write_results(run, summary)
    run.store.close()
    assert "Fewer than 32 training samples: " in (tmp_path / "report.html").read_text()


def test_a_run_without_privacy_says_nothing_of_it(tmp_path):
    run, summary = simulate(settings(None, rounds=1), tmp_path, workers=0, fresh=True)
    assert b"epsilon" not in msgspec.json.encode([summary, run.controller.records()])
    run.store.close()
    assert summary.privacy is UNSET
    assert queries.status(tmp_path).privacy is None
