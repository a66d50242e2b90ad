"""edge-sim paper: what a paper's accuracy means, what a run may claim, and every cell at tiny scale."""

import io
import json
import re
import tomllib

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.conftest import tiny_spec
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_partition import partition
from typer.testing import CliRunner

import fleetune.tools.compare.engine
from fleetune.coordinator.metrics.summary import Accuracies, PayloadBytes, Summary
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.methods import from_section
from fleetune.protocols.randomness import Key
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.simulation import Partition
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.cli import app
from fleetune.tools.compare.engine import Execution
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.runs import execute_all
from fleetune.tools.papers.cells import CELLS, cell_names, read_cell
from fleetune.tools.papers.measures import MEASURES, CellResult, label_of, measures_with, number
from fleetune.tools.papers.paper import run_cell, table_of

FILES = ["dc-pfl-fmnist", "fedpurin-fmnist", "fedspu-cifar10", "kapc-mnist", "srp-pfed-cifar10"]
ROWS = ["fedpurin-fmnist-short", "fedspu-cifar10-early-stopping", "kapc-bls-mnist", "kapc-mnist-fedavg"]
COUNTED = [name for name in cell_names() if MEASURES[read_cell(name)[0].paper.accuracy].counted]
TINY = [
    "run.rounds=1",
    "run.final_evaluation=false",
    "fleet.devices=4",
    "training.epochs=1",
    "data.partition.samples=12",
]


def quiet():
    return Console(width=100, file=io.StringIO(), color_system=None)


