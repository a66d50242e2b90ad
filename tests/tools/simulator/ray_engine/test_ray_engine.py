"""Simulations on a Ray cluster: two nodes on this machine, equal to local workers whatever dies."""

import gc
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import numpy as np
import psutil
import pytest
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_checkpoint import DEADLINE_S, TOML, Said, Stop, figures, stop
from tests.tools.simulator.test_simulate import BASE, settings

import fleetune
from fleetune.protocols.errors import FleetuneError, SettingError, StoreError
from fleetune.tools.compare.runs import PlannedRun, execute_all
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.runner import simulate

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetune[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402 - once it is known to be there

from fleetune.tools.simulator.ray_engine import node, node_worker, ray_workers, run_package  # noqa: E402
from fleetune.tools.simulator.ray_engine.cluster import imported, join  # noqa: E402
from fleetune.tools.simulator.ray_engine.direct_channel import ChannelError  # noqa: E402

pytestmark = [
    pytest.mark.fleet,
    # Ray's own: sockets and files that it leaves to the collector, and what it says of its next releases
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SLOW = {  # a task takes long enough to be killed in
    "run": {"name": "sim", "rounds": 2},
    "training": {"epochs": 60, "batch_size": 2, "learning_rate": 0.01},
    "method": {"name": "fedspu"},
}
CASES = {
    "personal models": {},
    "lossy both ways": {"encoding": {"up": "int4", "down": "int8"}, "method": {"name": "fedavg"}},
    "what waits on devices": {"encoding": {"up": "lowrank"}, "method": {"name": "fedavg"}},
    "optimisers remember": {
        "training": {"optimiser": "adamw", "optimiser_state": "device", "learning_rate": 0.01},
        "method": {"name": "fedavg"},
    },
    "canaries": {
        "method": {"name": "fedavg"},
        "adoption": {"enabled": True, "compare_alone": 0, "canary": 0.5, "watch": 2, "held_out": 0.5},
    },
    "late devices": {
        "fleet": BASE["fleet"] | {"jitter": 1.0, "spread": 1.0, "ratios": [0.2, 1.0]},
        "round": {"deadline_s": 0.02, "quorum": 2},
    },
    "ONNX Runtime": {"fleet": BASE["fleet"] | {"trainer": "onnx"}},
    "buffered": {"round": {"mode": "buffer", "buffer": 3}, "method": {"name": "fedavg"}},
    "data that grow": {
        "data": BASE["data"] | {"arrivals": {"first": 20, "per_day": 20}},
        "fleet": BASE["fleet"] | {"days": 2},
        "schedule": {"every": "6h"},
    },
    **{f"method {name}": {"method": {"name": name}} for name in ("dc-pfl", "fedpurin", "kapc", "lotteryfl")},
}
KEPT = ("personal models", "ONNX Runtime", "lossy both ways")


@pytest.fixture(scope="module")
def cluster():
    """A node that knows the cluster, with one worker, and one more."""
    imported()  # sets what a cluster of ours has
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    try:
        yield found
    finally:
        ray_workers._spare.clear()
        ray.shutdown()
        found.shutdown()


@pytest.fixture(scope="module")
def slow_alone(tmp_path_factory):
    """What `SLOW` comes to."""
    return alone(tmp_path_factory.mktemp("slow"), settings(**SLOW))


def play(folder, asked, **how):
    run, summary = simulate(asked, folder, workers=2, fresh=False, **how)
    with closing(run.store):
        return figures(run, summary)


def alone(folder, asked):
    run, summary = simulate(asked, folder, workers=0, fresh=False)
    with closing(run.store):
        return figures(run, summary)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in (folder / "devices").rglob("*") if path.is_file())


def actors():
    """Processes of workers, as the system shows them."""
    return [
        one for one in psutil.process_iter(["cmdline"]) if "NodeWorker" in " ".join(one.info["cmdline"] or ())
    ]


def soon(true):
    give_up = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return found


def free():
    """No workers, who hold the processors of the cluster, are left of runs before."""
    ray_workers.end_spare_workers()
    gc.collect()  # a run that failed lets go of its workers with what it raised
    soon(lambda: not actors())


def in_mid_round(kill):
    """Once the first round is over and workers are at the second: an `on_round`, and what it did."""
    done = []

    def on_round(record):
        if record.number == 1:
            at_work = [one.pid for one in actors()]
            before = {pid: psutil.Process(pid).cpu_times().user for pid in at_work}

            def act():
                soon(lambda: all(psutil.Process(pid).cpu_times().user > before[pid] + 0.3 for pid in at_work))
                done.append(kill())

            threading.Thread(target=act).start()
        return False

    return on_round, done


@pytest.mark.parametrize("name", sooner(CASES, kept=KEPT))
def test_a_cluster_changes_nothing(name, tmp_path, cluster):
    asked = settings(**{"run": {"name": "sim", "rounds": 3}, **CASES[name]})
    assert play(tmp_path / "b", asked, cluster=cluster.address) == alone(tmp_path / "a", asked)
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert files(tmp_path / "b")


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["nodes are elsewhere", "nodes are reached through Ray alone"])
def test_nodes_of_other_machines_come_to_the_same(where, tmp_path, cluster, monkeypatch):
    def unreachable(address, key):
        raise ChannelError("no route")

    if where == "nodes are elsewhere":
        monkeypatch.setattr(node.Node, "is_here", False)
    else:
        monkeypatch.setattr(node, "connect", unreachable)
    asked = settings(**CASES["lossy both ways"])
    assert play(tmp_path / "b", asked, cluster=cluster.address) == alone(tmp_path / "a", asked)


