"""A fleet behind shaped links: what is told of runs, the speed of boards, and the whole of it, tiny."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from benchmarks.shaped_links.measured_boards import Speeds, speeds, write_boards
from benchmarks.shaped_links.report import typical
from benchmarks.shaped_links.simulated_fleet import simulated
from benchmarks.shaped_links.trajectories import trajectory_of

from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.firmware_profiles import load
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.payloads import Measures
from fleetune.tools.links.network_namespaces import networks, obstacle

OBSTACLE = obstacle()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=f"emulated links: {OBSTACLE}")
COMMAND = [sys.executable, "-m", "benchmarks.shaped_links"]
HEEDING_CTRL_C = (  # whatever the tests' parent ignores, a shell's background for one
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    f" runpy.run_module({COMMAND[-1]!r}, run_name='__main__', alter_sys=True)"
)
RUN = """
[run]
name = "tiny"
rounds = 2
[model]
name = "mlp"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "fedspu"
[data]
source = "digits"
partition = { kind = "iid", samples = 60 }
[training]
epochs = 2
batch_size = 16
[round]
deadline_s = 60
[fleet]
devices = 2
links = { lora-backhaul = 1, lan = 1 }
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


BOARDS = dict.fromkeys("ab", replace(load("generic"), idle_w=1, receive_w=2, train_w=10, transmit_w=4))


def reply(after, download_s, train_s, upload_s):
    cost = RoundCost(download_s=download_s, train_s=train_s, upload_s=upload_s)
    return DeviceRound(0.2, 100, 10, Measures(num_samples=5, num_test=5, before=0.0, after=after), cost)


def closed(number, opened_s, closed_s, devices):
    return RoundRecord(number, 1, False, opened_s, closed_s, ("a", "b"), devices)


def test_a_trajectory_counts_from_the_first_round_and_counts_stragglers():
    rounds = [
        closed(number, 50.0 + 2 * number, 52.0 + 2 * number, {"a": reply(number / 10, 0.3, 0.4, 0.5)})
        for number in range(6)
    ]
    slow = {"a": reply(0.6, 0.1, 0.1, 0.1), "b": reply(0.6, 0.2, 1.0, 0.6)}
    rounds += [closed(number, 50.0 + 2 * number, 52.0 + 2 * number, slow) for number in range(6, 13)]
    trajectory = trajectory_of(rounds, BOARDS)
    assert (trajectory.rounds, trajectory.seconds, trajectory.round_s) == (13, 26.0, 2.0)
    assert (trajectory.bytes_up, trajectory.bytes_down, trajectory.late) == (200, 2000, 6)
    assert trajectory.points[0] == (2.0, 0.0)
    assert trajectory.points[2] == pytest.approx((6.0, 0.1))  # the mean of three rounds
    assert trajectory.seconds_to(0.29) == pytest.approx(10.0)
    assert trajectory.seconds_to(0.9) is None
    at_work_j, idle_j = 2 * 0.3 + 10 * 0.4 + 4 * 0.5, (2.0 - 0.3 - 0.4 - 0.5) + 2.0
    assert trajectory.joules[:2] == pytest.approx([at_work_j + idle_j, 2 * (at_work_j + idle_j)])
    assert trajectory.joules_to(0.29) == pytest.approx(5 * (at_work_j + idle_j))
    assert trajectory.joules_to(0.9) is None
    parts = trajectory.parts
    assert (parts.download, parts.train, parts.upload) == (0.2, 1.0, 0.6)  # of who took longest
    assert parts.rest == pytest.approx(0.2)


def test_joules_of_rounds_before_the_first_reply_count_until_the_score():
    """As with FedAvg behind thin links, where all are late at first."""
    rounds = [closed(0, 50.0, 52.0, {}), closed(1, 52.0, 54.0, {"a": reply(0.4, 0.3, 0.4, 0.5)})]
    trajectory = trajectory_of(rounds, BOARDS)
    assert trajectory.points == [(4.0, 0.4)]
    assert trajectory.joules_to(0.3) == pytest.approx(2 * 2.0 + 2 * 0.3 + 10 * 0.4 + 4 * 0.5 + 0.8 + 2.0)


def test_half_of_the_repeats_without_it_are_none():
    assert typical([1.0, None, 3.0]) == 2.0
    assert typical([1.0, None]) is None


