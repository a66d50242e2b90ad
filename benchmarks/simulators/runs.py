"""One play of a workload by a simulator: a process, looked at from outside."""

import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks import environment
from benchmarks.process_usage import rounds_of
from benchmarks.simulators.configurations import Configuration
from fleetune.protocols.files import write_atomically

_SCRIPTS = Path(__file__).parent / "scripts"
_WARM = 2  # rounds that do not count for the time of a round


class RunFailed(Exception):  # noqa: N818 - it reports why there is no such line in the table
    """A simulator did not come to the end."""


@dataclass(frozen=True)
class Run:
    """What a play took.

    Attributes:
        configuration, workload, repeat: what was played.
        ended_s: when each round was over, in seconds since the process was started.
        processor_s: processor time by then, of the process and all that it started.
        memory_bytes: at its highest, shared pages counted once (PSS).
        accuracy: of the model at the end, on samples that nobody had; 0 to 1.
    """

    configuration: str
    workload: str
    repeat: int
    ended_s: list[float]
    processor_s: list[float]
    memory_bytes: int
    accuracy: float

    @property
    def first_s(self) -> float:
        """From the command until the first round is over."""
        return self.ended_s[0]

    @property
    def round_s(self) -> float:
        """The median of the rounds after the first few."""
        return float(median(np.diff(self.ended_s[_WARM - 1 :])))

    @property
    def round_processor_s(self) -> float:
        """Their mean: this clock is too coarse for a single one."""
        return float(np.diff(self.processor_s[_WARM - 1 :]).mean())


def run(configuration: Configuration, python: Path, workload: Path, repeat: int, device: str = "cpu") -> Run:
    """Play it.

    Args:
        configuration: who does.
        python: that runs its script.
        workload: its folder.
        repeat: the number of this play.
        device: that torch trains on, by its name for it.

    Raises:
        RunFailed: it did not come to the end; the last thing it said.
    """
    name = json.loads((workload / "workload.json").read_bytes())["name"]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        with _started(configuration, python, workload, Path(folder), device) as process:
            rounds = rounds_of(process, began)
        if process.returncode or len(rounds.ended_s) <= _WARM:
            raise RunFailed(_last_line(Path(folder) / "said"))
        accuracy = _accuracy(Path(folder), workload)
        looked_at = rounds.ended_s, rounds.processor_s, rounds.memory_bytes
        return Run(configuration.name, name, repeat, *looked_at, accuracy)


def _started(
    configuration: Configuration, python: Path, workload: Path, folder: Path, device: str
) -> "subprocess.Popen[str]":
    command = [str(python)]
    if configuration.by_torchrun:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={configuration.processes}",
        ]
    command += [str(_SCRIPTS / configuration.script), str(workload.resolve()), str(configuration.processes)]
    command += configuration.arguments
    variables = {**environment(), "MKL_NUM_THREADS": "1", "BENCH_DEVICE": device}
    if device == "cpu":  # pfl would take a card without being asked
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if configuration.packages:
        del variables["PYTHONPATH"]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=said, text=True
        )


def _last_line(file: Path) -> str:
    return next((line for line in reversed(file.read_text().splitlines()) if line.strip()), "it said nothing")


def _accuracy(folder: Path, workload: Path) -> float:
    """Of the model that a configuration left, on samples that no device has."""
    import torch
    from safetensors.torch import load_file

    module = torch.load(workload / "module.pt", weights_only=False)
    if (folder / "model.npz").exists():
        with np.load(folder / "model.npz") as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    else:
        tensors = load_file(folder / "model.safetensors")
    module.load_state_dict(tensors)
    with np.load(workload / "unseen.npz") as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    with torch.inference_mode():
        found = torch.cat([module.eval()(part).argmax(1) for part in torch.split(x, 1000)])
    return float((found == y).double().mean())


def save(played: Run, path: Path) -> None:
    """Write a play down."""
    write_atomically(path, json.dumps(asdict(played)).encode(), mode=None)


def saved(path: Path) -> Run | None:
    """A play of before."""
    return Run(**json.loads(path.read_bytes())) if path.exists() else None
