"""edge-sim compare: what stands in its tables, what is played again, what a user's mistake gets."""

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

import fleetune
from fleetune.coordinator.metrics.personal_scores import personal
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, PERSONAL_WORST_DECILE
from fleetune.coordinator.metrics.summary import Accuracies, DeviceSummary, PayloadBytes, Seconds, Summary
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.methods import REGISTRY
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.cli import app
from fleetune.tools.compare.columns import ROUNDS_TO_TARGET, row_of
from fleetune.tools.compare.comparison import Comparison, Configuration, spread, target_of
from fleetune.tools.compare.configurations import configurations_of, labels_of, planned_runs
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.report import ComparisonPage
from fleetune.tools.compare.report import write_page as write_comparison
from fleetune.tools.compare.runs import execute_all, forget, read_finished
from fleetune.tools.compare.tables import NOT_REACHED, UNEQUAL, best, comparison_tables, differences
from fleetune.tools.simulator.workers import worker

SECTIONS = {
    "run": {"name": "duel", "seed": 3, "rounds": 3},
    "model": {"name": "mlp"},
    "method": {"name": "fedspu"},
    "data": {"partition": {"kind": "dirichlet", "samples": 40, "test_fraction": 0.5}},
    "training": {"batch_size": 10, "learning_rate": 0.1},
    "fleet": {"devices": 4},
}
METHODS = ["local-only", "fedspu"]


def settings_of(**sections):
    return parse_run(
        {**SECTIONS, **{name: {**SECTIONS.get(name, {}), **own} for name, own in sections.items()}}
    )


def play(folder: Path, methods=METHODS, *, seeds=2, target=None, workers=0, fresh=False, **sections):
    """The comparison and what the console said."""
    console = Console(width=100, file=io.StringIO(), color_system=None)
    options = {"target": target, "workers": workers, "fresh": fresh, "console": console}
    settings = settings_of(**sections)
    found = fleetune.compare(settings, methods, seeds=seeds, runs=folder, **options)
    return found.comparison, console.file.getvalue()


@pytest.fixture(scope="module")
def duel(tmp_path_factory):
    """Two methods, two seeds, as played once: folder, comparison, console."""
    runs = tmp_path_factory.mktemp("runs")
    return runs / "duel.compare", *play(runs)


def rows_of(file: Path):
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_each_method_with_each_seed_leaves_its_figures(duel):
    folder, comparison, _ = duel
    assert [(run.label, run.seed) for run in comparison.runs] == [
        ("local-only", 3),
        ("fedspu", 3),
        ("local-only", 4),
        ("fedspu", 4),
    ]
    for run in comparison.runs:
        place = folder / run.label / f"seed-{run.seed}"
        assert {file.name for file in place.iterdir()} == {"summary.json", "rounds.jsonl", "run.json"}
        assert json.loads((place / "summary.json").read_bytes())["rounds"] == 3
    pictures = {file.stem for file in folder.glob("*.png")}
    assert pictures == {
        "accuracy-by-round",
        "accuracy-by-uplink",
        "accuracy-by-time",
        "accuracy-by-device",
    }


def test_rows_of_the_csv_say_what_the_summaries_say(duel):
    folder, comparison, _ = duel
    rows = rows_of(folder / "runs.csv")
    assert len(rows) == 4
    for row in rows:
        place = folder / row["configuration"] / f"seed-{row['seed']}"
        summary = json.loads((place / "summary.json").read_bytes())
        read = msgspec.convert(summary, Summary)
        accuracy = summary["accuracy"]
        for name in ("personal_mean", "personal_weighted", "before_mean", "after_mean", "after_weighted"):
            assert float(row[f"accuracy_{name}"]) == accuracy[name]
        assert float(row["accuracy_last_after"]) == pytest.approx(accuracy["personal_mean"])  # all took part
        assert float(row["accuracy_best_after"]) == pytest.approx(accuracy["best_round"]["after_mean"])
        assert int(row["best_after_round"]) == accuracy["best_round"]["round"]
        assert int(row["bytes_up"]) == summary["bytes"]["up"]
        assert int(row["bytes_down"]) == summary["bytes"]["down"]
        assert float(row["seconds"]) == summary["seconds"]["rounds"]
        assert float(row["accuracy_personal_worst_decile"]) == min(personal(read).values())
    means = []
    for label in METHODS:
        values = [float(row["accuracy_personal_mean"]) for row in rows if row["configuration"] == label]
        found = comparison.spread(label, PERSONAL_MEAN)
        assert found.mean == pytest.approx(sum(values) / 2)
        assert found.deviation == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert found.count == 2
        means.append(found.mean)
    assert len(comparison.round_rows()) == 12
    assert comparison.target.score == pytest.approx(0.95 * max(means))


