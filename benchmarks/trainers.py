"""Time and memory of an agent with each trainer that is installed here.

    python -m benchmarks.trainers

First it measures a training step of every built-in model, with alternating trainers. Then real agents train
LeNet-5 over MQTT. It measures the seconds until they are connected and have joined, and their memory, idle
and at its peak. Ratios are of medians, relative to torch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.processes import memory_mb, started, wait_for
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.edge_agent.datasets.npz import write_npz
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.trainers import Kind, installed, make_backend
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.payloads import run_key

MODELS = {
    "mlp": (1, 28, 28),
    "lenet5": (1, 28, 28),
    "cnn-kapc": (1, 28, 28),
    "cnn-fedspu-cifar": (3, 32, 32),
    "cnn-fedspu-emnist": (1, 28, 28),
    "har-cnn": (9, 128),
    "resnet8": (1, 28, 28),
}
BATCH_SIZE, NUM_CLASSES, NUM_SAMPLES = 16, 10, 600

RUN_TOML = """
[run]
name = "bench"
rounds = {rounds}
[model]
name = "lenet5"
input_shape = [1, 28, 28]
num_classes = 10
[method]
name = "fedspu"
[training]
epochs = 2
batch_size = 16
[round]
start_with = 1
deadline_s = 600
"""


def step_seconds(name: str, kinds: tuple[Kind, ...], steps: int) -> dict[str, list[float]]:
    """Seconds of each step for each trainer, alternating; three warm-up steps are left out."""
    from fleetune.coordinator.export.make_bundle import make_bundle

    bundle = make_bundle(name, MODELS[name], NUM_CLASSES, run_key(0).child("weights"))
    backends: dict[str, Backend] = {kind: make_backend(kind, bundle.spec, bundle, 1) for kind in kinds}
    draw = Key.of("bench").generator()
    x = draw.standard_normal((BATCH_SIZE, *MODELS[name])).astype(np.float32)
    y = draw.integers(0, NUM_CLASSES, BATCH_SIZE)
    weights = make_backend("torch", bundle.spec, None, 1).weights.copy()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(steps + 3):
        for kind, backend in backends.items():
            backend.load(weights)
            began = time.perf_counter()
            backend.step(x, y, Key(step))
            if step >= 3:
                found[kind].append(time.perf_counter() - began)
    return found


def agent_figures(kind: Kind, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds and megabytes of one real agent, by name of the figure."""
    folder.mkdir()
    draw = Key.of("bench").generator()
    x = draw.standard_normal((NUM_SAMPLES, *MODELS["lenet5"])).astype(np.float32)
    write_npz(folder / "data.npz", {"x": x, "y": np.arange(NUM_SAMPLES) % NUM_CLASSES})
    (folder / "run.toml").write_text(RUN_TOML.format(rounds=rounds))
    with EmbeddedBroker.start(folder / "broker") as broker:
        address = ["--broker", f"{broker.host}:{broker.port}"]
        command = ["fleetune.edge_agent.cli", "run", "--fleet", "bench", "--device", "d", "--trainer", kind]
        command += ["--data", f"npz:{folder / 'data.npz'}", "--state", str(folder / "state"), *address]
        began = time.monotonic()
        with started(command, folder / "agent.log") as agent:
            wait_for(folder / "agent.log", "connected;")
            connected_s, idle = time.monotonic() - began, memory_mb(agent.pid, "VmRSS")
            serve = ["fleetune.coordinator.cli", "serve", str(folder / "run.toml"), "--runs", str(folder)]
            with started([*serve, *address], folder / "coordinator.log"):
                joined_s = _joining_s(folder)
                wait_for(folder / "agent.log", "is finished")
            time.sleep(1)  # time for its clean-up
            return {
                "connected after, s": connected_s,
                "joined after, s": joined_s,
                "idle before its first run, MB": idle,
                "idle after a run, MB": memory_mb(agent.pid, "VmRSS"),
                "peak, MB": memory_mb(agent.pid, "VmHWM"),
            }


def _joining_s(folder: Path) -> float:
    """Seconds from the enrolment on disk until the agent's log says that it joined."""
    wait_for(folder / "agent.log", "joined run")
    (run,) = (folder / "state" / "bench" / "d" / "runs").iterdir()
    log = next(line for line in (folder / "agent.log").read_text().splitlines() if "joined run" in line)
    at = datetime.strptime(log[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone()
    return at.timestamp() - (run / "enrolment").stat().st_mtime


def _help_s(times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-P", "-m", "fleetune.edge_agent.cli", "--help"], check=True, capture_output=True
        )
        seconds.append(time.monotonic() - began)
    return median(seconds)


def _steps_table(found: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title=f"a training step, batch {BATCH_SIZE}, one thread: median ms (ratio to torch)")
    table.add_column("model")
    for kind in next(iter(found.values())):
        table.add_column(kind, justify="right")
    for name, seconds in found.items():
        base = median(seconds["torch"]) if "torch" in seconds else float("nan")
        row = [f"{1e3 * median(each):.2f} ({median(each) / base:.2f})" for each in seconds.values()]
        table.add_row(name, *row)
    return table


def _agents_table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="an agent that trains LeNet-5 (ratio to torch)")
    table.add_column("figure")
    for kind in found:
        table.add_column(kind, justify="right")
    for figure in next(iter(found.values())):
        base = found.get("torch", {}).get(figure, float("nan"))
        table.add_row(figure, *(f"{each[figure]:.2f} ({each[figure] / base:.2f})" for each in found.values()))
    return table


def main(
    steps: Annotated[int, typer.Option(help="of each trainer on each model")] = 60,
    rounds: Annotated[int, typer.Option(help="of each agent")] = 3,
    models: Annotated[str, typer.Option(help="comma-separated; none: agents only")] = ",".join(MODELS),
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
) -> None:
    """Compare the trainers that are installed here."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds, console = installed(), Console()
    found: dict[str, Any] = {"steps": {}, "agents": {}, "help_s": _help_s()}
    with one_line_errors("bench_trainers"):
        for name in filter(None, models.split(",")):
            found["steps"][name] = step_seconds(name, kinds, steps)
            print(f"{name}: done", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            for kind in kinds:
                found["agents"][kind] = agent_figures(kind, Path(folder) / kind, rounds)
    if found["steps"]:
        console.print(_steps_table(found["steps"]))
    console.print(_agents_table(found["agents"]))
    console.print(f"edge-agent --help: {found['help_s']:.2f} s")
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
