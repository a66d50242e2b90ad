"""Memory and time of three agents and a coordinator that train large models over MQTT.

    python -m benchmarks.model_memory --sizes 10000,10000000
    python -m benchmarks.model_memory --sizes 10000,10000000 --trainer torch

Each size starts a broker, a coordinator and three agents on loopback, one process each. They train the
built-in `mlp` with FedAvg and SGD without momentum for two rounds. The number of inputs sets the number of
parameters. An agent resets its peak before each round, so VmHWM is read all the time and the maximum counts.
"""

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.processes import memory_mb, started, wait_for
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.edge_agent.datasets.npz import write_npz
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key

AGENTS, SAMPLES, BATCH_SIZE, OUTPUTS = 3, 16, 4, 10
_WIDTH, _LOOK_EVERY_S = 64, 0.02
PATIENCE_S = 3600  # a run with 100 million parameters takes minutes
# parameters of the mlp (64 and 32 units) behind its first matrix
_OTHERS = _WIDTH + _WIDTH * 32 + 32 + 32 * OUTPUTS + OUTPUTS

RUN_TOML = """
[run]
name = "large"
rounds = {rounds}
[model]
name = "mlp"
input_shape = [{inputs}]
num_classes = {outputs}
[method]
name = "{method}"
{settings}
[training]
epochs = 1
batch_size = {batch_size}
learning_rate = 0.001
[data]
mean = 0.5
std = 0.3
[round]
start_with = {agents}
deadline_s = 3600
[encoding]
{encoding}
"""


@dataclass(frozen=True)
class Measured:
    """Figures of one run.

    Attributes:
        parameters: number of the model's parameters.
        trainer: trainer of the agents.
        method: the run's method.
        agent_mb, coordinator_mb: peak memory (VmHWM, 10^6 bytes); the largest of the agents.
        seconds: from the start of the coordinator until every agent has finished the run.
        forecast_mb: peak that an agent predicted before the first round.
        reported_mb: peak that the same agent measured in that round.
        agent_phases_mb: peak of the largest agent until each line of its log.
    """

    parameters: int
    trainer: str
    method: str
    agent_mb: float
    coordinator_mb: float
    seconds: float
    forecast_mb: float
    reported_mb: float
    agent_phases_mb: dict[str, float]


class Peak:
    """Reads a process's peak memory in a thread, because the process resets it."""

    def __init__(self, pid: int, log: Path) -> None:
        self._pid, self._log, self._over = pid, log, threading.Event()
        self.phases: dict[str, float] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def highest_mb(self) -> float:
        """Stop reading and return the maximum in megabytes."""
        self._over.set()
        self._thread.join()
        return max(self.phases.values())

    def _look(self) -> None:
        while not self._over.is_set():
            lines = self._log.read_text(errors="replace").splitlines() or [""]
            phase = f"{len(lines)} {lines[-1][24:84]}"
            now = memory_mb(self._pid, "VmHWM")
            self.phases[phase] = max(now, self.phases.get(phase, 0.0))
            self._over.wait(_LOOK_EVERY_S)


def inputs_of(parameters: int) -> int:
    """Return how many inputs give the `mlp` about this many parameters."""
    return max(1, round((parameters - _OTHERS) / _WIDTH))


def measured(
    parameters: int, folder: Path, *, trainer: str, method: str, settings: str, encoding: str, rounds: int
) -> Measured:
    """Run a fleet whose model has this many parameters and return its figures."""
    folder.mkdir()
    inputs = inputs_of(parameters)
    draw = Key.of("model memory").generator()
    for number in range(AGENTS):
        x = draw.integers(0, 256, (SAMPLES, inputs), np.uint8)
        write_npz(folder / f"{number}.npz", {"x": x, "y": np.arange(SAMPLES) % OUTPUTS})
    del x
    run_file = folder / "run.toml"
    run_file.write_text(
        RUN_TOML.format(
            rounds=rounds,
            inputs=inputs,
            outputs=OUTPUTS,
            method=method,
            settings=settings,
            batch_size=BATCH_SIZE,
            agents=AGENTS,
            encoding=encoding,
        )
    )
    with EmbeddedBroker.start(folder / "broker") as broker, ExitStack() as stack:
        address = ["--broker", f"{broker.host}:{broker.port}"]
        peaks = []
        for number in range(AGENTS):
            words = ["fleetune.edge_agent.cli", "run", "--fleet", "large", "--device", f"d{number}", *address]
            words += ["--trainer", trainer, "--data", f"npz:{folder / f'{number}.npz'}"]
            log = folder / f"agent-{number}.log"
            agent = stack.enter_context(started([*words, "--state", str(folder / "state")], log))
            peaks.append(Peak(agent.pid, log))
        serve = ["fleetune.coordinator.cli", "serve", str(run_file), "--runs", str(folder / "runs")]
        began, log = time.monotonic(), folder / "coordinator.log"
        coordinator = stack.enter_context(started([*serve, *address], log))
        server_peak = Peak(coordinator.pid, log)
        for number in range(AGENTS):
            wait_for(folder / f"agent-{number}.log", "is finished", PATIENCE_S)
        seconds = time.monotonic() - began
        largest = max(peaks, key=lambda peak: peak.highest_mb())
        server_peak.highest_mb()
    count = inputs * _WIDTH + _OTHERS
    phases = largest.phases | {f"coordinator: {name}": mb for name, mb in server_peak.phases.items()}
    return Measured(
        count,
        trainer,
        method,
        largest.highest_mb(),
        server_peak.highest_mb(),
        seconds,
        *_forecast_mb(folder / "runs"),
        phases,
    )