def test_the_terminal_shows_means_and_deviations_in_a_hundred_columns(duel):
    _, comparison, said = duel
    mean = comparison.spread("fedspu", PERSONAL_MEAN)
    assert f"{100 * mean.mean:.1f} ±{100 * mean.deviation:.1f}" in said
    assert "mean ± standard deviation over 2 seeds (3 to 4)" in said
    assert "95 % of what the best method ended with" in said
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 100


def test_finished_runs_are_not_played_again(duel, played):
    folder, comparison, _ = duel
    again, said = play(folder.parent)
    assert played == []
    assert again.rows == comparison.rows
    assert "4 of 4 runs are finished already" in said


def test_only_what_changed_is_played(duel, played):
    folder, comparison, _ = duel
    changed, _ = play(folder.parent, compare={"fedspu": {"loss_weight": 0.5}}, seeds=1)
    assert played == ["fedspu, seed 3"]
    assert changed.of("local-only") == comparison.of("local-only")[:1]
    played.clear()
    play(folder.parent, [*METHODS, "fedavg"], seeds=1)
    assert played == ["fedspu, seed 3", "fedavg, seed 3"]
    played.clear()
    play(folder.parent, ["fedavg"], seeds=1, fresh=True)
    assert played == ["fedavg, seed 3"]


def test_a_damaged_run_is_played_again(tmp_path):
    cell, *_ = cells = planned_runs(
        settings_of(run={"rounds": 1}), configurations_of(settings_of(), ["fedavg"]), 1, tmp_path
    )
    execute_all(cells, workers=0, on_round=lambda _: None, on_done=lambda *_: None)
    assert read_finished(cell)
    (cell.folder / "rounds.jsonl").write_text("{half a line")
    assert read_finished(cell) is None


