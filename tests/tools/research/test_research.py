"""A researcher's interface: runs and comparisons from Python as data frames, with their files' figures."""

import csv
import json
import shutil
import statistics
import sys
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
from tests.fleet.test_semi_asynchronous import Desk
from tests.fleet.test_semi_asynchronous import settings as desk_settings
from tests.helpers.errors import raises

import fleetune
import fleetune.coordinator.reports.report
import fleetune.tools.compare.report
import fleetune.tools.simulator.workers.worker
from fleetune import coordinator, tools
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, STEPS
from fleetune.coordinator.metrics.summary import DaySummary
from fleetune.coordinator.store.folder_lock import claim
from fleetune.protocols.errors import DataError, FleetuneError, SettingError, StoreError
from fleetune.protocols.settings.run_toml import parse_run, settings_of
from fleetune.tools.compare import rows
from fleetune.tools.compare.rows import day_rows
from fleetune.tools.simulator.caller_samples import caller_samples
from fleetune.tools.simulator.partitioned_data import PartitionedData

SECTIONS = {
    "run": {"name": "small", "seed": 3, "rounds": 4},
    "model": {"name": "mlp"},
    "method": {"name": "fedspu"},
    "data": {"partition": {"kind": "dirichlet", "samples": 40, "test_fraction": 0.5}},
    "training": {"batch_size": 10, "learning_rate": 0.1},
    "round": {"participants": 3},
    "fleet": {"devices": 4, "ratios": [0.4, 1.0], "links": {"rural-dsl": 2}},
}
METHODS = ["local-only", "fedspu"]


def simulate(folder, name="small", rounds=1, **options):
    changes = {"run.name": name, "run.rounds": rounds, **options.pop("set", {})}
    return fleetune.simulate(SECTIONS, folder, set=changes, **options)