@pytest.mark.nightly
def test_samples_of_the_callers_go_along(tmp_path, cluster):
    from fleetune.edge_agent.datasets.sources import load

    digits = load("digits", None)
    shares = tuple(np.arange(30) + 30 * device for device in range(6))
    given = CallerSamples(digits, shares)
    asked = given.named_in(settings())
    ours = play(tmp_path / "b", asked, caller_samples=given, cluster=cluster.address)
    assert ours == play(tmp_path / "a", asked, caller_samples=given)


@pytest.mark.nightly
def test_a_model_of_ones_own_goes_along(tmp_path, cluster, monkeypatch):
    """From the current folder, with what it imports from there."""
    (tmp_path / "widths.py").write_text("WIDTH = 9\n")
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\nimport widths\n"
        "def small(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, widths.WIDTH), nn.ReLU(),"
        " nn.Linear(widths.WIDTH, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = settings(model={"name": "my_models:small"}, method={"name": "fedavg"})
    code = run_package.user_code_of(asked, tmp_path)
    assert set(code) == {"my_models.py", "widths.py"}
    assert run_package.user_code_of(settings(), tmp_path) == {}
    assert play(tmp_path / "b", asked, cluster=cluster.address) == alone(tmp_path / "a", asked)


@pytest.mark.nightly
def test_from_python_it_is_an_argument(tmp_path, cluster):
    """Samples of the caller's, too, and both in a run and in a comparison."""
    noise = np.random.default_rng(1)
    asked = {
        "run": {"name": "mine", "rounds": 2},
        "model": {"name": "mlp"},
        "method": {"name": "fedspu"},
        "data": {"partition": {"kind": "iid", "samples": 20}},
        "fleet": {"devices": 3},
    }
    data = noise.normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 10
    there = {"engine": "ray", "address": cluster.address}
    join(cluster.address)
    here, far = (
        fleetune.simulate(asked, tmp_path / name, data=data, report=False, **how)
        for name, how in (("a", {}), ("b", there))
    )
    assert far.summary.accuracy == here.summary.accuracy
    assert far.records == here.records
    here, far = (
        fleetune.compare(asked, ["fedspu", "fedavg"], runs=tmp_path / name, data=data, **how)
        for name, how in (("a", {}), ("b", there))
    )
    assert far.frame.equals(here.frame)
    assert ray.is_initialized(), "who has Ray already keeps it"
    with pytest.raises(SettingError, match=r"address 1\.2\.3\.4:6379: this process is already connected"):
        fleetune.simulate(asked, tmp_path / "c", data=data, engine="ray", address="1.2.3.4:6379")


