"""Trackers follow a run in threads of their own: told everything once, and nothing they do is in its way."""

import csv
import json
import logging
import threading

import pytest
from tests.tools.research.test_research import SECTIONS
from typer.testing import CliRunner

import fleetune
import fleetune.coordinator.reports.report
import fleetune.tools.compare.report
from fleetune import coordinator, tools
from fleetune.coordinator.trackers import follow
from fleetune.coordinator.trackers.follow import parameters_of
from fleetune.coordinator.trackers.tracker import TRACKERS, TrackedRun, makers_of
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.tools.cli import app


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for module in (coordinator.reports.report, tools.compare.report):
        monkeypatch.setattr(module, "can_paint", lambda: False)


class Noting:
    """Made for a run; fails at the rounds `fails_at`, and takes in none before `waits_for` is set."""

    def __init__(self, fails_at=(), waits_for=None):
        self.fails_at, self.waits_for = fails_at, waits_for
        self.runs, self.rounds, self.outcomes, self.closed, self.threads = [], [], [], 0, set()

    def __call__(self, run):
        assert isinstance(run, TrackedRun)
        self.runs.append(run)
        self.rounds = [told.number for told in run.before]
        return self

    def hear(self, told):
        self.threads.add(threading.current_thread())
        if self.waits_for is not None:
            assert self.waits_for.wait(60)
        if told.number in self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.rounds.append(told.number)
        self.last = told

    def finish(self, outcome):
        self.outcomes.append(outcome)

    def close(self):
        self.closed += 1


def simulate(folder, *trackers, rounds=4, **options):
    return fleetune.simulate(
        SECTIONS, folder, set={"run.rounds": rounds}, report=False, trackers=trackers, **options
    )


def test_a_tracker_is_told_every_round_and_what_the_run_came_to(tmp_path):
    noting = Noting()
    result = simulate(tmp_path, noting)
    (run,) = noting.runs
    assert (run.name, run.folder, run.before, run.simulated) == ("small", tmp_path / "small", (), True)
    assert run.parameters["method.name"] == "fedspu"
    assert run.parameters["fleet.ratios"] == "[0.4,1.0]"
    assert run.parameters["run.seed"] == 3
    assert noting.rounds == [1, 2, 3, 4]
    assert threading.current_thread() not in noting.threads
    last = result.rounds.loc[4]
    told = noting.last.figures
    for group, names in {
        "score": ("accuracy_before", "accuracy_after", "accuracy_after_of_fleet"),
        "cost": ("bytes_up", "bytes_down", "joules", "seconds"),
        "round": ("participants", "replies", "closed_s", "devices_so_far"),
    }.items():
        for name in names:
            assert told[f"{group}/{name}"] == pytest.approx(last[name]), name
    inside = result.diagnostics.query("round == 4 and figure == 'active_share' and part.isna()")
    assert told["diagnostics/active_share"] == pytest.approx(inside["mean"].iloc[0])
    (outcome,) = noting.outcomes
    assert outcome.rounds == 4
    assert outcome.figures["summary/bytes_up"] == result.summary.bytes.up
    assert outcome.figures["summary/accuracy_personal_mean"] == result.summary.accuracy.personal_mean
    assert {path.name for path in outcome.files} >= {"summary.json", "rounds.jsonl"}
    assert noting.closed == 1


def test_one_that_fails_costs_a_line_and_has_all_of_it_in_the_end(tmp_path, caplog):
    bad, good = Noting(fails_at=[2]), Noting()
    result = simulate(tmp_path, bad, good)
    assert good.rounds == bad.rounds == [1, 2, 3, 4]
    assert len(bad.runs) == 2
    assert len(bad.outcomes) == 1
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == (
        "Noting does not follow the run: ConnectionError: the server is gone;"
        " it is told the rest when the run is over"
    )
    assert result.finished


def test_one_that_cannot_even_begin_harms_nobody(tmp_path, caplog):
    def broken(_):
        raise OSError("no space left")

    assert simulate(tmp_path, broken).finished
    assert [one.levelno for one in caplog.records] == [logging.WARNING] * 2
    assert "broken does not follow the run: OSError: no space left" in caplog.text


def test_one_that_is_slow_holds_up_nobody_and_misses_nothing(tmp_path, monkeypatch):
    """It takes in nothing before the last round is over; more rounds wait for it than may."""
    monkeypatch.setattr(follow, "MOST_WAITING", 2)
    all_played = threading.Event()
    slow = Noting(waits_for=all_played)
    simulate(tmp_path, slow, rounds=8, on_round=lambda row: all_played.set() if row["round"] == 8 else None)
    assert slow.rounds == list(range(1, 9))
    assert len(slow.runs) == 2, "the second has all rounds as those before"


