"""edge-sim sweep: every combination is played once, the best stands first, and mistakes cost nothing."""

import csv
import io
import json
import shutil
from dataclasses import replace

import pytest
from rich.console import Console
from tests.tools.compare.test_compare import settings_of
from typer.testing import CliRunner

import fleetune
import fleetune.tools.compare.report
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.tools.cli import app
from fleetune.tools.compare.plots import draw
from fleetune.tools.compare.sweep_axes import Axis, axes_of, combinations
from fleetune.tools.compare.tables import MOST_ROWS, sweep_table

OVER = ["training.learning_rate=0.02,0.3", "fleet.ratios=[0.2],[1.0]"]
KEYS = ["training.learning_rate", "fleet.ratios"]


def play(folder, over=OVER, *, seeds=2, fresh=False, **sections):
    """The comparison and what the console said."""
    console = Console(width=100, file=io.StringIO(), color_system=None)
    found = fleetune.sweep(
        settings_of(**sections), over, runs=folder, seeds=seeds, fresh=fresh, console=console
    )
    return found.comparison, console.file.getvalue()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two settings, two values each, two seeds: folder, comparison, console."""
    runs = tmp_path_factory.mktemp("runs")
    return runs / "duel.sweep", *play(runs)


def rows_of(file):
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_all_combinations_are_played_with_what_they_say(swept):
    folder, comparison, said = swept
    assert len(comparison.runs) == 8
    assert "8 of 8 runs" in said
    kept = [json.loads(file.read_text()) for file in folder.glob("*/seed-*/run.json")]
    found = {(one["training"]["learning_rate"], *one["fleet"]["ratios"], one["run"]["seed"]) for one in kept}
    assert found == {(rate, ratio, seed) for rate in (0.02, 0.3) for ratio in (0.2, 1.0) for seed in (3, 4)}


def test_the_best_stands_first_everywhere(swept):
    folder, comparison, said = swept
    means = [comparison.spread(one.label, PERSONAL_MEAN).mean for one in comparison.shown]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]
    rows = rows_of(folder / "runs.csv")
    best = {key: comparison.shown[0].value(key) for key in KEYS}
    assert [rows[0][key] for key in KEYS] == [json.dumps(best[key]) for key in KEYS]
    assert list(dict.fromkeys(row["configuration"] for row in rows)) == [c.label for c in comparison.shown]
    assert said.rstrip().splitlines()[-1].startswith(comparison.shown[0].label)


def test_a_run_of_it_is_the_run_that_set_would_have_made(swept, tmp_path):
    _, comparison, _ = swept
    (run,) = [one for one in comparison.of("learning_rate=0.3, ratios=[0.2]") if one.seed == 4]
    own = {"training": {"learning_rate": 0.3}, "fleet": {"ratios": [0.2]}}
    alone, _ = play(tmp_path, ["run.rounds=3"], seeds=[4], **own)
    assert alone.runs[0].records == run.records


def test_it_goes_on_and_new_values_and_seeds_play_what_is_new(swept, tmp_path, played):
    folder, comparison, _ = swept
    copy = shutil.copytree(folder.parent, tmp_path / "copy")
    again, said = play(copy)
    assert played == []
    assert "8 of 8 runs are finished already" in said
    assert [one.label for one in again.shown] == [one.label for one in comparison.shown]
    more, _ = play(copy, ["training.learning_rate=0.02,0.1,0.3", OVER[1]])
    new = [f"learning_rate=0.1, ratios=[{p}], seed {seed}" for p in (0.2, 1.0) for seed in (3, 4)]
    assert sorted(played) == new
    assert len(more.shown) == 6


def test_methods_are_settings_like_others_and_take_only_their_own(tmp_path, played):
    found, _ = play(
        tmp_path,
        ["method.name=fedspu,local-only", "training.epochs=1,2"],
        seeds=1,
        method={"name": "fedspu", "early_stopping": True},
        data={"validation_fraction": 0.2},
    )
    methods = {one.label: dict(one.method) for one in found.configurations}
    assert methods["method=local-only, epochs=2"] == {"name": "local-only"}
    assert methods["method=fedspu, epochs=1"] == {"name": "fedspu", "early_stopping": True}
    assert len(played) == 4


def test_what_each_setting_makes_of_it_is_drawn(swept):
    folder, comparison, _ = swept
    figures = draw(comparison)
    assert list(figures)[: len(KEYS)] == [f"score-by-{key}" for key in KEYS]
    (axes,) = figures["score-by-training.learning_rate"].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.02", "0.3"]
    best = axes.get_lines()[-1].get_ydata()
    means = {one.label: 100 * comparison.spread(one.label, PERSONAL_MEAN).mean for one in comparison.shown}
    assert list(best) == pytest.approx(
        [max(mean for label, mean in means.items() if f"rate={rate}," in label) for rate in (0.02, 0.3)]
    )
    assert {f"score-by-{key}.png" for key in KEYS} <= {file.name for file in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "4 combinations compared" in page
    assert "whatever the other settings are" in page


def test_pictures_of_another_sweep_do_not_stay(swept, tmp_path, played):
    old = tmp_path / "duel.sweep" / "score-by-training.epochs.png"
    old.parent.mkdir()
    old.write_bytes(b"")
    play(tmp_path, ["training.learning_rate=0.02,0.3"], seeds=1)
    assert not old.exists()


def test_a_long_table_shows_the_best_and_says_where_the_others_are(swept):
    _, comparison, _ = swept
    many = [one for one in comparison.configurations for _ in range(MOST_ROWS)]
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(sweep_table(replace(comparison, configurations=tuple(many))))
    assert f"{len(many) - MOST_ROWS} more: report.html" in console.file.getvalue()


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        (["run.seed=1,2"], "use --seeds instead"),
        (["compare.a.name=fedavg"], "use edge-sim compare instead"),
        (["method=fedavg,fedspu"], "use section.key=value,value"),
        (["training.epochs"], "use section.key=value,value"),
        (["training.epochs="], "use section.key=value,value"),
        (["training.epochs=1,2", "training.epochs=3"], "is named twice; give all its values"),
        (["training.epochs=1,1"], "1 is named twice"),
        (["training.epoch=1"], "epoch=1: training.epoch: unknown key; did you mean `epochs`"),
        (["training.epochs=0,1"], r"epochs=0: training.epochs: expected `int` >= 1"),
        (["method.q=0.1,0.2"], r"q=0.1: method.q: fedspu has no such setting"),
        ([f"{key}={','.join(map(str, range(1, 400)))}" for key in ("a.b", "a.c")], "runs, but at most"),
        ([], "name at least one setting"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_played(over, problem, tmp_path, played):
    with pytest.raises(SettingError, match=problem):
        play(tmp_path / "none", over)
    assert played == []
    assert not (tmp_path / "none").exists()


def test_values_are_read_as_toml_and_bare_words_as_text():
    axes = axes_of(["a.b=1, 2.5,true", "encoding.up=int4,lowrank", "fleet.ratios=[0.1,0.2],[]"])
    assert axes == [
        Axis("a.b", (1, 2.5, True)),
        Axis("encoding.up", ("int4", "lowrank")),
        Axis("fleet.ratios", ([0.1, 0.2], [])),
    ]
    assert axes_of({"encoding.up": ["int4", {"name": "lowrank"}]}) == [
        Axis("encoding.up", ("int4", {"name": "lowrank"}))
    ]
    labels = [one.label for one in combinations(settings_of(), axes_of(["a.b=1,2", "c.b=x,y"]), 1)]
    assert labels == ["a.b=1, c.b=x", "a.b=1, c.b=y", "a.b=2, c.b=x", "a.b=2, c.b=y"]


def test_a_combination_that_cannot_run_does_not_stop_the_others(tmp_path, played):
    with pytest.raises(FleetuneError, match=r"uplink_mbps=0.00001, seed 3: no device"):
        play(tmp_path, ["fleet.uplink_mbps=1e-5,10"], seeds=1, round={"deadline_s": 5})
    rows = rows_of(tmp_path / "duel.sweep" / "runs.csv")
    assert [row["fleet.uplink_mbps"] for row in rows] == ["10"]
    assert "uplink_mbps=0.00001, seed 3" in (tmp_path / "duel.sweep" / "report.html").read_text()


def test_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fleetune.tools.compare.report, "can_paint", lambda: False)
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "small"\nrounds = 2\n[model]\nname = "mlp"\n[method]\nname = "fedavg"\n'
        '[data.partition]\nkind = "dirichlet"\nsamples = 40\n[fleet]\ndevices = 3\n'
    )
    runs = str(tmp_path / "runs")
    options = ["--runs", runs, "--workers", "0"]
    done = CliRunner().invoke(app, ["sweep", str(file), "--over", "training.epochs=1,2", *options])
    assert done.exit_code == 0, done.output
    assert "epochs=" in done.output.splitlines()[-1]
    assert (tmp_path / "runs" / "small.sweep" / "runs.csv").exists()
    wrong = CliRunner().invoke(app, ["sweep", str(file), "--over", "training.epochs=no", *options])
    assert wrong.exit_code == 2
    assert "epochs=no: training.epochs" in wrong.output