def test_interrupted_it_shows_what_is_finished_and_goes_on_from_there(tmp_path, monkeypatch, played):
    def interrupted(cells, **options):
        execute_all(cells[:1], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fleetune.tools.compare.engine, "execute_all", interrupted)
        console = Console(width=100, file=io.StringIO(), color_system=None)
        with pytest.raises(KeyboardInterrupt):
            fleetune.compare(settings_of(), METHODS, runs=tmp_path, target=0.5, console=console)
    assert "stopped with 1 of 2 runs finished" in console.file.getvalue()
    assert [row["configuration"] for row in rows_of(tmp_path / "duel.compare" / "runs.csv")] == ["local-only"]
    comparison, _ = play(tmp_path, seeds=1, target=0.5)
    assert played == ["fedspu, seed 3"]
    assert len(comparison.runs) == 2
    monkeypatch.setattr(fleetune.tools.compare.engine, "execute_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, seeds=1, target=0.5, fresh=True)
    assert [row["configuration"] for row in rows_of(tmp_path / "duel.compare" / "runs.csv")] == ["local-only"]


def test_a_method_that_cannot_run_here_does_not_stop_the_others(tmp_path, played):
    slow = {"deadline_s": 0.004}  # too little for whole models on a Zero 2 W
    fleet = {"devices": 2, "boards": {"raspberry-pi-zero-2w": 2}}
    with pytest.raises(FleetuneError, match="fedavg, seed 3: no device can take part"):
        play(tmp_path, ["fedavg", "local-only"], seeds=1, round=slow, fleet=fleet)
    assert [row["configuration"] for row in rows_of(tmp_path / "duel.compare" / "runs.csv")] == ["local-only"]
    assert "no device can take part" in (tmp_path / "duel.compare" / "report.html").read_text()


def test_a_worker_process_changes_nothing(duel, tmp_path, played):
    _, comparison, _ = duel
    beside, _ = play(tmp_path, seeds=1, workers=1)
    assert played == ["local-only, seed 3", "fedspu, seed 3"]
    for run in beside.runs:
        (alone,) = (one for one in comparison.of(run.label) if one.seed == run.seed)
        but = {"bytes": PayloadBytes(), "provenance": UNSET}
        assert replace(run.summary, **but) == replace(alone.summary, **but)


def test_settings_go_to_the_method_they_are_for():
    settings = settings_of(
        method={"name": "fedspu", "early_stopping": True},
        compare={"fedprox": {"proximal": 0.5}, "mine": {"name": "fedspu"}, "fedspu": {"patience": 3}},
    )
    assert labels_of(settings, None) == ["local-only", "fedavg", "fedspu", "fedprox", "mine"]
    assert labels_of(settings, "fedspu, mine") == ["fedspu", "mine"]
    everybody = labels_of(settings, "all")
    assert everybody[:2] == ["local-only", "fedavg"]
    assert sorted(everybody) == sorted([*REGISTRY, "mine"])
    methods = {one.label: one.method for one in configurations_of(settings, labels_of(settings, None))}
    assert methods["fedavg"] == {"name": "fedavg"}
    assert methods["fedspu"] == {"name": "fedspu", "early_stopping": True, "patience": 3}
    assert methods["fedprox"] == {"name": "fedprox", "proximal": 0.5}
    assert methods["mine"] == {"name": "fedspu"}


def test_a_pattern_names_what_it_fits_once():
    settings = settings_of(compare={"kapc": {}, "kapc-eta-0": {"name": "kapc", "relation_rate": 0.0}})
    assert labels_of(settings, "kapc*") == ["kapc", "kapc-eta-0", "kapc-bls"]
    assert labels_of(settings, "kapc-eta-0,fedavg,kapc*") == ["kapc-eta-0", "fedavg", "kapc", "kapc-bls"]
    assert labels_of(settings, "fed?vg") == ["fedavg"]
    with pytest.raises(SettingError, match=r"matches 'kpac\*'; known: kapc, kapc-eta-0, "):
        labels_of(settings, "kpac*")


def test_a_variant_stands_beside_the_method_as_it_is_seed_by_seed(duel):
    _, whole, _ = duel
    runs = [replace_run(run, label="mine") for run in whole.of("local-only")]
    variant = Configuration("mine", {"name": "fedspu", "early_stopping": True})
    both = dataclasses.replace(
        whole, configurations=(*whole.configurations, variant), runs=(*whole.runs, *runs)
    )
    found = both.difference("mine", "fedspu", PERSONAL_MEAN)
    gaps = [
        PERSONAL_MEAN.of_run(a.summary) - PERSONAL_MEAN.of_run(b.summary)
        for a, b in zip(whole.of("local-only"), whole.of("fedspu"), strict=True)
    ]
    assert found.mean == pytest.approx(sum(gaps) / 2)
    assert found.deviation == pytest.approx(abs(gaps[0] - gaps[1]) / 2**0.5)
    ((variant, minus, gap, _),) = differences(both)
    assert (variant, minus) == ("mine", "fedspu")
    assert gap == f"{100 * found.mean:+.1f} ±{100 * found.deviation:.1f}"
    assert differences(whole) == []
    page = write_comparison(ComparisonPage(both, {}, [], "")).decode()
    assert gap in page
    assert gap not in write_comparison(ComparisonPage(whole, {}, [], "")).decode()


def replace_run(run, label):
    return dataclasses.replace(run, label=label)


def test_configurations_may_differ_in_the_ratios_of_the_fleet(tmp_path):
    settings = settings_of(
        fleet={"devices": 3, "ratios": [0.5]},
        compare={
            "fixed": {"name": "fedspu", "ratios": [0.4, 0.6]},
            "chosen": {"name": "fedspu", "ratios": []},
        },
    )
    configurations = configurations_of(settings, ["fedavg", "fixed", "chosen"])
    assert [one.options for one in configurations] == ["", "ratios = [0.4, 0.6]", "ratios: as each chooses"]
    assert all("ratios" not in one.method for one in configurations)
    cells = planned_runs(settings, configurations, 1, tmp_path)
    assert [cell.settings.fleet.ratios for cell in cells] == [(0.5,), (0.4, 0.6), ()]
    wrong = settings_of(compare={"fixed": {"name": "fedspu", "ratios": [1.5]}})
    with pytest.raises(SettingError, match=r"compare.fixed: fleet.ratios.*<= 1"):
        configurations_of(wrong, ["fixed"])


def test_configurations_may_differ_in_what_they_minimise(tmp_path):
    compare = {"paced": {"name": "fedspu", "ratios": [], "minimise": "time"}, "fixed": {"name": "fedspu"}}
    settings = settings_of(compare=compare, objective={"at_most": 0.6})
    configurations = configurations_of(settings, ["paced", "fixed"])
    assert [one.options for one in configurations] == ["ratios: as each chooses, minimise = time", ""]
    found = [cell.settings.objective for cell in planned_runs(settings, configurations, 1, tmp_path)]
    assert [(one.minimise, one.at_most) for one in found] == [("time", 0.6), ("none", 0.6)]
    wrong = settings_of(compare={"paced": {"name": "fedspu", "minimise": "watts"}})
    with pytest.raises(SettingError, match=r"compare.paced.*minimise"):
        configurations_of(wrong, ["paced"])


def test_configurations_may_differ_in_how_updates_are_written(tmp_path):
    table = {"name": "sparse", "density": 0.01}
    whole = {"name": "fedavg", "up": "lossless", "down": "int8"}
    compare = {"thin": {"name": "fedavg", "up": table}, "whole": whole}
    settings = settings_of(compare=compare)
    configurations = configurations_of(settings, ["fedavg", "thin", "whole"])
    assert [one.options for one in configurations] == ["", f"up = {table}", "up = lossless, down = int8"]
    cells = planned_runs(settings, configurations, 1, tmp_path)
    assert [cell.settings.encoding.up for cell in cells] == ["lossless", table, "lossless"]
    assert [cell.settings.encoding.down for cell in cells] == ["lossless", "lossless", "int8"]
    wrong = settings_of(compare={"thin": {"name": "fedavg", "up": "sparce"}})
    with pytest.raises(SettingError, match=r"compare.thin: encoding: up: .*did you mean 'sparse'"):
        configurations_of(wrong, ["thin"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["fedavg", "fedspoo"]}, "no method 'fedspoo'; did you mean 'fedspu'?"),
        ({"methods": []}, "name at least one"),
        ({"methods": ["fedavg", ""]}, "name at least one"),
        ({"methods": ["fedavg", "fedspu", "fedavg"]}, "fedavg is named twice"),
        ({"seeds": 0}, "--seeds 0: "),
        ({"target": 0.0}, "accuracy must be between 0 and 1"),
        ({"target": 90}, "--target 90: "),
        ({"target": float("nan")}, "--target nan"),
        ({"compare": {"fedspu": {"erly": 1}}}, "fedspu: method.erly: fedspu has no such setting"),
        ({"methods": ["mine"], "compare": {"mine": {"name": 3}}}, "no method 3"),
        ({"methods": ["nowhere:Method"]}, "cannot load 'nowhere:Method'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_played(tmp_path, options, message):
    with pytest.raises(SettingError) as caught:
        play(tmp_path, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_command_says_a_mistake_in_one_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "duel"\n[model]\nname = "mlp"\n[method]\nname = "fedspu"\n')
    for option, value in (("--methods", "fedavg,,"), ("--seeds", "-1"), ("--target", "1.5")):
        wrong = CliRunner().invoke(app, ["compare", str(file), "--runs", str(tmp_path), option, value])
        assert wrong.exit_code == 2
        assert wrong.output.startswith(f"edge-sim: {option}")
        assert len(wrong.output.splitlines()) == 1


# hand-made runs


def hand_made(label="ours", seed=0, *, afters=((0.2, 0.4), (0.6, 0.8)), devices=None):
    """Round r: device i replies `afters[r][i]`, None: it is not asked. 100 bytes up, 50 down, 10 s."""
    records = [
        RoundRecord(
            number=number,
            attempt=1,
            final_evaluation=False,
            opened_s=10.0 * (number - 1),
            closed_s=10.0 * number,
            participants=(),
            devices={
                f"d{index}": DeviceRound(1.0, 50, 100, Measures(5, 5, 0.1, after / 2, after), RoundCost())
                for index, after in enumerate(row)
                if after is not None
            },
        )
        for number, row in enumerate(afters, 1)
    ]
    last = {name: reply.measures.after for record in records for name, reply in record.devices.items()}
    replies = sum(len(record.devices) for record in records)
    end = sum(last.values()) / len(last)
    summary = Summary(
        method=label,
        model="tiny",
        parameters=10,
        rounds=len(records),
        devices=devices or len(last),
        accuracy=Accuracies(personal_mean=end, personal_weighted=end),
        bytes=PayloadBytes(up=100 * replies, down=50 * replies, up_dense=400, down_dense=400),
        seconds=Seconds(rounds=10.0 * len(records)),
        by_device={name: DeviceSummary(personal=value, updates=1) for name, value in last.items()},
    )
    return FinishedRun(label, seed, summary, records)


def side_by_side(*runs, target=None):
    configurations = tuple(
        Configuration(label, {"name": label}) for label in dict.fromkeys(run.label for run in runs)
    )
    seeds = tuple(sorted({run.seed for run in runs}))
    return Comparison("duel", configurations, seeds, runs, target_of(runs, target))


def printed(comparison):
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(comparison_tables(comparison))
    return console.file.getvalue()


def test_a_device_counts_with_its_latest_reply():
    run = hand_made(afters=((0.2, None), (None, 0.6), (0.4, None)))
    assert [point.after for point in run.history] == pytest.approx([0.2, 0.4, 0.5])
    assert [point.before for point in run.history] == pytest.approx([0.1, 0.2, 0.25])
    assert [(point.up, point.down, point.known) for point in run.history] == [
        (100, 50, 1),
        (200, 100, 2),
        (300, 150, 2),
    ]


def test_the_first_lucky_few_neither_reach_the_target_nor_make_the_best_round():
    few = (1.0, *[None] * 5)
    run = hand_made(afters=(few, (0.1,) * 6, (0.5,) * 6, (0.4,) * 6))
    figures = row_of(run, target_of([run], 0.45)).values
    assert figures["best_after"] == pytest.approx(0.5)
    assert figures["best_after_round"] == figures["rounds_to_target"] == 3
    assert figures["bytes_up_to_target"] == 1300
    assert figures["bytes_down_to_target"] == 650
    assert figures["seconds_to_target"] == 30.0
    assert figures["last_after"] == pytest.approx(0.4)


def test_a_comparison_over_different_devices_says_so():
    all_served, few_served = hand_made("ours"), hand_made("theirs", afters=((0.9, None), (0.9, None)))
    assert UNEQUAL in shown(side_by_side(all_served, few_served))
    assert UNEQUAL not in shown(side_by_side(all_served, hand_made("theirs")))


def shown(comparison):
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_tables(comparison))
    return console.file.getvalue()


def test_configurations_that_trained_alike_are_named_with_the_reason(tmp_path):
    _, said = play(tmp_path / "whole", ["local-only", "fedavg", "fedspu"], seeds=1, run={"rounds": 2})
    said = " ".join(said.split())
    assert "fedavg and fedspu trained alike, to the last bit: every device ran at ratio 1" in said
    assert "--set fleet.ratios=[" in said
    page = (tmp_path / "whole" / "duel.compare" / "report.html").read_text()
    assert "fedavg and fedspu trained alike" in page
    _, said = play(
        tmp_path / "parts", ["fedavg", "fedspu"], seeds=1, fleet={"devices": 4, "ratios": [0.2, 0.6]}
    )
    assert "alike" not in said


def test_nine_in_ten_devices_reach_the_worst_decile():
    for num_devices, worst in ((3, 0), (10, 0), (11, 1), (20, 1), (21, 2)):
        own = tuple(index / 100 for index in range(num_devices))
        assert row_of(hand_made(afters=(own,)), None).of(PERSONAL_WORST_DECILE) == worst / 100


def test_what_did_not_reach_the_target_is_said():
    good, bad, once = (
        hand_made("good"),
        hand_made("bad", afters=((0.1, 0.1),)),
        hand_made("good", 1, afters=((0.1,),)),
    )
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(comparison_tables(side_by_side(good, once, bad, target=0.7)))
    said = console.file.getvalue()
    assert re.search(rf"bad \(1 of 2 seeds\) +{NOT_REACHED}", said)
    assert re.search(r"good +2 \(1 of 2\) +400 B \(1 of 2\)", said)
    assert "70.0 %: as asked for" in said


def test_who_reached_the_target_with_every_seed_is_the_example():
    quick, lost = hand_made("now-and-then", afters=((0.8,),)), hand_made("now-and-then", 1, afters=((0.1,),))
    comparison = side_by_side(quick, lost, hand_made("always"), hand_made("always", 1), target=0.7)
    assert best(comparison, ROUNDS_TO_TARGET) == {"always"}


def test_spread_is_the_sample_deviation_of_what_is_there():
    assert spread([]) is None
    assert spread([None]) is None
    assert spread([0.5]).deviation is None
    found = spread([1, None, 3])
    assert (found.mean, found.deviation, found.count) == (2, pytest.approx(2**0.5), 2)


def test_whatever_names_hold_stays_text_on_the_page():
    hostile = '<script>alert("x")</script>'
    comparison = side_by_side(hand_made(hostile), hand_made("fedavg"))
    page = write_comparison(ComparisonPage(comparison, {}, [hostile], hostile)).decode()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_run_that_was_stopped_goes_on_in_its_midst_unless_it_shall_be_fresh(tmp_path, monkeypatch):
    cells = planned_runs(
        settings_of(run={"rounds": 4}), configurations_of(settings_of(), ["fedavg"]), 1, tmp_path
    )
    work, rounds, whole = [], [], worker.train

    def reply(job):
        work.append(job.key.round)
        if len(work) == 12:
            raise KeyboardInterrupt
        return whole(job)

    def play_on():
        work.clear()
        rounds.clear()
        execute_all(
            cells, workers=0, on_round=lambda news: rounds.append(news.number), on_done=lambda *_: None
        )

    monkeypatch.setattr(worker, "train", reply)
    with pytest.raises(KeyboardInterrupt):
        play_on()
    there, stopped_in = list(rounds), work[-1]
    assert 0 < len(there) < 4
    monkeypatch.setattr(worker, "train", lambda job: work.append(job.key.round) or whole(job))
    forget(cells[0], fresh=False)
    play_on()
    assert work[0] == stopped_in
    assert there + rounds == [1, 2, 3, 4, 5]
    assert read_finished(cells[0])
    forget(cells[0], fresh=True)
    play_on()
    assert rounds == [1, 2, 3, 4, 5]
