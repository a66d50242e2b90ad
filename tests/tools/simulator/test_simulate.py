"""A simulated fleet: the real engine, codec and training; only time is imagined."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from tests.helpers.places import ROOT

from fleetune.coordinator.metrics.summary import PayloadBytes
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.workers import worker

BASE = {
    "run": {"name": "sim", "rounds": 4},
    "model": {"name": "mlp"},
    "method": {"name": "fedspu"},
    "data": {
        "source": "digits",
        "partition": {"kind": "dirichlet", "alpha": 0.5, "samples": 60, "test_fraction": 0.5},
    },
    "training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1},
    "fleet": {"devices": 6, "boards": {"raspberry-pi-zero-2w": 2, "raspberry-pi-4b": 2}},
}


def settings(**sections):
    names = {**BASE, **sections}
    return parse_run({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in names})


def play(tmp_path: Path, name="a", workers=0, **sections):
    run, summary = simulate(settings(**sections), tmp_path / name, workers=workers, fresh=True)
    weights = run.controller.shared_model
    run.store.close()
    return run, summary, weights


def test_the_same_seed_gives_the_same_run_bit_for_bit(tmp_path):
    _, first, weights = play(tmp_path, "a")
    _, again, same = play(tmp_path, "b")
    _, _, other = play(tmp_path, "c", run={"name": "sim", "rounds": 4, "seed": 1})
    assert weights.tobytes() == same.tobytes()
    but = {"bytes": PayloadBytes(), "provenance": UNSET}  # a random run id, processor time
    assert replace(first, **but) == replace(again, **but)
    assert first.bytes.up == again.bytes.up
    assert weights.tobytes() != other.tobytes()


def test_jitter_changes_how_long_training_takes_from_round_to_round_and_nothing_else(tmp_path):
    def train_s(name, jitter):
        fleet = BASE["fleet"] | {"ratios": [0.4], "jitter": jitter}
        closed = []

        def on_round(record):
            closed.append(record)
            return False

        run, _ = simulate(settings(fleet=fleet), tmp_path / name, workers=0, fresh=True, on_round=on_round)
        run.store.close()
        seconds = [[one.devices[f"device-{n}"].actual.train_s for one in closed] for n in range(6)]
        return seconds, run.controller.shared_model.tobytes()

    steady, weights = train_s("a", 0.0)
    varying, same = train_s("b", 0.3)
    assert (varying, same) == train_s("c", 0.3)
    assert same == weights
    for usual, own in zip(steady, varying, strict=True):
        assert len(set(usual)) == 1
        factors = {one / usual[0] for one in own}
        assert len(factors) == len(own)
        assert all(0.25 < factor < 4 for factor in factors)


def test_worker_processes_change_nothing(tmp_path):
    _, alone, weights = play(tmp_path, "a")
    _, pooled, same = play(tmp_path, "b", workers=2)
    assert weights.tobytes() == same.tobytes()
    assert alone.by_device == pooled.by_device


def test_bytes_follow_the_ratio_and_the_dense_size_is_stated(tmp_path):
    _, summary, _ = play(tmp_path, fleet={"devices": 6, "ratios": [0.2, 1.0]})
    rows = summary.by_device
    assert rows["device-0"].ratio == 0.2
    assert rows["device-1"].ratio == 1.0
    assert rows["device-0"].up < rows["device-1"].up / 3
    assert summary.bytes.up_dense == 4 * summary.parameters * 6 * 4


def test_a_thinner_link_takes_longer_and_moves_the_same_bytes(tmp_path):
    fast = play(tmp_path, "a", fleet={"devices": 6, "uplink_mbps": 10, "downlink_mbps": 50})
    slow = play(tmp_path, "b", fleet={"devices": 6, "uplink_mbps": 0.1, "downlink_mbps": 50})
    assert slow[1].bytes.up == fast[1].bytes.up
    assert slow[1].seconds.up == pytest.approx(100 * fast[1].seconds.up)
    assert slow[1].seconds.rounds > fast[1].seconds.rounds
    assert slow[2].tobytes() == fast[2].tobytes()


def test_epochs_of_a_method_s_own_take_as_long_as_what_they_train(tmp_path):
    headed = {"name": "fedrep", "head_epochs": 5, "body_epochs": 3}
    several = play(tmp_path, "a", method={"name": "ditto"}, training={"epochs": 2})[1]
    plain = play(tmp_path, "b", method={"name": "fedavg"}, training={"epochs": 4})[1]
    more = play(tmp_path, "c", method={"name": "fedavg"}, training={"epochs": 5})[1]
    parts = play(tmp_path, "d", method=headed, training={"epochs": 1})[1]
    seconds = [summary.seconds.train for summary in (several, plain, more, parts)]
    assert seconds[0] == pytest.approx(seconds[1])
    forward, first, head = 64 * 64 + 64 * 32 + 32 * 10, 64 * 64, 32 * 10
    whole = 3 * forward - first
    epochs = 5 * (forward + head) / whole + 3 * (whole - head) / whole
    assert seconds[3] == pytest.approx(seconds[1] + (epochs - 4) * (seconds[2] - seconds[1]))


@pytest.mark.nightly
def test_collaboration_helps_where_samples_are_few(tmp_path):
    sections = {
        "run": {"rounds": 30},
        "training": {"epochs": 2},
        "data": {
            "mean": 0.3,
            "std": 0.4,
            "partition": {"kind": "dirichlet", "alpha": 0.5, "samples": 200, "test_fraction": 0.7},
        },
    }
    _, ours, _ = play(tmp_path, "a", **sections)
    _, alone, _ = play(tmp_path, "b", method={"name": "local-only"}, **sections)
    assert ours.accuracy.personal_mean > alone.accuracy.personal_mean
    assert alone.bytes.up < 0.05 * ours.bytes.up


def test_devices_that_come_and_go_still_finish_every_round(tmp_path):
    _, summary, _ = play(
        tmp_path,
        run={"rounds": 6},
        round={"deadline_s": 0.02, "quorum": 2},
        fleet={"devices": 6, "availability": 0.6, "uplink_mbps": 20, "downlink_mbps": 80},
    )
    assert summary.rounds == 6
    assert summary.refused.get("engine-gone", 0) > 0
    assert all(record.devices for record in run_records(tmp_path))


@pytest.mark.nightly
def test_a_device_that_comes_back_in_mid_task_does_not_train_twice(tmp_path, monkeypatch):
    trained, reply = [], worker.train

    def counting(job):
        trained.append((job.name, job.payload))
        return reply(job)

    monkeypatch.setattr(worker, "train", counting)
    boards = {"n100-gateway": 4}  # the other two are of an unknown speed, so they do not decline
    _, summary, _ = play(
        tmp_path,
        run={"rounds": 30},
        round={"mode": "buffer", "buffer": 1, "deadline_s": 0.01},
        training={"epochs": 150},
        fleet={"boards": boards, "ratios": [0.1], "availability": 0.6},
    )
    assert summary.refused["engine-gone"] > 0
    assert len(trained) == len(set(trained))


def run_records(tmp_path):
    from fleetune.coordinator.store.run_store import RunStore

    store = RunStore.open(tmp_path / "a" / "state.sqlite", durable=False)
    records = [record for record in store.records() if not record.final_evaluation]
    store.close()
    return records


def test_over_selection_closes_a_round_with_the_first_replies(tmp_path):
    play(tmp_path, round={"participants": 2, "over_selection": 2.0})
    for record in run_records(tmp_path):
        assert len(record.participants) == 4
        assert len(record.devices) == 2


def test_early_stopping_ends_the_run_when_nobody_gains(tmp_path):
    _, summary, _ = play(
        tmp_path,
        run={"rounds": 200},
        method={"early_stopping": True},
        data={"validation_fraction": 0.3},
        training={"epochs": 3},
    )
    assert 1 < summary.rounds < 200
    assert len(summary.by_device) == 6
    assert summary.accuracy.personal_mean is not None


def test_devices_that_cannot_meet_the_deadline_decline_with_the_figures(tmp_path):
    boards = {"n100-gateway": 5, "raspberry-pi-zero-2w": 1}
    _, summary, _ = play(
        tmp_path, method={"name": "fedavg"}, round={"deadline_s": 0.02}, fleet={"boards": boards}
    )
    assert summary.refused["engine-refused"] == 1
    assert summary.by_device["device-5"].updates == 0
    assert summary.by_device["device-0"].updates == 4


def test_personal_states_lie_on_disk_and_not_in_memory(tmp_path):
    play(tmp_path, fleet={"devices": 40})
    assert len(list((tmp_path / "a" / "devices").glob("*.state"))) == 40


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "lennet5"}}, "did you mean"),
        ({"model": {"name": "mlp", "num_classes": 4}}, "label 9; the model has 0..3"),
        ({"model": {"name": "mlp", "input_shape": [3, 8, 8]}}, "samples have shape"),
        ({"method": {"name": "fedspoo"}}, "did you mean 'fedspu'"),
        ({"method": {"early_stopping": True}}, "data.validation_fraction: fedspu needs validation samples"),
        ({"fleet": {"devices": 2, "boards": {"raspberry-pi-4b": 3}}}, "lists 3 boards"),
        ({"fleet": {"devices": 2, "boards": {"raspbery-pi": 1}}}, "no board 'raspbery-pi'"),
        ({"data": {"source": "idx:nowhere"}}, "nowhere"),
        ({"data": {"partition": {"kind": "dirichlett"}}}, "dirichlett"),
        ({"round": {"deadline_s": 1e-6}, "fleet": {"boards": {"jetson-nano": 6}}}, "nothing fits: 0.1 would"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, sections, message):
    with pytest.raises(FleetuneError) as caught:
        play(tmp_path, **sections)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_with_another_run_is_not_touched(tmp_path):
    play(tmp_path)
    before = (tmp_path / "a" / "state.sqlite").read_bytes()
    with pytest.raises(SettingError, match="holds a run with other settings"):
        simulate(replace(settings(), method={"name": "fedavg"}), tmp_path / "a", workers=0, fresh=False)
    assert (tmp_path / "a" / "state.sqlite").read_bytes() == before


def test_the_command_leaves_a_report_that_a_script_can_read(tmp_path):
    from typer.testing import CliRunner

    from fleetune.tools.cli import app

    file = ROOT / "tools" / "demo.toml"
    arguments = ["run", str(file), "--runs", str(tmp_path), "--workers", "0", "--set", "run.rounds=3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["simulated"] is True
    assert 0 < summary["accuracy"]["personal_mean"] <= 1
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    assert len((tmp_path / "demo" / "rounds.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "demo" / "models" / "shared.safetensors").exists()
    wrong = CliRunner().invoke(app, ["run", str(file), "--runs", str(tmp_path), "--set", "run.round=3"])
    assert wrong.exit_code == 2
    assert wrong.exception is None or isinstance(wrong.exception, SystemExit)


def test_shared_weights_are_finite_and_of_the_models_size(tmp_path):
    run, _, weights = play(tmp_path)
    assert weights.shape == (run.enrolment.spec.size,)
    assert np.isfinite(weights).all()


def test_a_worker_that_dies_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "fragile.py").write_text(
        "import multiprocessing, os\nfrom torch import nn\n"
        "def net(input_shape, num_classes):\n"
        "    if multiprocessing.parent_process():\n        os._exit(1)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    run = settings(model={"name": "fragile:net", "input_shape": [1, 8, 8], "num_classes": 10})
    with pytest.raises(FleetuneError, match=r"a worker process died.*try fewer --workers"):
        simulate(run, tmp_path / "run", workers=1, fresh=True)
