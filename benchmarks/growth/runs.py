"""One measured simulation, and the quantities that the benchmark varies."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.process_usage import rounds_of
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.files import write_atomically

ROUNDS, WARM = 8, 2  # rounds of a run; the first WARM are not counted
DEVICES, PARTICIPANTS = 1000, 10  # unless they are varied


@dataclass(frozen=True)
class Axis:
    """A quantity that the benchmark varies.

    Attributes:
        name: the quantity, shown on the horizontal axis.
        values: its values, ascending.
    """

    name: str
    values: Sequence[int]

    def settings(self, value: int) -> dict[str, Any]:
        """Settings of the run with this value, by `section.key`."""
        devices = value if self.name == "devices" else DEVICES
        participants = value if self.name == "participants" else PARTICIPANTS
        model = "mlp"
        if self.name == "parameters":
            devices = participants = PARTICIPANTS
            model = f"benchmarks.growth.networks:p{len(str(value)) - 1}"
        return {
            "model.name": model,
            "fleet.devices": devices,
            "fleet.boards": {"raspberry-pi-4b": devices},
            "round.participants": participants,
        }


AXES = {
    one.name: one
    for one in (
        Axis("devices", (100, 1_000, 10_000, 100_000)),
        Axis("participants", (10, 30, 100, 300, 1_000)),
        Axis("parameters", (10**4, 10**5, 10**6, 10**7, 10**8)),
    )
}

RUN_TOML = f"""
[run]
name = "growth"
rounds = {ROUNDS}
final_evaluation = false
[data]
source = "digits"
partition = {{ kind = "mix", samples = 20 }}
[model]
name = "mlp"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "fedavg"
[training]
batch_size = 16
[fleet]
devices = {DEVICES}
ratios = [1.0]
"""


@dataclass(frozen=True)
class Run:
    """Cost of one run.

    Attributes:
        axis, value: the varied quantity and its value.
        round_s: median of the counted rounds.
        round_processor_s: mean processor seconds of all processes in the same rounds.
        first_s: seconds from the command to the end of the first round.
        memory_bytes: maximum of all processes; shared pages count once (PSS).
    """

    axis: str
    value: int
    round_s: float
    round_processor_s: float
    first_s: float
    memory_bytes: int


def run(axis: Axis, value: int, workers: int) -> Run:
    """Execute one run and measure it.

    Raises:
        FleetuneError: the run failed; the message is its last line.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").write_text(RUN_TOML)
        sets = [f"{key}={_as_toml(one)}" for key, one in axis.settings(value).items()]
        words = [one for said in sets for one in ("--set", said)]
        command = [sys.executable, "-m", "fleetune.tools.cli", "run", "run.toml", "--follow"]
        command += ["--workers", str(workers), *words]
        began = time.perf_counter()
        with (
            (Path(folder) / "said").open("w") as said,
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment(), "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            ) as process,
        ):
            found = rounds_of(process, began, ROUNDS)  # killed before its report
        if len(found.ended_s) < ROUNDS:
            lines = (Path(folder) / "said").read_text().splitlines() or ["it printed no reason"]
            raise FleetuneError(f"{axis.name} {value:,}: {lines[-1]}")
    rounds, work = (np.diff(one[WARM - 1 :]) for one in (found.ended_s, found.processor_s))
    figures = float(median(rounds)), float(work.mean()), found.ended_s[0], found.memory_bytes
    return Run(axis.name, value, *figures)


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {one}" for key, one in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def save(one: Run, path: Path) -> None:
    """Write a finished run to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(one)).encode(), mode=None)


def saved(path: Path) -> Run | None:
    """Read an earlier run, or None."""
    return Run(**json.loads(path.read_bytes())) if path.exists() else None


def exponent(runs: Sequence[Run]) -> float | None:
    """Power with which a round's processor time grows: slope of a line fitted to the logarithms.

    None for fewer than two runs.
    """
    if len(runs) < 2:
        return None
    x, y = (np.log([getattr(one, name) for one in runs]) for name in ("value", "round_processor_s"))
    return float(np.polyfit(x, y, 1)[0])