@pytest.fixture(scope="module", autouse=True)
def _no_pictures():
    """They take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coordinator.reports.report, tools.compare.report):
            patch.setattr(module, "can_paint", lambda: False)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told():
    """The rows that `on_round` was told."""
    return []


@pytest.fixture(scope="module")
def result(runs, told):
    return fleetune.simulate(SECTIONS, runs, on_round=told.append)


@pytest.fixture(scope="module")
def table(runs):
    return fleetune.compare(SECTIONS, METHODS, seeds=[3, 5], runs=runs, set={"run.rounds": 2})


def test_a_run_is_a_frame_of_rounds_with_the_figures_of_rounds_jsonl(result):
    lines = [json.loads(line) for line in (result.folder / "rounds.jsonl").read_text().splitlines()]
    training = [line for line in lines if not line.get("final_evaluation")]
    assert list(result.rounds.index) == [1, 2, 3, 4]
    assert result.rounds.index.name == "round"
    for (_, row), line in zip(result.rounds.iterrows(), training, strict=True):
        replies = line["devices"].values()
        assert row["bytes_up"] == sum(reply["bytes_up"] for reply in replies)
        assert row["replies"] == len(replies) == row["participants"] == 3
        after = [reply["measures"]["after"] for reply in replies]
        assert row["accuracy_after"] == pytest.approx(statistics.fmean(after))
        assert row["seconds"] == line["closed_s"] - line["opened_s"]
    assert result.rounds["bytes_up"].sum() == result.summary.bytes.up
    assert result.rounds["bytes_up"].dtype == np.int64
    assert result.rounds["joules"].sum() == pytest.approx(result.summary.joules)
    assert "accuracy_personal" not in result.rounds  # no training round tells it
    assert result.rounds["devices_so_far"].iloc[-1] == 4


def test_a_frame_of_devices_has_what_the_summary_has_and_boards_and_links(result):
    devices = result.devices
    assert list(devices.index) == list(result.summary.by_device)
    assert list(devices["accuracy_personal"]) == [row.personal for row in result.summary.by_device.values()]
    assert list(devices["updates"]) == [row.updates for row in result.summary.by_device.values()]
    assert (devices["board"] == "generic").all()
    thin = devices.iloc[:2]
    assert (thin["uplink_bps"] < 0.2 * thin["downlink_bps"]).all()
    assert "method.active_share" in devices
    assert set(result.diagnostics["figure"]) == {"active_share", "devices_at"}


def test_a_score_gives_its_columns_their_name(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 6)).astype(np.float32)
    numbers = fleetune.simulate(
        {
            **SECTIONS,
            "task": {"kind": "regression", "loss": "squared"},
            "data": {},
            "method": {"name": "fedavg"},
        },
        tmp_path,
        set={"run.rounds": 1, "training.learning_rate": 0.01},
        data=(x, x[:, :1] - x[:, 1:2]),
    )
    assert {"rmse_before", "rmse_after", "rmse_after_of_fleet"} <= set(numbers.rounds)
    assert {"rmse_personal", "mae_personal", "r2_personal"} <= set(numbers.devices)
    assert not [name for name in (*numbers.rounds, *numbers.devices) if "accuracy" in name]
    assert "personal RMSE" in repr(numbers)


def test_on_round_is_told_the_rows_and_changes_nothing(result, told, tmp_path):
    assert [row["round"] for row in told] == [1, 2, 3, 4]
    for row, (number, stands) in zip(told, result.rounds.iterrows(), strict=True):
        assert row["round"] == number
        common = [column for column in result.rounds if column in row]
        assert len(common) > 12
        pd.testing.assert_series_equal(
            pd.Series(row)[common].astype(float), stands[common], check_names=False
        )
    alone = simulate(tmp_path, rounds=4, report=False)
    assert not (alone.folder / "report.html").exists()
    assert (result.folder / "report.html").exists()
    pd.testing.assert_frame_equal(alone.rounds, result.rounds)
    pd.testing.assert_frame_equal(alone.devices, result.devices)


def test_true_from_on_round_ends_the_run_with_its_final_evaluation(result, tmp_path, caplog):
    early = simulate(tmp_path, rounds=4, on_round=lambda row: np.bool_(row["round"] == 1))
    pd.testing.assert_frame_equal(early.rounds, result.rounds.iloc[:1])
    assert early.summary.accuracy.personal_mean is not None
    assert not early.finished
    assert "not finished" in repr(fleetune.read_result(early.folder))
    whole = simulate(tmp_path, rounds=4)
    assert "was stopped: it begins anew" in caplog.text
    pd.testing.assert_frame_equal(whole.rounds, result.rounds)


def test_an_error_in_on_round_is_the_callers_and_the_same_call_begins_anew(tmp_path):
    def fails(row):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate(tmp_path, rounds=2, on_round=fails)
    left = fleetune.read_result(tmp_path / "small")
    assert (len(left.rounds), left.finished, left.summary.simulated) == (1, False, True)
    assert len(simulate(tmp_path, rounds=2, on_round=lambda row: "more").rounds) == 2


def test_semi_asynchronous_rounds_end_with_the_one_that_is_open(tmp_path):
    buffer = {"round.mode": "buffer", "round.buffer": 2, "round.participants": 3}
    early = simulate(tmp_path, rounds=6, set=buffer, on_round=lambda row: row["round"] == 2)
    assert len(early.rounds) in (2, 3)


def test_a_finished_run_is_read_and_not_played_again(result, runs):
    again = fleetune.simulate(SECTIONS, runs, on_round=lambda row: 1 / 0)
    pd.testing.assert_frame_equal(again.rounds, result.rounds)
    assert again.summary == result.summary == fleetune.read_summary(str(result.folder))


def test_another_run_of_the_name_is_refused_in_one_line_that_names_the_key(result, runs):
    with pytest.raises(
        SettingError, match=r"run.seed was 3 and is 4 now; set another run.name, .*fresh=True"
    ):
        fleetune.simulate(SECTIONS, runs, set={"run.seed": 4})
    with claim(result.folder), pytest.raises(StoreError, match="another process simulates this run now"):
        fleetune.simulate(SECTIONS, runs)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"run.roundz": 2}, r"run.roundz: unknown key; did you mean `rounds`\?"),
        ({"rounds": 2}, r"set 'rounds': use section.key, e.g. 'training.epochs'"),
        ({"run.name.of": 2}, "set 'run.name.of': name is no section"),
        ({"run.rounds": 2.5}, "run.rounds: expected"),
        ({"method.name": "fedspuu"}, "fedspu"),
    ],
)
def test_a_wrong_change_is_named(tmp_path, changes, line):
    with pytest.raises(SettingError, match=line):
        fleetune.simulate(SECTIONS, tmp_path, set=changes)


def test_settings_are_a_file_a_dict_or_what_was_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'run = { name = "one", rounds = 3 }\nmodel = { name = "mlp" }\nmethod = { name = "fedavg" }\n'
    )
    read = fleetune.read_run(str(path), {"run.rounds": np.int64(2), "fleet.ratios": (0.5, 1)})
    assert (read.run.rounds, read.fleet.ratios) == (2, (0.5, 1.0))
    assert fleetune.read_run(path, ["run.rounds=2", "fleet.ratios=[0.5, 1.0]"]) == read
    same = {"run.rounds": np.int64(2), "fleet.ratios": np.array([0.5, 1])}
    content = {"run": {"name": "one"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}}
    assert settings_of(read) is read
    assert settings_of(content, same) == settings_of(fleetune.read_run(path), same) == read
    assert content["run"] == {"name": "one"}


def test_without_pandas_one_line_says_how(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FleetuneError, match=r"^data frames need pandas: pip install 'pandas>=2.1'$"):
        rows.frame_of([])


def by_label(labels, num_devices, rng):
    """Every device has labels of its own, but for a few samples of all."""
    common = rng.choice(len(labels), 20 * num_devices, replace=False).reshape(num_devices, 20)
    return [
        np.union1d(np.flatnonzero(labels % num_devices == device)[:30], common[device])
        for device in range(num_devices)
    ]


def test_arrays_and_a_partition_of_ones_own_are_named_in_the_run_and_repeat(tmp_path):
    digits = fleetune.load_data("digits")
    one = simulate(tmp_path, data=(digits.x, digits.y), partition=by_label)
    data = one.settings.data
    assert data.source.startswith("given:")
    assert data.partition.kind.startswith("given:")
    assert one.devices["num_samples"].between(15, 30).all()
    same = simulate(tmp_path, "same", data={"x": digits.x, "y": digits.y}, partition=by_label)
    pd.testing.assert_frame_equal(same.rounds, one.rounds)
    assert (same.settings.data, simulate(tmp_path, data=digits, partition=by_label).settings.data) == (
        data,
        data,
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"data": lambda: (np.ones((60, 4)), np.arange(60) % 3)},
            r"data.source was \"given:\w+\" and is \"given:\w+\"",
        ),
        ({"partition": lambda *_: [np.arange(12) + 12 * k for k in range(4)]}, "data.partition.kind was"),
        ({"data": "digits"}, r"data.source was \"given:\w+\" and is \"digits\" now"),
    ],
)
def test_other_arrays_or_another_partition_are_another_run(arrays_run, change, line):
    folder, options = arrays_run
    with pytest.raises(SettingError, match=line):
        simulate(folder, **{**options, **change})


@pytest.fixture(scope="module")
def arrays_run(tmp_path_factory):
    """The folder of a run of arrays, in the way that users call it, and its arguments."""
    folder, x = tmp_path_factory.mktemp("arrays"), np.zeros((60, 4), np.float32)
    x[np.arange(60), np.arange(60) % 3] = 1
    rows = [np.arange(15) + 15 * device for device in range(4)]
    options = {"data": (x, np.arange(60) % 3), "partition": rows}
    simulate(folder, **options)
    return folder, options


def test_rows_may_be_apart_already_and_workers_have_them_too(arrays_run, tmp_path):
    _, options = arrays_run
    apart = [(rows[:10], rows[10:]) for rows in options["partition"]]
    here = simulate(tmp_path, data=options["data"], partition=apart)
    assert list(here.devices["num_samples"]) == [10] * 4
    there = simulate(tmp_path, "workers", data=options["data"], partition=apart, workers=1)
    pd.testing.assert_frame_equal(here.rounds, there.rounds)


def test_the_rows_that_were_given_are_those_that_devices_have():
    settings, digits = parse_run(SECTIONS), fleetune.load_data("digits")
    brought = caller_samples(settings, digits, by_label)
    rows = PartitionedData.of_run(brought.named_in(settings), brought)._rows
    assigned = by_label(digits.y, 4, fleetune.Key.of("fleetune", 3).child("partition", "given").generator())
    for (train, test), whole in zip(rows, assigned, strict=True):
        assert np.array_equal(np.union1d(train, test), whole)
        assert not np.intersect1d(train, test).size
    other = parse_run({**SECTIONS, "run": {**SECTIONS["run"], "seed": 4}})
    assert caller_samples(other, digits, by_label).named_in(other).data != brought.named_in(settings).data


@pytest.mark.parametrize(
    ("partition", "line"),
    [
        ([[0, 1]] * 3, "it assigns rows to 3 devices, but fleet.devices = 4"),
        ([[0, 1]] * 3 + [[7]], "device 3 has 1 rows, and it needs 2"),
        ([[0, 1]] * 3 + [[7, 7]], "device 3 has row 7 twice"),
        ([[0, 1]] * 3 + [[7, 2000]], r"device 3 has rows 7 to 2000; there are 1797"),
        ([[0, 1]] * 3 + [[0.5, 1]], "device 3 has float64 of shape"),
        ([([0, 1], [1])] * 4, "device 0 has row 1 for training and for testing"),
        (lambda labels, num, rng: 1 / 0, "your function failed: ZeroDivisionError"),
        (lambda labels, num, rng: None, "NoneType is no list of rows"),
    ],
)
def test_a_partition_that_is_none_is_refused_in_one_line(tmp_path, partition, line):
    with pytest.raises(SettingError, match=f"^partition: .*{line}"):
        simulate(tmp_path, partition=partition)


def test_what_was_given_has_to_be_given_again(arrays_run, tmp_path):
    folder, options = arrays_run
    stored = fleetune.read_result(folder / "small").settings
    with pytest.raises(SettingError, match=r"arrays from Python; pass them again as data=\(x, y\)"):
        fleetune.simulate(stored, tmp_path)
    with pytest.raises(SettingError, match="assigned from Python; pass partition= again"):
        fleetune.simulate(stored, tmp_path, data=options["data"])
    with pytest.raises(DataError, match=r"^data is int; expected"):
        simulate(tmp_path, data=3)


def test_a_source_function_has_arguments(tmp_path, monkeypatch):
    (tmp_path / "mysource.py").write_text(
        "import numpy as np\n"
        "def load(num=10, noise=0.0, day='sunday'):\n"
        "    assert (noise, day) == (0.5, 'monday')\n"
        "    return np.eye(4)[np.arange(num) % 4], np.arange(num) % 4\n"
    )
    monkeypatch.chdir(tmp_path)
    assert len(fleetune.load_data("mysource:load?num=24&noise=0.5&day=monday").y) == 24
    with pytest.raises(
        DataError, match=r"failed: TypeError: load\(\) got an unexpected keyword argument 'nois'"
    ):
        fleetune.load_data("mysource:load?nois=1")
    with pytest.raises(DataError, match=r"write options as in \?noise=0.1&day=monday"):
        fleetune.load_data("mysource:load?noise")


def test_a_comparison_is_a_frame_with_the_figures_of_runs_csv(table):
    rows = list(csv.DictReader((table.folder / "runs.csv").read_text().splitlines()))
    assert [(row.method, row.seed) for row in table.frame.itertuples()] == [
        (method, seed) for seed in (3, 5) for method in METHODS
    ]
    for (_, row), line in zip(table.frame.iterrows(), rows, strict=True):
        assert row["bytes_up"] == int(line["bytes_up"])
        assert row["accuracy_personal_mean"] == float(line["accuracy_personal_mean"])
    assert "accuracy_best_after" in table.frame
    assert "2 seeds (3, 5)" in (table.folder / "report.html").read_text()


def test_means_are_those_of_the_report(table):
    for label in METHODS:
        found = table.means.loc[label, "accuracy_personal_mean"]
        wanted = table.comparison.spread(label, PERSONAL_MEAN)
        assert found["mean"] == pytest.approx(wanted.mean)
        assert found["std"] == pytest.approx(wanted.deviation)
        assert found["count"] == wanted.count == 2


def test_rounds_devices_and_gains_of_a_comparison(table):
    assert len(table.rounds) == len(METHODS) * 2 * 2
    one = fleetune.read_result(table.folder / "fedspu" / "seed-5")
    mine = table.rounds.query("method == 'fedspu' and seed == 5").set_index("round")[list(one.rounds)]
    pd.testing.assert_frame_equal(mine, one.rounds, check_dtype=False)
    personal = table.devices.pivot_table(
        index=["seed", "device"], columns="method", values="accuracy_personal"
    )
    gains = table.gains().set_index(["seed", "device"])["gain"]
    assert (gains == (personal["fedspu"] - personal["local-only"])[gains.index]).all()
    assert len(gains) == 8
    with pytest.raises(
        SettingError,
        match=r"gains over 'fedavg': the comparison has no such configuration; known: local-only, fedspu",
    ):
        table.gains("fedavg")


def test_a_real_fleets_run_is_read_while_it_goes_on(tmp_path):
    desk = Desk(tmp_path / "run", desk_settings(start_with=4, deadline_s=1000.0), restart=False)
    with closing(desk.run.store):
        desk.play(until_closed=2)
        found = fleetune.read_result(tmp_path / "run")
    assert (found.summary.simulated, found.finished) == (False, False)
    assert list(found.rounds.index) == [1, 2]
    assert found.rounds["bytes_up"].sum() == found.devices["bytes_up"].sum() == found.summary.bytes.up > 0
    assert "board" not in found.devices  # nobody simulated one


def test_a_run_without_a_round_has_the_columns_of_one(result, tmp_path, monkeypatch):
    def unplayable(*_):
        raise StoreError("the disk is full")

    monkeypatch.setattr(fleetune.tools.simulator.workers.worker, "train", unplayable)
    with pytest.raises(StoreError):
        simulate(tmp_path)
    empty = fleetune.read_result(tmp_path / "small")
    assert len(empty.rounds) == 0
    assert set(empty.rounds) == set(result.rounds) - {metric.name for metric in STEPS}
    assert set(empty.devices) < set(result.devices)
    assert empty.days.empty
    assert repr(empty).startswith("<fedspu, 0 rounds, not finished")


def test_days_of_devices_whose_data_grow_are_a_frame(tmp_path):
    one = fleetune.Summary(method="fedavg", days=[DaySummary(1, 0.5, 2, 3.0, 40, 50), DaySummary(2, None)])
    days = rows.frame_of(day_rows(one), "day")
    assert list(days.index) == [1, 2]
    assert days.loc[1].to_dict() == {
        "accuracy_deployed": 0.5,
        "rounds": 2,
        "joules": 3.0,
        "bytes_up": 40,
        "bytes_down": 50,
        "drifting": 0,
    }
    assert np.isnan(days.loc[2, "accuracy_deployed"])


def test_a_picture_shows_itself_in_a_notebook(table):
    figure = table.plot("accuracy-by-device")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(figure.axes) == 1
    with raises(SettingError, "accuracy", remedy="accuracy-by-round"):
        table.plot("accuracy")


def test_the_same_call_plays_only_what_is_missing(table, runs):
    played = []
    more = fleetune.compare(
        SECTIONS, METHODS, seeds=(3, 5, 6), runs=runs, set={"run.rounds": 2}, on_round=played.append
    )
    assert {row["seed"] for row in played} == {6}
    assert [(row["method"], row["round"]) for row in played] == [(m, n) for m in METHODS for n in (1, 2)]
    assert played[0]["accuracy_after"] is not None
    assert len(more.frame) == 6
    pd.testing.assert_frame_equal(
        more.frame.iloc[:4].drop(columns=_to_target(more)), table.frame.drop(columns=_to_target(table))
    )


def _to_target(one):
    return [column for column in one.frame if column.endswith("_to_target")]


def test_contenders_have_settings_of_their_own_and_data_of_the_callers(runs):
    own = {"fedspu": {}, "small": {"name": "fedspu", "ratios": [0.2]}}
    changes = {"run.name": "own", "run.rounds": 1}
    found = fleetune.compare(SECTIONS, own, seeds=2, runs=runs, set=changes, partition=by_label)
    up = found.means["bytes_up", "mean"]
    assert up["small"] < up["fedspu"]
    kinds = {
        json.loads(path.read_text())["data"]["partition"]["kind"] for path in found.folder.rglob("run.json")
    }
    assert len(kinds) == 2  # each seed deals anew
    assert {kind[:6] for kind in kinds} == {"given:"}


def test_mistakes_in_a_comparison_are_one_line(tmp_path):
    for options, line in (
        ({"methods": ["fedspuu"]}, "^methods: no method 'fedspuu'; did you mean 'fedspu'"),
        ({"seeds": 0}, "^seeds 0: .*at least 1"),
        ({"seeds": [1, 1]}, r"^seeds \[1, 1\]: .*no seed twice"),
        ({"target": 2}, "^target 2: .*accuracy must be between 0 and 1"),
    ):
        with pytest.raises(SettingError, match=line):
            fleetune.compare(SECTIONS, runs=tmp_path, **options)


def test_a_folder_without_a_run_and_a_damaged_one_are_one_line(table, tmp_path):
    with pytest.raises(SettingError, match="holds no run: name the folder of one"):
        fleetune.read_result(tmp_path)
    damaged = shutil.copytree(table.folder / "fedspu" / "seed-3", tmp_path / "damaged")
    (damaged / "rounds.jsonl").write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        fleetune.read_result(damaged)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"engine": "spark"}, "^engine spark .*local, ray"),
        ({"address": "1.2.3.4:6379"}, "^address names a Ray cluster"),
        ({"engine": "ray", "address": "127.0.0.1:9"}, "^cannot reach a Ray cluster at 127.0.0.1:9"),
    ],
)
def test_where_nobody_can_work_it_is_one_line(how, line, tmp_path):
    if how.get("engine") == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetune[ray]'")
    asked = {"run": {"name": "x", "rounds": 1}, "data": {"source": "digits"}, "method": {"name": "fedavg"}}
    asked |= {"model": {"name": "mlp"}}
    for play in (fleetune.simulate, fleetune.compare):
        with pytest.raises(SettingError, match=line):
            play(asked, runs=tmp_path, **how)
    with pytest.raises(SettingError, match=line):
        fleetune.sweep(asked, {"training.epochs": [1]}, runs=tmp_path, **how)
    assert not list(tmp_path.rglob("rounds.jsonl"))