@pytest.mark.nightly
def test_a_worker_that_is_killed_in_mid_round_costs_its_task(tmp_path, cluster, slow_alone):
    free()  # a worker of an earlier run never works in this one
    asked, said = settings(**SLOW), Said()

    def kill():
        victim = actors()[0]
        victim.kill()
        return victim.pid

    on_round, done = in_mid_round(kill)
    ours = play(tmp_path / "b", asked, cluster=cluster.address, on_round=on_round, observers=[said])
    assert done
    assert [line for line in said.lines if "died" in line and "is repeated" in line]
    assert ours == slow_alone


@pytest.mark.nightly
def test_a_node_that_dies_in_mid_round_costs_its_tasks(tmp_path, cluster, slow_alone):
    free()  # a worker of an earlier run never works in this one
    asked, said = settings(**SLOW), Said()
    node = soon(lambda: cluster.worker_nodes and next(iter(cluster.worker_nodes)))
    on_round, done = in_mid_round(lambda: [cluster.remove_node(node, allow_graceful=False)])
    try:
        ours = play(tmp_path / "b", asked, cluster=cluster.address, on_round=on_round, observers=[said])
    finally:
        cluster.add_node(num_cpus=1)
    assert done
    assert [line for line in said.lines if "died" in line]
    assert ours == slow_alone


@pytest.mark.nightly
def test_stopped_it_goes_on_with_either_engine(tmp_path, cluster):
    asked = settings(**CASES["lossy both ways"])
    unbroken = alone(tmp_path / "a", asked)
    with pytest.raises(Stop):
        play(tmp_path / "b", asked, cluster=cluster.address, on_round=stop)
    with pytest.raises(Stop):
        play(tmp_path / "b", asked, on_round=stop)
    assert play(tmp_path / "b", asked, cluster=cluster.address) == unbroken


@pytest.mark.nightly
def test_a_device_whose_files_cannot_be_read_is_told_and_nobody_waits_for_it(tmp_path, cluster, monkeypatch):
    def unreadable(devices, name):
        raise StoreError(f"cannot read the files of {name}")

    monkeypatch.setattr(ray_workers.device_copies, "all_of", unreadable)
    with pytest.raises(StoreError, match=r"cannot read the files of device-\d"):
        play(tmp_path, settings(), cluster=cluster.address)


@pytest.mark.nightly
def test_a_task_that_is_the_death_of_workers_is_one_line(tmp_path, cluster, slow_alone, monkeypatch):
    """As for lack of memory; what is there goes on when it is asked for again."""
    asked = settings(**SLOW)
    ended = threading.Event()

    def keep_killing():
        """Whoever is at a task, by what it has worked since it was ready."""
        ready = {}
        while not ended.is_set():
            for one in actors():
                if "NodeWorker.serve" in " ".join(one.info["cmdline"]):
                    with suppress(psutil.NoSuchProcess):
                        worked_s = one.cpu_times().user
                        if worked_s > ready.setdefault(one.pid, worked_s) + 0.2:
                            one.kill()
            time.sleep(0.02)

    killing = threading.Thread(target=keep_killing)
    with pytest.raises(Stop):
        play(tmp_path / "b", asked, cluster=cluster.address, on_round=stop)
    monkeypatch.setattr(ray_workers, "_MOST_DEATHS", 1)
    killing.start()
    try:
        with pytest.raises(FleetuneError, match=r"died at device-\d's task.*the same command"):
            play(tmp_path / "b", asked, cluster=cluster.address)
    finally:
        ended.set()
        killing.join()
    assert play(tmp_path / "b", asked, cluster=cluster.address) == slow_alone