def test_a_calibration_tells_the_speed_that_its_boards_have(run_file, tmp_path):
    """The simulation trains at a known speed; what is read from its rounds must be that one."""
    given = Speeds({"device-0": 0.02, "device-1": 0.5}, 0.0)
    changes = ["fleet.ratios=[0.4]", "run.rounds=3", *write_boards(given, tmp_path / "boards")]
    rounds = simulated(run_file, changes, tmp_path / "run", 0)
    found = speeds(read_run(run_file, changes), rounds)
    assert found.gflops == pytest.approx(given.gflops, rel=1e-3)
    assert found.jitter == pytest.approx(0, abs=1e-9)


def test_a_calibration_tells_how_training_varies_from_round_to_round(run_file, tmp_path):
    given = Speeds({"device-0": 0.02, "device-1": 0.5}, 0.4)
    changes = ["fleet.ratios=[0.4]", "run.rounds=40", *write_boards(given, tmp_path / "boards")]
    found = speeds(read_run(run_file, changes), simulated(run_file, changes, tmp_path / "run", 0))
    assert found.gflops == pytest.approx(given.gflops, rel=0.25)
    assert found.jitter == pytest.approx(0.4, rel=0.25)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--configurations", "fast"],
            "--configurations: 'fast' is none of paced, bytes, energy, p02, p04, fedavg",
        ),
        (
            ["--set", "fleet.devices=1"],
            "fleet.links lists 2 links, but fleet.devices = 1; list at most one for each device",
        ),
    ],
)
def test_a_mistake_is_one_line(run_file, tmp_path, words, line):
    done = subprocess.run(
        [*COMMAND, str(run_file), "--out", str(tmp_path / "out"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, f"shaped-links: {line}\n")


@pytest.mark.fleet
@pytest.mark.nightly
@needs_namespaces
def test_real_processes_and_the_simulation_agree(run_file, tmp_path):
    before = set(networks())
    out = tmp_path / "out"
    words = [
        "--out",
        str(out),
        "--configurations",
        "p02,energy",
        "--calibration-rounds",
        "2",
        "--target",
        "0.01",
        "--workers",
        "0",
    ]
    done = subprocess.run([*COMMAND, str(run_file), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "shaped-links.json").read_text())
    assert set(found["gflops"]) == {"device-0", "device-1"}
    assert found["jitter"] >= 0
    configuration = found["configurations"]["p02"]
    (actual,) = configuration["actual"]
    assert (actual["rounds"], configuration["predicted"]["rounds"], len(actual["points"])) == (2, 2, 2)
    assert actual["late"] == 0
    assert actual["bytes_up"] == pytest.approx(configuration["predicted"]["bytes_up"], rel=0.1)
    assert actual["round_s"] > 2 * 0.075  # a LoRa gateway's link: a task and a reply go over it
    assert configuration["predicted"]["round_s"] > 2 * 0.075
    assert 0 < actual["joules"][0] < actual["joules"][1]
    assert len(found["configurations"]["energy"]["actual"][0]["joules"]) == 2
    assert found["seconds_to_target"]["p02"][1] == actual["points"][0][0]
    assert (out / "shaped-links.png").read_bytes().startswith(b"\x89PNG")
    assert "p02" in done.stdout
    assert set(networks()) == before


@pytest.mark.nightly
@pytest.mark.fleet
@needs_namespaces
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_stopped_it_leaves_no_process_and_no_network(run_file, tmp_path, number, status):
    before, out = set(networks()), tmp_path / "out"
    bench = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HEEDING_CTRL_C,
            str(run_file),
            "--out",
            str(out),
            "--calibration-rounds",
            "50000",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    log = out / "calibration" / "device-0.log"
    give_up_at = time.monotonic() + 120
    while not (log.exists() and "round 1: done" in log.read_text()):
        assert time.monotonic() < give_up_at
        assert bench.poll() is None
        time.sleep(0.05)
    bench.send_signal(number)
    _, said = bench.communicate(timeout=60)
    assert (bench.returncode, said) == (status, "shaped-links: stopped; nothing was measured yet\n")
    assert set(networks()) == before
    assert not [one for one in _command_lines() if str(out) in one]


def _command_lines():
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
