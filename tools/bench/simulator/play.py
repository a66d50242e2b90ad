"""One play of a workload by a simulator: a process, looked at from outside."""

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from fleetune.protocols.files import write_atomically
from fleetune.tools.bench.looked_at import rounds_of
from fleetune.tools.bench.simulator.environments import Player

_SCRIPTS = Path(__file__).parent / "players"
_WARM = 2  # rounds that do not count for the time of a round


class PlayFailed(Exception):  # noqa: N818 - it reports why there is no such line in the table
    """A simulator did not come to the end."""


@dataclass(frozen=True)
class Played:
    """What a play took.

    Attributes:
        player, workload, repeat: what was played.
        ended_s: when each round was over, in seconds since the process was started.
        processor_s: processor time by then, of the process and all that it started.
        memory_bytes: at its highest, shared pages counted once (PSS).
        accuracy: of the model at the end, on samples that nobody had; 0 to 1.
    """

    player: str
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


def play(player: Player, python: Path, workload: Path, repeat: int, device: str = "cpu") -> Played:
    """Play it.

    Args:
        player: who does.
        python: that runs its script.
        workload: its folder.
        repeat: the number of this play.
        device: that torch trains on, by its name for it.

    Raises:
        PlayFailed: it did not come to the end; the last thing it said.
    """
    name = json.loads((workload / "workload.json").read_bytes())["name"]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        with _started(player, python, workload, Path(folder), device) as process:
            rounds = rounds_of(process, began)
        if process.returncode or len(rounds.ended_s) <= _WARM:
            raise PlayFailed(_last_line(Path(folder) / "said"))
        accuracy = _accuracy(Path(folder), workload)
        looked_at = rounds.ended_s, rounds.processor_s, rounds.memory_bytes
        return Played(player.name, name, repeat, *looked_at, accuracy)


def _started(
    player: Player, python: Path, workload: Path, folder: Path, device: str
) -> "subprocess.Popen[str]":
    command = [str(python)]
    if player.by_torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={player.processes}"]
    command += [str(_SCRIPTS / player.script), str(workload.resolve()), str(player.processes)]
    command += player.arguments
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "BENCH_DEVICE": device}
    if device == "cpu":  # pfl would take a card without being asked
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if player.packages:
        environment.pop("PYTHONPATH", None)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        )


def _last_line(file: Path) -> str:
    return next((line for line in reversed(file.read_text().splitlines()) if line.strip()), "it said nothing")


def _accuracy(folder: Path, workload: Path) -> float:
    """Of the model that a player left, on samples that no device has."""
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
        found = torch.cat([module.eval()(part).argmax(1) for part in x.split(1000)])
    return float((found == y).double().mean())


def keep(played: Played, path: Path) -> None:
    """Write a play down."""
    write_atomically(path, json.dumps(asdict(played)).encode(), mode=None)


def recalled(path: Path) -> Played | None:
    """A play of before."""
    return Played(**json.loads(path.read_bytes())) if path.exists() else None