def test_other_versions_on_a_node_are_refused_by_name(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(run_package, "version", lambda package: "0.0")
    with pytest.raises(
        SettingError, match=r"node .* has fleetune .*, and this machine 0\.0: results would differ"
    ):
        play(tmp_path, settings(), cluster=cluster.address)


def test_a_cluster_without_room_is_one_line(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(ray_workers, "PATIENCE_S", 1.0)
    free()
    full = [ray.remote(num_cpus=1)(node_worker.NodeWorker).remote() for _ in range(2)]
    ray.get([one.where.remote() for one in full])
    try:
        with pytest.raises(FleetuneError, match="no worker on the Ray cluster was ready"):
            play(tmp_path, settings(), cluster=cluster.address)
    finally:
        for one in full:
            ray.kill(one)


def side_by_side(folder, address):
    """The rounds of three runs."""
    cells = [
        PlannedRun(
            method,
            settings(run={"name": "sim", "rounds": 2}, method={"name": method}),
            folder / method,
            folder,
        )
        for method in ("fedavg", "fedspu", "ditto")
    ]
    closed, problems = [], []
    execute_all(
        cells,
        workers=2,
        on_round=closed.append,
        on_done=lambda cell, problem: problems.append(problem),
        cluster=address,
    )
    assert problems == [None] * 3
    assert sum(not one.final_evaluation for one in closed) == 6
    return [(cell.folder / "rounds.jsonl").read_bytes() for cell in cells]


@pytest.mark.nightly
def test_runs_side_by_side_share_a_cluster(tmp_path, cluster):
    """As `compare`, `sweep` and `paper` play them: each a process here with workers of its own there."""
    free()
    assert side_by_side(tmp_path / "b", cluster.address) == side_by_side(tmp_path / "a", None)


def command(folder, runs, *more):
    words = ["run", "run.toml", "--runs", runs, "--workers", "2", "--engine", "ray", *more]
    return {"args": [sys.executable, "-m", "fleetune.tools.cli", *words], "cwd": folder}


@pytest.mark.nightly
def test_a_command_that_was_killed_leaves_no_ray_and_goes_on(tmp_path):
    """As a user does it, without a cluster: one begins and ends with the command, whatever happens."""
    (tmp_path / "run.toml").write_text(TOML.replace("rounds = 40", "rounds = 200"))
    rounds = tmp_path / "b" / "sim" / "rounds.jsonl"

    def begun(number):
        process = subprocess.Popen(
            **command(tmp_path, "b"), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        soon(lambda: rounds.exists() and rounds.read_bytes().count(b"\n") >= number)
        return process, psutil.Process(process.pid).children(recursive=True)

    for number, number_of_signal, status in ((2, signal.SIGKILL, -9), (5, signal.SIGINT, 130)):
        process, family = begun(number)
        process.send_signal(number_of_signal)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == status
        left = psutil.wait_procs(family, timeout=30)[1]
        if number_of_signal == signal.SIGKILL:  # Ray's agents look for their head for a minute
            left = [one for one in left if not one.name().endswith("Agent")]
        assert not left
    whole = subprocess.run(**command(tmp_path, "b"), capture_output=True, text=True, check=True)
    assert "was stopped: it goes on after round" in whole.stdout
    assert whole.stderr == ""
    alone = [*command(tmp_path, "a")["args"][:-2], "--engine", "local"]
    subprocess.run(alone, cwd=tmp_path, capture_output=True, check=True)
    assert rounds.read_bytes() == (tmp_path / "a" / "sim" / "rounds.jsonl").read_bytes()


def test_no_cluster_is_one_line(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    done = subprocess.run(
        **command(tmp_path, "a", "--address", "127.0.0.1:1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("edge-sim: cannot reach a Ray cluster at 127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1
