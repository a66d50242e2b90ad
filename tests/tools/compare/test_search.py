"""edge-sim sweep --search: Optuna chooses, each trial is played once, and the same command goes on."""

import math

import pytest
from tests.tools.compare.test_compare import settings_of
from tests.tools.compare.test_sweep import rows_of

import fleetune
import fleetune.tools.compare.report
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN
from fleetune.protocols.errors import SettingError
from fleetune.tools.compare.plots import NAMED_VALUES, draw
from fleetune.tools.compare.sweep_axes import Axis, Range, axes_of

OVER = ["training.learning_rate=0.01..0.5:log", "training.epochs=1..2", "fleet.ratios=[0.4],[1.0]"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(fleetune.tools.compare.report, "can_paint", lambda: False)


@pytest.mark.parametrize(
    ("words", "axis"),
    [
        ("training.learning_rate=0.01..0.2:log", Range("training.learning_rate", 0.01, 0.2, log=True)),
        ("training.learning_rate = 1e-3 .. 0.2", Range("training.learning_rate", 0.001, 0.2)),
        ("training.epochs=1..5", Range("training.epochs", 1, 5)),
        ("a.b=-1..1", Range("a.b", -1, 1)),
        ("a.b=1,2", Axis("a.b", (1, 2))),
        ('a.b="../x"', Axis("a.b", ("../x",))),
    ],
)
def test_ranges_stand_beside_values(words, axis):
    assert axes_of([words]) == [axis]
    key, _, value = words.partition("=")
    assert axes_of({key.strip(): value}) == [axis]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("a.b=2..1", "the first number must be less"),
        ("a.b=x..1", "two numbers"),
        ("a.b=true..2", "two numbers"),
        ("a.b=0..1:log", "numbers above 0"),
        ("a.b=1..inf", "the first number must be less"),
    ],
)
def test_a_range_that_is_none_is_refused(words, problem):
    with pytest.raises(SettingError, match=problem):
        axes_of([words])


def test_a_range_without_a_search_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"training.epochs=1\.\.2: .*--search"):
        fleetune.sweep(settings_of(), {"training.epochs": "1..2"}, runs=tmp_path)


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("fleetune.tools.compare.search.find_spec", lambda _: None)
    with pytest.raises(SettingError, match="Optuna is not installed here: pip install optuna"):
        fleetune.sweep(settings_of(), {"training.epochs": "1..2"}, search=2, runs=tmp_path)


class TestSearching:
    """What needs Optuna."""

    @pytest.fixture(autouse=True)
    def _optuna(self):
        pytest.importorskip("optuna")

    def search(self, folder, trials, over=OVER, **options):
        keyed = {one.partition("=")[0]: one.partition("=")[2] for one in over}
        return fleetune.sweep(settings_of(), keyed, search=trials, runs=folder, **options)

    def test_trials_lie_in_what_was_asked_for_and_the_best_comes_first(self, tmp_path):
        found = self.search(tmp_path, 5)
        assert 2 <= len(found.comparison.shown) <= 5
        for one in found.comparison.shown:
            rate, epochs = one.changes["training.learning_rate"], one.changes["training.epochs"]
            assert 0.01 <= rate <= 0.5
            assert float(f"{rate:.4g}") == rate
            assert epochs in (1, 2)
            assert isinstance(epochs, int)
            assert one.changes["fleet.ratios"] in ([0.4], [1.0])
        means = [found.comparison.spread(one.label, PERSONAL_MEAN).mean for one in found.comparison.shown]
        assert means == sorted(means, reverse=True)
        rows = rows_of(found.folder / "runs.csv")
        assert [float(row["accuracy_personal_mean"]) for row in rows] == means
        assert float(rows[0]["training.learning_rate"]) == found.best["training.learning_rate"]

    def test_it_goes_on_to_the_same_trials_whenever_it_was_stopped(self, tmp_path, played):
        whole = self.search(tmp_path / "whole", 4)
        played.clear()
        self.search(tmp_path / "parts", 2)
        first = list(played)
        parts = self.search(tmp_path / "parts", 4)
        assert len(set(played)) == len(played), "no run is played twice"
        assert played[: len(first)] == first
        assert [one.label for one in parts.comparison.shown] == [one.label for one in whole.comparison.shown]
        played.clear()
        self.search(tmp_path / "parts", 4)
        assert played == []

    def test_a_trial_that_was_under_way_is_played_to_its_end_first(self, tmp_path, played, monkeypatch):
        from fleetune.tools.compare import search

        plain, stops = search.run_experiment, iter([False, True])

        def stopping(*arguments):
            if next(stops, False):
                raise KeyboardInterrupt
            return plain(*arguments)

        monkeypatch.setattr(search, "run_experiment", stopping)
        with pytest.raises(KeyboardInterrupt):
            self.search(tmp_path / "stopped", 3)
        assert len(played) == 1
        assert len(rows_of(tmp_path / "stopped" / "duel.sweep" / "runs.csv")) == 1
        stopped = self.search(tmp_path / "stopped", 3)
        again = list(played)
        played.clear()
        whole = self.search(tmp_path / "whole", 3)
        assert again == played
        assert [one.label for one in stopped.comparison.shown] == [
            one.label for one in whole.comparison.shown
        ]

    def test_other_ranges_are_another_search_and_runs_of_before_are_kept(self, tmp_path, played):
        self.search(tmp_path, 2, ["training.epochs=1..2"])
        assert sorted(set(played)) == sorted(played)
        played.clear()
        found = self.search(tmp_path, 2, ["training.epochs=1..3"])
        assert all(1 <= one.changes["training.epochs"] <= 3 for one in found.comparison.shown)

    def test_a_combination_that_cannot_run_does_not_end_it(self, tmp_path):
        over = {"fleet.uplink_mbps": [1e-5, 10]}
        found = fleetune.sweep(settings_of(round={"deadline_s": 5}), over, search=6, runs=tmp_path)
        assert [one.changes for one in found.comparison.shown] == [{"fleet.uplink_mbps": 10}]
        assert "no device can take part" in (found.folder / "report.html").read_text()

    @pytest.mark.parametrize(
        ("over", "trials", "problem"),
        [
            (["training.epochs=0..2"], 2, r"epochs=0: training.epochs: expected `int` >= 1"),
            (["training.epoch=1..2"], 2, "unknown key; did you mean `epochs`"),
            (OVER, 0, "between 1 and 10,000"),
        ],
    )
    def test_a_mistake_is_told_before_anything_is_played(self, tmp_path, over, trials, problem, played):
        with pytest.raises(SettingError, match=problem):
            self.search(tmp_path / "none", trials, over)
        assert played == []
        assert not (tmp_path / "none").exists()

    def test_many_numbers_stand_on_an_axis_of_numbers(self, tmp_path):
        over = ["training.learning_rate=0.001..0.5:log"]
        found = self.search(tmp_path, NAMED_VALUES + 1, over, set={"run.rounds": 1})
        figure = draw(found.comparison)["score-by-training.learning_rate"]
        (axes,) = figure.axes
        assert axes.get_xscale() == "log"
        drawn = sorted(line.get_xdata()[0] for line in axes.get_lines())
        rates = sorted(one.changes["training.learning_rate"] for one in found.comparison.shown)
        assert all(math.isclose(one, other) for one, other in zip(drawn, rates, strict=True))


def test_the_number_of_trials_has_bounds(tmp_path):
    with pytest.raises(SettingError, match=r"^search 0: .*between 1"):
        fleetune.sweep(settings_of(), ["training.epochs=1..2"], search=0, runs=tmp_path)
