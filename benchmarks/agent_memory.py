"""Peak memory of an agent that trains with ONNX Runtime, for each kind of task.

    python -m benchmarks.agent_memory

Each case starts a broker, a coordinator and an agent on loopback. The agent trains a few rounds, is
evaluated, and stays. Memory is VmRSS before the first run and VmHWM after the last round. Other load on the
machine does not change it.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.processes import memory_mb, started, wait_for
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.run.models import find_model
from fleetune.edge_agent.datasets.npz import write_npz
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import read_run

IMAGE, SERIES, WORDS = (1, 28, 28), (3, 168), (48,)
OUTPUTS = 10
LIMIT_MB = 120

RUN_TOML = """
[run]
name = "memory"
rounds = {rounds}
[task]
kind = "{case.task}"
[model]
name = "{case.model}"
input_shape = {shape}
num_classes = {outputs}
{case.part}
[method]
name = "fedavg"
[training]
epochs = 1
batch_size = 16
learning_rate = 0.01
{case.training}
[round]
start_with = 1
deadline_s = 600
{case.sections}
"""


@dataclass(frozen=True)
class Case:
    """One measured run: task, model, and further features of the agent.

    Attributes:
        part: lines of [model]; they name `pretrained.safetensors` if a part is frozen.
        training, sections: lines of [training], and further sections.
        watched: True if the samples come from a watched folder.
    """

    task: str = "classification"
    model: str = "lenet5"
    shape: tuple[int, ...] = IMAGE
    part: str = ""
    training: str = ""
    sections: str = ""
    watched: bool = False


ADOPTION = "[adoption]\nenabled = true"
HEAD = 'weights = "pretrained.safetensors"\ntrainable = ["out"]'
INT8 = '\nbackbone = "int8"'
CASES = {
    "classification": Case(),
    "multi-label": Case("multi-label"),
    "regression": Case("regression"),
    "forecast": Case("forecast", "mlp", SERIES),
    "reconstruction": Case("reconstruction", "autoencoder"),
    "text": Case("classification", "text-embedding", WORDS),
    "classification, adamw kept on the device": Case(
        training='optimiser = "adamw"\noptimiser_state = "device"'
    ),
    "classification, adoption": Case(sections=ADOPTION),
    "forecast, adoption": Case("forecast", "mlp", SERIES, sections=ADOPTION),
    "reconstruction, adoption": Case("reconstruction", "autoencoder", sections=ADOPTION),
    "classification, watched folder": Case(watched=True),
    "reconstruction, watched folder, adoption": Case(
        "reconstruction", "autoencoder", sections=ADOPTION, watched=True
    ),
    "head of a frozen LeNet-5, features": Case(part=HEAD),
    "head of a frozen LeNet-5, no features": Case(part=HEAD, training='augment = "flip"'),
    "head of a frozen ResNet-8, features": Case(model="resnet8", part=HEAD),
    "head of a frozen ResNet-8 of int8, features": Case(model="resnet8", part=HEAD + INT8),
    "head of a frozen ResNet-8 of int8, no features": Case(
        model="resnet8", part=HEAD + INT8, training='augment = "flip"'
    ),
    "head of a frozen ResNet-8, no features": Case(model="resnet8", part=HEAD, training='augment = "flip"'),
}


def samples_of(case: Case, count: int) -> dict[str, NDArray[Any]]:
    """Synthetic samples in the task's form: images as bytes, series and token ids as numbers."""
    draw = Key.of("memory").generator()
    x: NDArray[Any]
    if case.shape == IMAGE:
        x = draw.integers(0, 256, (count, *IMAGE)).astype(np.uint8)
    elif case.shape == WORDS:
        x = draw.integers(0, 8192, (count, *WORDS)).astype(np.float32)
    else:
        x = draw.standard_normal((count, *case.shape)).astype(np.float32)
    labels: dict[str, NDArray[Any]] = {
        "classification": np.arange(count) % OUTPUTS,
        "multi-label": draw.integers(0, 2, (count, OUTPUTS)),
        "regression": draw.standard_normal((count, OUTPUTS)).astype(np.float32),
        "forecast": draw.standard_normal((count, OUTPUTS)).astype(np.float32),
    }
    return {"x": x} if case.task == "reconstruction" else {"x": x, "y": labels[case.task]}