def play(name, folder, source, *changes, seeds=1, fresh=False):
    console = quiet()
    execution = Execution(folder / "paper", 0, fresh=fresh, console=console)
    outcome = run_cell(name, execution, seeds=seeds, changes=changes, data=source)
    return outcome, console.file.getvalue()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """400 noise images of each cell's shape."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    made = {}
    for kind, shape in (("idx", (1, 28, 28)), ("cifar", (3, 32, 32))):
        file = folder / f"{kind}.npz"
        np.savez(file, x=rng.integers(0, 256, (400, *shape), np.uint8), y=np.arange(400) % 10)
        made[kind] = f"npz:{file}"
    return made


# what accuracy means


def hand_made(rounds, *, seed=0):
    """Round r: device name -> (before, after, samples)."""
    records = [
        RoundRecord(
            number,
            1,
            False,
            number - 1.0,
            float(number),
            (),
            {
                name: DeviceRound(1.0, 1, 1, Measures(samples, 5, 0.1, before, after), RoundCost())
                for name, (before, after, samples) in devices.items()
            },
        )
        for number, devices in enumerate(rounds, 1)
    ]
    summary = Summary(
        method="fedavg",
        rounds=len(records),
        accuracy=Accuracies(personal_mean=0.5, personal_weighted=0.6),
        bytes=PayloadBytes(up=7, down=9),
    )
    return FinishedRun("x", seed, summary, records)


def test_each_reading_of_accuracy():
    run = hand_made(
        [
            {"a": (0.1, 0.5, 10), "b": (0.3, 0.9, 30)},  # the fleet: 0.7, weighted 0.8
            {"a": (0.9, 0.8, 10)},  # 0.85, weighted 0.875
            {"b": (0.7, 0.2, 30)},  # 0.5, weighted 0.35
        ]
    )
    found = {name: MEASURES[name].of(run) for name in measures_with("best-mean")}
    assert found.pop("seconds-up") == 0.0
    assert found == {
        "best-mean": pytest.approx(0.85),
        "best-weighted": pytest.approx(0.875),
        "best-participants-mean": pytest.approx(0.8),
        "best-participants-weighted": pytest.approx(0.8),
        "best-before-mean": pytest.approx(0.8),
        "final-mean": 0.5,
        "final-weighted": 0.6,
        "final-before-mean": None,
    }


def test_a_first_lucky_round_of_few_devices_is_no_best_round_of_the_fleet():
    run = hand_made([{"a": (0, 1.0, 1)}, {"b": (0, 0.2, 1), "c": (0, 0.2, 1)}, {"d": (0, 0.2, 1)}])
    assert MEASURES["best-mean"].of(run) == pytest.approx(1.4 / 3)
    assert MEASURES["best-participants-mean"].of(run) == 1.0


def test_an_accuracy_nobody_measured_is_none():
    assert MEASURES["best-mean"].of(hand_made([{"a": (None, None, 1)}])) is None


# what may be claimed


def outcome_of(*values, deviation=0.01, scaled=()):
    cell, _ = read_cell("kapc-mnist")
    paper = replace(cell.paper, value=0.9, deviation=deviation, scaled=scaled)
    cell = replace(cell, paper=paper)
    runs = [hand_made([{"a": (0, value, 1)}], seed=seed) for seed, value in enumerate(values)]
    return CellResult("kapc-mnist", paper, label_of(cell, cell, paper.samples), runs)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (outcome_of(0.89, 0.90), "0.50 points below the paper's, within its standard deviation"),
        (outcome_of(0.93, 0.93), "3.00 points above the paper's, 3.0 of its standard deviations"),
        (outcome_of(0.93, deviation=None), "3.00 points above the paper's, which has no standard deviation"),
        (outcome_of(), "nothing measured"),
        (outcome_of(0.9, scaled=("30 of 200 rounds",)), "no claim: a scaled run says nothing"),
    ],
)
def test_verdict(outcome, verdict):
    assert outcome.verdict.startswith(verdict)


def test_mean_and_deviation_are_over_seeds():
    outcome = outcome_of(0.8, 0.9, 1.0)
    assert (outcome.ours.mean, outcome.ours.deviation) == (pytest.approx(0.9), pytest.approx(0.1))
    assert outcome.as_dict()["ours"] == {
        "mean": outcome.ours.mean,
        "deviation": outcome.ours.deviation,
        "seeds": 3,
    }
    console = quiet()
    console.print(table_of(outcome))
    assert re.search(r"90\.00 ± 1\.00 +│ +90\.00 ± 10\.00 +│ +3", console.file.getvalue())
    assert number(None) != number(0.0) == "0.00"


@pytest.mark.parametrize(
    ("changes", "missing", "label"),
    [
        ([], 0, "full"),
        (["run.seed=7", "run.final_evaluation=false", "run.name=x"], 0, "full"),
        (["run.final_evaluation=false"], 0, "full"),
        (["training.batch_size=64"], 0, "full, another choice of ours: training.batch_size=64"),
        (["fleet.train_on=cuda:0"], 0, "full, another choice of ours: fleet.train_on=cuda:0"),
        (["run.rounds=5"], 0, "scaled: run.rounds=5"),
        (["run.rounds=5", "training.momentum=0.5"], 0, "scaled: run.rounds=5; training.momentum=0.5"),
        (["method.safe_step=true"], 0, "scaled: method.safe_step=True"),
        (["data.partition.alpha=0.3"], 0, "scaled: data.partition.alpha=0.3"),
        ([], 10_000, "scaled: a source of 60,000 samples, not 70,000"),
    ],
)
def test_label(changes, missing, label):
    cell, asked = read_cell("kapc-mnist", changes)
    assert str(label_of(cell, asked, cell.paper.samples - missing)) == label


def test_a_cell_that_is_short_itself_says_so():
    cell, asked = read_cell("fedpurin-fmnist-short")
    label = label_of(cell, asked, 70_000)
    assert str(label) == "scaled: 30 of 200 rounds, beta 15 for 100"
    assert label.changes == ()


# the files


def test_every_row_of_a_file_is_a_cell_with_what_differs():
    assert set(FILES) | set(ROWS) | set(COUNTED) < set(cell_names())
    assert cell_names("kapc-fmnist*") == ["kapc-fmnist", "kapc-fmnist-03", "kapc-fmnist-local"]
    whole, _ = read_cell("kapc-mnist")
    bls, _ = read_cell("kapc-bls-mnist")
    assert (bls.method["name"], bls.method["self_threshold"], bls.run.rounds) == ("kapc-bls", 0.7, 50)
    assert (bls.paper.value, bls.paper.deviation, bls.paper.samples) == (0.98, 0.0003, whole.paper.samples)
    assert "method.search" in bls.paper.open
    local, asked = read_cell("kapc-mnist-local", ["training.batch_size=64"])
    assert local.method == {"name": "local-only"}
    assert (local.run.rounds, local.training.epochs) == (1, 5)
    assert not any(key.startswith("method.") for key in local.paper.open)
    assert str(label_of(local, asked, 70_000)) == "full, another choice of ours: training.batch_size=64"
    early, _ = read_cell("fedspu-cifar10-early-stopping")
    assert (early.method["early_stopping"], early.fleet.ratios) == (True, (0.2, 0.4, 0.6, 0.8, 1.0))


@pytest.mark.parametrize("name", cell_names())
def test_every_cell_has_a_method_that_takes_its_settings(name):
    cell, _ = read_cell(name)
    assert cell.run.name == name
    assert not cell.paper.rows or name in FILES
    from_section(cell.method, tiny_spec())


@pytest.mark.parametrize("name", FILES)
def test_what_is_marked_as_our_choice_is_what_the_paper_leaves_open(name):
    text = (CELLS / f"{name}.toml").read_text()
    marked, section = set(), ""
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if section.startswith("paper.rows."):
            key = line.partition("=")[0].strip()
            assert "# our choice" not in line or key in read_cell(section[11:])[0].paper.open
            continue
        if "# our choice" in line and "=" in line:
            marked.add(f"{section}.{line.partition('=')[0].strip()}")
    left_open = set(tomllib.loads(text)["paper"]["open"])
    assert marked <= left_open
    for key in left_open:
        content = tomllib.loads(text)
        for part in key.split("."):
            content = content[part]
    assert read_cell(name)[0].run.name == name


@pytest.mark.parametrize("name", sooner(FILES + ROWS, kept=3))
def test_every_cell_plays_at_tiny_scale(name, sources, tmp_path):
    cell, _ = read_cell(name)
    some = ["round.participants=2"] if cell.round.participants else []
    source = sources[cell.data.source.partition(":")[0]]
    outcome, said = play(name, tmp_path, source, *TINY, *some)
    assert outcome.ours.count == 1
    assert "no claim: a scaled run" in said
    (folder,) = (tmp_path / "paper").iterdir()
    result = json.loads((folder / "result.json").read_bytes())
    assert result["cell"] == name
    assert result["label"].startswith("scaled: ")
    assert "run.rounds=1" in result["label"]
    assert 0 <= result["ours"]["mean"] <= 1
    assert f"edge-sim paper {name} --seeds 1 --set run.rounds=1" in result["command"]
    assert result["settings"]["fleet"]["devices"] == 4
    assert result["paper"]["open"]


# seeds, mistakes, the command


def test_a_finished_seed_is_kept_and_the_next_is_added(sources, tmp_path, monkeypatch):
    played = []

    def watched(cells, **options):
        played.extend(run.settings.run.seed for run in cells)
        execute_all(cells, **options)

    monkeypatch.setattr(fleetune.tools.compare.engine, "execute_all", watched)
    changes = [*TINY, "model.name=mlp"]
    first, _ = play("kapc-mnist", tmp_path, sources["idx"], *changes)
    both, _ = play("kapc-mnist", tmp_path, sources["idx"], *changes, seeds=2)
    assert played == [0, 1]
    assert both.ours.count == 2
    assert both.runs[0].summary == first.runs[0].summary
    play("kapc-mnist", tmp_path, sources["idx"], *changes, fresh=True)
    assert played == [0, 1, 0]


def test_interrupted_it_keeps_what_is_finished(sources, tmp_path, monkeypatch):
    def interrupted(cells, **options):
        execute_all(cells[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(fleetune.tools.compare.engine, "execute_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play("kapc-mnist", tmp_path, sources["idx"], *TINY, "model.name=mlp", seeds=2)
    (result,) = (tmp_path / "paper").glob("*/result.json")
    assert json.loads(result.read_bytes())["ours"]["seeds"] == 1


@pytest.mark.parametrize(
    ("name", "changes", "seeds", "message"),
    [
        ("kapc-mnits", [], 1, "no cell 'kapc-mnits'; did you mean 'kapc-mnist'?"),
        ("zzz", [], 1, "no cell 'zzz'; known: dc-pfl-fmnist, "),
        ("kapc-mnist", ["method.name=fedavg"], 1, "this cell is kapc's; else: edge-sim compare"),
        ("kapc-mnist", ["paper.value=0.5"], 1, "--set cannot change it"),
        ("kapc-mnist", [], 0, "--seeds 0: the number of seeds must be at least 1"),
        ("kapc-mnist", ["training.epoch=1"], 1, "did you mean `epochs`?"),
        ("kapc-mnist", ["method.rows=clop"], 1, "method.rows"),
        ("nowhere.toml", [], 1, "nowhere.toml: no such file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_played(sources, tmp_path, name, changes, seeds, message):
    with pytest.raises(SettingError) as caught:
        play(name, tmp_path, sources["idx"], *changes, seeds=seeds)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_cell_of_ones_own_has_a_paper_table(tmp_path):
    file = tmp_path / "mine.toml"
    text = (CELLS / "kapc-mnist.toml").read_text()
    file.write_text(text.replace('accuracy = "best-mean"', 'accuracy = "best"'))
    with pytest.raises(SettingError, match="'best' is none of best-mean"):
        read_cell(str(file))
    file.write_text(text.partition("[paper]")[0])
    with pytest.raises(SettingError, match=r"needs a \[paper\] table"):
        read_cell(str(file))


def test_data_that_is_not_there_is_asked_for(tmp_path):
    with pytest.raises(DataError, match="--data FOLDER") as caught:
        play("fedspu-cifar10", tmp_path, str(tmp_path / "nowhere"))
    assert str(caught.value).startswith("cifar:")
    assert "\n" not in str(caught.value)


def test_the_command_lists_cells_and_names_a_mistake():
    listed = CliRunner().invoke(app, ["paper"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in FILES + ROWS)
    wrong = CliRunner().invoke(app, ["paper", "kapc-mnits"])
    assert wrong.exit_code == 2
    assert wrong.output == "edge-sim: no cell 'kapc-mnits'; did you mean 'kapc-mnist'?\n"


def test_a_pool_is_dealt_instead_of_everything():
    y = np.arange(1000) % 10

    def pooled_rows(seed, pool):
        splits = partition(y, None, Partition(kind="dirichlet", pool=pool), 5, Key(seed))
        return np.sort(np.concatenate([rows for split in splits for rows in split]))

    assert pooled_rows(1, 0.1).size == 100 == np.unique(pooled_rows(1, 0.1)).size
    assert np.array_equal(pooled_rows(1, 0.1), pooled_rows(1, 0.1))
    assert not np.array_equal(pooled_rows(1, 0.1), pooled_rows(2, 0.1))
    assert np.array_equal(pooled_rows(1, 1.0), np.arange(1000))
    groups = partition(y, y, Partition(kind="group", pool=0.5), 10, Key(1))
    assert all(np.unique(y[np.concatenate(split)]).size == 1 for split in groups)
