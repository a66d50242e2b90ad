"""`python -m benchmarks.ratios`: who comes to the target with how much less than the best fixed ratio."""

import json
from dataclasses import dataclass, field

import pytest
from benchmarks.ratios.__main__ import app
from benchmarks.ratios.matrix import FLEETS, Group, candidates_of, groups_of
from benchmarks.ratios.report import markdown, picture
from benchmarks.ratios.verdicts import scores, verdicts
from typer.testing import CliRunner

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import with_defaults_of_run
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.compare import runs as planned_runs
from fleetune.tools.compare.finished_run import Point

RUN = """
[run]
name = "small"
rounds = 3
[data]
source = "digits"
partition = { kind = "iid", samples = 20 }
[model]
name = "mlp"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "fedspu"
[training]
learning_rate = 0.1
batch_size = 10
[fleet]
devices = 4
boards = { raspberry-pi-4b = 2, raspberry-pi-zero-2w = 2 }
links = { lan = 4 }
"""


@dataclass
class Round:
    participants: list[str]
    devices: dict[str, None]


@dataclass
class Run:
    """What is read of a finished run of a fleet of two."""

    label: str
    seed: int
    history: list[Point]
    idle_w: dict[str, float] = field(default_factory=lambda: {"a": 1.0, "b": 1.0})

    @property
    def records(self) -> list[Round]:
        return [Round(["a", "b"], dict.fromkeys(["a", "b"][: point.known])) for point in self.history]


def played(label, seed, round_s, accuracy, *, known=2):
    return Run(
        label,
        seed,
        [
            Point(number, round_s * number, 1000 * number, 0, None, score, known, 2.0 * round_s * number)
            for number, score in enumerate(accuracy, start=1)
        ],
    )


WAYS = candidates_of("0.2,0.4,fedavg,time,bytes")
GROUP = Group("own", "fedspu", {candidate.words: candidate.words for candidate in WAYS})


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(RUN)
    return path


def test_who_never_took_part_counts_as_nothing_and_one_lucky_round_does_not_decide():
    assert scores(played("x", 0, 1.0, [0.3, 0.9, 0.3])) == pytest.approx([0.3, 0.6, 0.5])
    assert scores(played("x", 0, 1.0, [0.8], known=1)) == [0.4]


def test_each_is_held_against_the_best_fixed_ratio_of_its_seed():
    slow, quick = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], [0.5, 0.8, 0.8, 0.8]
    runs = [
        *(played("0.2", seed, 2.0, slow) for seed in (0, 1)),
        *(played("0.4", seed, 3.0, slow) for seed in (0, 1)),
        *(played("fedavg", seed, 9.0, slow, known=1) for seed in (0, 1)),
        played("time", 0, 1.0, quick),
        played("time", 1, 1.0, [0.3] * 4),
        *(played("bytes", seed, 0.01, slow) for seed in (0, 1)),
    ]
    found = {one.candidate.words: one for one in verdicts(GROUP, WAYS, runs, None)}
    assert [one.target for one in found["0.2"].outcomes] == pytest.approx([0.97 * 0.8] * 2)
    assert [one.round for one in found["0.2"].outcomes] == [6, 6]
    assert found["time"].outcomes[0].seconds == 4.0
    assert found["time"].times["seconds"] == [pytest.approx(12 / 4), None]
    assert found["time"].times["megabytes"] == [pytest.approx(6 / 4), None]
    assert found["fedavg"].outcomes[0].seconds is None, "half the fleet is not served"
    assert (found["fedavg"].outcomes[0].num_devices, found["fedavg"].outcomes[0].late) == (1, 0.5)
    table = markdown(GROUP, list(found.values()))
    assert "| `time` | 4, 1 of 2 (3x) | 8, 1 of 2 (3x) |" in table
    assert "| `fedavg` | never | never | never | 40.0 % |" in table
    assert "| `bytes` | 0.06 (200x) |" in table
    assert "to 77.6 %" in table


def test_what_plays_longer_is_cut_where_the_best_fixed_way_ended():
    """At the second rate nobody is there in three rounds; in twice as many it is, but not after that time."""
    candidates = candidates_of("0.2,0.4,time*2,bytes*2")
    group = Group("own", "fedspu", {candidate.words: candidate.words for candidate in candidates})
    rising = [0.1, 0.2, 0.3, 0.8, 0.8, 0.8]
    runs = [
        played("0.2", 0, 4.0, [0.2, 0.4, 0.4]),
        played("0.4", 0, 2.0, [0.7, 0.7, 0.7]),
        played("time*2", 0, 1.0, rising),
        played("bytes*2", 0, 1.5, rising),
    ]
    found = {one.candidate.words: one.outcomes[0] for one in verdicts(group, candidates, runs, 0.75)}
    assert (found["time*2"].seconds, found["time*2"].lasted_s) == (6.0, 6.0)
    assert found["time*2"].score == pytest.approx(0.8)
    assert (found["bytes*2"].seconds, found["bytes*2"].lasted_s) == (None, 6.0)
    assert found["bytes*2"].score == pytest.approx((0.2 + 0.3 + 0.8) / 3)


def test_a_way_may_play_more_rounds(run_file):
    settings = read_run(run_file)
    _, (_, longer) = groups_of(settings, ["own"], ["fedpurin"], candidates_of("0.2,time*3+oort"))
    assert longer.method == with_defaults_of_run({"name": "fedpurin"}, 3), "those of the file's rounds"
    assert longer.changes["run.rounds"] == 9
    assert longer.changes["round.prefer"] == "oort"