def test_one_that_hangs_is_left_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(follow, "LAST_WORDS_S", 0.2)
    never, hung = threading.Event(), Noting()
    monkeypatch.setattr(hung, "hear", lambda _: never.wait(60))
    assert simulate(tmp_path, hung).finished
    never.set()
    assert "Noting does not have all of the run: it took more than 0 s" in caplog.text


def test_a_run_that_goes_on_is_the_same_one(tmp_path):
    class Stop(Exception):
        pass

    def stop(row):
        if row["round"] == 2:
            raise Stop

    first, then = Noting(), Noting()
    with pytest.raises(Stop):
        simulate(tmp_path, first, on_round=stop)
    assert (first.outcomes, first.closed) == ([], 1)
    simulate(tmp_path, then)
    assert first.runs[0].id == then.runs[0].id
    assert [told.number for told in then.runs[0].before] == first.rounds == [1, 2]
    assert then.rounds == [1, 2, 3, 4]
    whole = Noting()
    simulate(tmp_path / "other", whole)
    assert then.last.figures == pytest.approx(whole.last.figures)
    assert whole.runs[0].id != then.runs[0].id


def test_each_run_of_a_comparison_and_of_a_sweep_is_one(tmp_path):
    noting = Noting()
    fleetune.compare(SECTIONS, ["fedspu"], seeds=2, runs=tmp_path, set={"run.rounds": 1}, trackers=[noting])
    assert [run.name for run in noting.runs] == ["small.compare/fedspu/seed-3", "small.compare/fedspu/seed-4"]
    over = {"training.epochs": [2]}
    fleetune.sweep(SECTIONS, over, runs=tmp_path, set={"run.rounds": 1}, trackers=[noting])
    assert noting.runs[-1].name == "small.sweep/epochs=2/seed-3"
    assert len(noting.outcomes) == 3
    assert {path.name for path in noting.outcomes[-1].files} >= {"summary.json", "rounds.jsonl"}


WRITES = """
import csv

def rows(run):
    return Rows(run)

class Rows:
    def __init__(self, run):
        self.file = (run.folder.parent / f"{run.name}.csv").open("w", newline="")
        self.rows = csv.writer(self.file)
        for told in run.before:
            self.hear(told)

    def hear(self, told):
        self.rows.writerow([told.number, told.figures["score/accuracy_after"]])

    def finish(self, outcome):
        self.rows.writerow(["end", outcome.figures["summary/rounds"]])

    def close(self):
        self.file.close()
"""


def test_the_command_takes_a_user_s_own_also_for_a_run_that_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tracker.py").write_text(WRITES)
    (tmp_path / "run.json").write_text(json.dumps(SECTIONS))
    (tmp_path / "small.toml").write_text(
        'run = { name = "small", rounds = 2 }\nmodel = { name = "mlp" }\nmethod = { name = "fedavg" }\n'
        'data = { source = "digits", partition = { samples = 40 } }\nfleet = { devices = 3 }\n'
    )
    words = ["run", "small.toml", "--workers", "0", "--follow", "--tracker", "my_tracker:rows"]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        with (tmp_path / "runs" / "small.csv").open(newline="") as file:
            assert [row[0] for row in csv.reader(file)] == ["1", "2", "end"]
        (tmp_path / "runs" / "small.csv").unlink()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlfow", "there is none; did you mean 'mlflow'?"),
        ("wandb", "there is none; known: tensorboard, mlflow"),
        ("no_such_module:make", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:nothing", "AttributeError: module 'json' has no attribute 'nothing'"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anything_is_played(tmp_path, name, words):
    with pytest.raises(SettingError, match=f"tracker {name}: {words[:20]}") as told:
        simulate(tmp_path, name)
    assert words in str(told.value)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_not_installed_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr("fleetune.coordinator.trackers.tracker.find_spec", lambda _: None)
    with pytest.raises(SettingError, match=f"tracker {name}: it is not installed here: pip install"):
        makers_of([name])


def test_only_settings_that_were_said_are_parameters():
    said = parameters_of(settings_of({**SECTIONS, "encoding": {"up": "int4"}}, {}))
    assert said["encoding.up"] == "int4"
    assert said["data.partition.samples"] == 40
    assert said["fleet.links.rural-dsl"] == 2
    assert "training.epochs" not in said
    assert "compare" not in {key.partition(".")[0] for key in said}
