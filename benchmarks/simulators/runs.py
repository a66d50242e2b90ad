"""One run of a workload by a simulator, measured from outside its process."""

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
_WARM = 2  # first rounds, which do not count


class RunFailed(Exception):  # noqa: N818 - a reason for a missing row, not a failure of ours
    """A simulator failed before its last round."""


@dataclass(frozen=True)
class Run:
    """Cost of one run.

    Attributes:
        configuration, workload, repeat: what ran.
        ended_s: end of each round, in seconds since the process was started.
        processor_s: processor seconds until then, of the process and its children.
        memory_bytes: maximum; shared pages count once (PSS).
        accuracy: accuracy of the final model on samples that no device has, 0 to 1.
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
        """Seconds from the command to the end of the first round."""
        return self.ended_s[0]

    @property
    def round_s(self) -> float:
        """Median duration of a round in seconds; the first rounds, which warm up, do not count."""
        return float(median(np.diff(self.ended_s[_WARM - 1 :])))

    @property
    def round_processor_s(self) -> float:
        """Mean processor time of the same rounds in seconds; this clock is too coarse for a median."""
        return float(np.diff(self.processor_s[_WARM - 1 :]).mean())


def run(configuration: Configuration, python: Path, workload: Path, repeat: int, device: str = "cpu") -> Run:
    """Run a workload and measure it.

    Args:
        configuration: the simulator.
        python: interpreter of its script.
        workload: folder of the workload.
        repeat: number of this run.
        device: torch device, e.g. cpu.

    Raises:
        RunFailed: it failed; the message is its last line.
    """
    name = json.loads((workload / "workload.json").read_bytes())["name"]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        with _started(configuration, python, workload, Path(folder), device) as process:
            rounds = rounds_of(process, began)
        if process.returncode or len(rounds.ended_s) <= _WARM:
            raise RunFailed(_last_line(Path(folder) / "said"))
        accuracy = _accuracy(Path(folder), workload)
        measured = rounds.ended_s, rounds.processor_s, rounds.memory_bytes
        return Run(configuration.name, name, repeat, *measured, accuracy)


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
    if device == "cpu":  # pfl would use a GPU by default
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if configuration.packages:
        del variables["PYTHONPATH"]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=said, text=True
        )


def _last_line(file: Path) -> str:
    return next(
        (line for line in reversed(file.read_text().splitlines()) if line.strip()), "it printed no reason"
    )


def _accuracy(folder: Path, workload: Path) -> float:
    """Accuracy of the model that a simulator left, on samples that no device has."""
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


def save(done: Run, path: Path) -> None:
    """Write a finished run to a file."""
    write_atomically(path, json.dumps(asdict(done)).encode(), mode=None)


def saved(path: Path) -> Run | None:
    """Read an earlier run, or None."""
    return Run(**json.loads(path.read_bytes())) if path.exists() else None