def agent_memory(case: Case, folder: Path, rounds: int, samples: int) -> dict[str, float]:
    """Return the megabytes of one real agent: idle before its first run, at its peak, idle after it."""
    folder.mkdir()
    watched = folder / "samples"
    watched.mkdir()
    write_npz(watched / "samples.npz", samples_of(case, samples))
    outputs = int(np.prod(case.shape)) if case.task == "reconstruction" else OUTPUTS
    toml = RUN_TOML.format(case=case, rounds=rounds, shape=list(case.shape), outputs=outputs)
    toml = toml.replace("pretrained.safetensors", str(folder / "pretrained.safetensors"))
    run_file, log = folder / "run.toml", folder / "agent.log"
    run_file.write_text(toml)
    parameters = _write_pretrained(run_file, toml, folder / "pretrained.safetensors")
    with EmbeddedBroker.start(folder / "broker") as broker:
        address = ["--broker", f"{broker.host}:{broker.port}"]
        command = ["fleetune.edge_agent.cli", "run", "--fleet", "memory", "--device", "d", *address]
        data = f"watch:{watched}" if case.watched else f"npz:{watched / 'samples.npz'}"
        command += ["--trainer", "onnx", "--data", data, "--state", str(folder / "state")]
        with started(command, log) as agent:
            wait_for(log, "connected;")
            idle = memory_mb(agent.pid, "VmRSS")
            serve = ["fleetune.coordinator.cli", "serve", str(run_file), "--runs", str(folder / "runs")]
            with started([*serve, *address], folder / "coordinator.log"):
                wait_for(log, "is finished")
            time.sleep(1)  # time for its clean-up
            return {
                "parameters": parameters,
                "idle before its first run, MB": idle,
                "idle after a run, MB": memory_mb(agent.pid, "VmRSS"),
                "peak, MB": memory_mb(agent.pid, "VmHWM"),
            }


def _write_pretrained(run_file: Path, toml: str, path: Path) -> int:
    """Write a model's first weights, from which frozen tensors are read; return its parameter count."""
    from safetensors.numpy import save_file

    whole = "\n".join(
        line for line in toml.splitlines() if not line.startswith(("weights", "trainable", "backbone"))
    )
    run_file.with_name("whole.toml").write_text(whole)
    found = find_model(read_run(run_file.with_name("whole.toml")))
    save_file({tensor.name: view.copy() for tensor, view in found.spec.views(found.weights)}, path)
    return int(found.weights.size)


def _table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="an agent that trains with ONNX Runtime, MB")
    table.add_column("case")
    for title in ("parameters", "idle before", "idle after", "peak"):
        table.add_column(title, justify="right")
    for name, figures in found.items():
        parameters, *megabytes = figures.values()
        table.add_row(name, f"{parameters:,.0f}", *(f"{figure:.0f}" for figure in megabytes))
    return table


def main(
    rounds: Annotated[int, typer.Option(help="of each agent")] = 3,
    samples: Annotated[int, typer.Option(help="of each agent")] = 1000,
    only: Annotated[str, typer.Option(help="cases whose name has this")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
) -> None:
    """Measure an agent's memory in each case; exit with 1 if one needs 120 MB or more."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[str, float]] = {}
    with one_line_errors("agent_memory"), tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            if only in name:
                found[name] = agent_memory(case, Path(folder) / str(number), rounds, samples)
                print(f"{name}: {found[name]['peak, MB']:.0f} MB", file=sys.stderr)
    Console().print(_table(found))
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    if any(figures["peak, MB"] >= LIMIT_MB for figures in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