def _forecast_mb(runs: Path) -> tuple[float, float]:
    """Return the predicted and the measured peak of the first agent in the first round."""
    (journal,) = runs.glob("*/rounds.jsonl")
    devices = json.loads(journal.read_text().splitlines()[0])["devices"]
    costs = next(iter(devices.values()))
    return costs["predicted"]["memory_bytes"] / 1e6, costs["actual"]["memory_bytes"] / 1e6


def bytes_per_parameter(found: list[Measured], of: str) -> list[float]:
    """Return the bytes that each further parameter takes above the smallest model, for each run."""
    base = min(found, key=lambda one: one.parameters)
    return [
        1e6 * (getattr(one, of) - getattr(base, of)) / max(1, one.parameters - base.parameters)
        for one in found
    ]


def results_of(found: list[Measured], rounds: int) -> dict[str, Any]:
    """Return a table for docs/results."""
    rates = zip(
        bytes_per_parameter(found, "agent_mb"), bytes_per_parameter(found, "coordinator_mb"), strict=True
    )
    rows = [
        [
            f"{one.parameters:,}",
            {"onnx": "ONNX Runtime"}.get(one.trainer, one.trainer),
            f"{one.agent_mb:,.0f} MB",
            f"{agent:.1f}",
            f"{one.coordinator_mb:,.0f} MB",
            f"{coordinator:.1f}",
            f"{one.seconds:,.0f} s",
        ]
        for one, (agent, coordinator) in zip(found, rates, strict=True)
    ]
    return {
        "columns": [
            "parameters",
            "trainer",
            "agent",
            "bytes a parameter",
            "coordinator",
            "bytes a parameter",
            f"{rounds} rounds and final evaluation",
        ],
        "rows": rows,
    }


def _table(found: list[Measured]) -> Table:
    table = Table(title="peak memory of large models, MB")
    for title in ("parameters", "agent", "bytes a parameter", "coordinator", "bytes a parameter", "seconds"):
        table.add_column(title, justify="right")
    rates = zip(
        bytes_per_parameter(found, "agent_mb"), bytes_per_parameter(found, "coordinator_mb"), strict=True
    )
    for one, (agent, coordinator) in zip(found, rates, strict=True):
        table.add_row(
            f"{one.parameters:,}",
            f"{one.agent_mb:.0f}",
            f"{agent:.1f}",
            f"{one.coordinator_mb:.0f}",
            f"{coordinator:.1f}",
            f"{one.seconds:.0f}",
        )
    return table


def main(
    sizes: Annotated[str, typer.Option(help="comma-separated numbers of parameters")] = "10000,10000000",
    trainer: Annotated[str, typer.Option(help="onnx or torch")] = "onnx",
    method: Annotated[str, typer.Option(help="name of the method")] = "fedavg",
    settings: Annotated[str, typer.Option(help="further lines of [method]")] = "",
    encoding: Annotated[str, typer.Option(help="lines of [encoding]")] = "",
    rounds: Annotated[int, typer.Option(help="of each run")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="folder of files and logs; else a temporary one")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
    table: Annotated[Path | None, typer.Option(help="JSON file of a table, as in docs/results")] = None,
) -> None:
    """Measure the memory of agents and coordinator with models of growing size."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    with one_line_errors("model_memory"), tempfile.TemporaryDirectory(dir=folder) as place:
        for size in map(int, sizes.split(",")):
            one = measured(
                size,
                Path(place) / str(size),
                trainer=trainer,
                method=method,
                settings=settings,
                encoding=encoding,
                rounds=rounds,
            )
            found.append(one)
            print(json.dumps(asdict(one), indent=1), file=sys.stderr)
    Console().print(_table(found))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    if table is not None:
        table.write_text(json.dumps(results_of(found, rounds), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