def test_a_seed_whose_ratios_are_not_all_played_yet_is_left_out():
    runs = [played("0.2", 0, 1.0, [0.5]), played("time", 0, 1.0, [0.5])]
    assert verdicts(GROUP, WAYS, runs, None) == []
    assert picture({GROUP: []}) is None


def test_each_fleet_has_as_many_devices_as_the_run_file(run_file):
    settings = read_run(
        run_file, ["fleet.devices=7", "fleet.boards={raspberry-pi-4b=7}", "fleet.links={lan=7}"]
    )
    fleets, candidates = (
        ["own", "thin-links", "slow-boards", "batteries"],
        candidates_of("0.4,fedavg,energy,0.4+oort"),
    )
    groups, contenders = groups_of(settings, fleets, ["fedspu", "kapc-bls"], candidates)
    assert len(groups) == 8
    assert len(contenders) == 4 * (2 * 3 + 1), "FedAvg is the same whatever the method"
    for one in contenders:
        for key in ("fleet.boards", "fleet.links"):
            assert sum(one.changes.get(key, {"as the file has it": 7}).values()) == 7
    assert contenders[-1].changes["round.prefer"] == "oort"
    assert contenders[-1].changes["fleet.batteries"] == [0.0001, 0.0004]


@pytest.mark.parametrize(
    ("options", "wanted_text"),
    [
        (["--candidates", "0.2,1.4,time"], "--candidates 1.4"),
        (["--candidates", "0.2,0.4"], "what to compare with them"),
        (["--candidates", "time,energy"], "name some ratios"),
        (["--candidates", "0.2,quick"], "--candidates quick"),
        (["--candidates", "0.2,time*1"], "2 to 20"),
        (["--candidates", "0.2,time*"], "2 to 20"),
        (["--candidates", "0.2,time*1e9"], "2 to 20"),
        (["--fleets", "own,fast"], "--fleets fast: unknown; known: own, thin-links"),
        (["--methods", "fedspy"], "--methods fedspy"),
        (["--candidates", "0.2,0.2+best,time"], "best"),
        (["--target", "7"], "target"),
        (["--set", "task.kind=regression"], "scores of which more is better"),
        (["--methods", "srp-pfed", "--set", "method.loss_share=0.2"], "add --set method.name=srp-pfed"),
    ],
)
def test_what_cannot_be_played_is_told_in_one_line(run_file, options, wanted_text):
    found = CliRunner().invoke(app, [str(run_file), "--workers", "0", *options])
    assert found.exit_code == 2
    assert wanted_text in found.stderr
    assert found.stderr.count("\n") == 1
    assert not list(run_file.parent.glob("runs/**/rounds.jsonl"))


def test_a_fleet_is_played_and_again_costs_nothing(run_file):
    words = [str(run_file), "--workers", "0", "--candidates", "0.2,fedavg,time", "--seeds", "1"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    folder = run_file.parent / "runs" / "small.ratios"
    (group,) = json.loads((folder / "results.json").read_text())
    assert (group["fleet"], group["method"]) == ("own", "fedspu")
    candidates = {one["candidate"]: one for one in group["candidates"]}
    assert list(candidates) == ["0.2", "fedavg", "time"]
    (outcome,) = candidates["0.2"]["runs"]
    assert outcome["num_devices"] == 4
    assert outcome["round"] <= 3
    assert 0 < outcome["seconds"] <= outcome["lasted_s"]
    assert candidates["time"]["runs"][0]["lasted_s"] > 0
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "**own, fedspu**" in (folder / "results.md").read_text()
    again = CliRunner().invoke(app, [*words[:-3], "0.2,fedavg,time,bytes", "--seeds", "1"])
    assert "3 of 4 runs are finished already" in again.output
    assert "`bytes`" in (folder / "results.md").read_text()


def played_by(run_file, candidates, runs):
    """What the command says, the rounds of its one longer way, and its results."""
    words = [str(run_file), "--workers", "0", "--seeds", "1", "--runs", str(runs)]
    found = CliRunner().invoke(app, [*words, "--candidates", candidates])
    assert found.exit_code == 0, found.output
    (longer,) = runs.glob("small.ratios/own,fedspu,time_20*/seed-0/summary.json")
    results = (runs / "small.ratios" / "results.json").read_text()
    return found.output, json.loads(longer.read_text())["rounds"], results


@pytest.mark.nightly
def test_a_way_of_more_rounds_ends_when_its_time_is_over_and_is_judged_as_if_it_had_gone_on(
    run_file, monkeypatch
):
    _, rounds, cut = played_by(run_file, "0.2,fedavg,time*20", run_file.parent / "runs")
    again, same, _ = played_by(run_file, "0.2,fedavg,time*20", run_file.parent / "runs")
    _, more, _ = played_by(run_file, "0.2,1.0,time*20", run_file.parent / "runs")
    monkeypatch.setattr(planned_runs, "time_limit_s", lambda run: None)
    _, most, whole = played_by(run_file, "0.2,fedavg,time*20", run_file.parent / "whole")
    assert 3 <= rounds == same < more < most == 60
    assert "3 of 3 runs are finished already" in again
    assert cut == whole


def test_ratios_that_are_no_ratios_are_refused():
    with pytest.raises(SettingError, match="--candidates nan"):
        candidates_of("0.2,nan,time")


def test_its_help_names_every_fleet():
    wanted_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output
    assert f"comma-separated: {', '.join(FLEETS)}" in wanted_text
