"""One play of a workload by a simulator: a process, looked at from outside."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread

import numpy as np
import psutil

from fleetune.protocols.files import write_atomically
from fleetune.tools.bench.simulator.environments import Player

_SCRIPTS = Path(__file__).parent / "players"
_WARM = 2  # rounds that do not count for the time of a round
_SAMPLED_EVERY_S = 0.5


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


def play(player: Player, python: Path, workload: Path, repeat: int) -> Played:
    """Play it.

    Raises:
        PlayFailed: it did not come to the end; the last thing it said.
    """
    name = json.loads((workload / "workload.json").read_bytes())["name"]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        ended, processor = [], []
        with _started(player, python, workload, Path(folder)) as process:
            memory = _Memory(process.pid)
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                if line.startswith("round "):
                    ended.append(time.perf_counter() - began)
                    processor.append(_processor_s(process.pid))
            highest = memory.highest()
        if process.returncode or len(ended) <= _WARM:
            raise PlayFailed(_last_line(Path(folder) / "said"))
        accuracy = _accuracy(Path(folder), workload)
        return Played(player.name, name, repeat, ended, processor, highest, accuracy)


def _started(player: Player, python: Path, workload: Path, folder: Path) -> "subprocess.Popen[str]":
    command = [str(python)]
    if player.by_torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={player.processes}"]
    command += [str(_SCRIPTS / player.script), str(workload.resolve()), str(player.processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if player.packages:
        environment.pop("PYTHONPATH", None)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        )


def _last_line(file: Path) -> str:
    return next((line for line in reversed(file.read_text().splitlines()) if line.strip()), "it said nothing")


def _family(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def _processor_s(pid: int) -> float:
    """Of a process and its children, those that have ended included."""
    total = 0.0
    for one in _family(pid):
        with suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class _Memory:
    """Looks at how much memory a process and its children have."""

    def __init__(self, pid: int) -> None:
        self._pid, self._highest, self._over = pid, 0, Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def highest(self) -> int:
        """So far; it looks no more."""
        self._over.set()
        self._thread.join()
        return self._highest

    def _look(self) -> None:
        while not self._over.wait(_SAMPLED_EVERY_S):
            total = 0
            for one in _family(self._pid):
                with suppress(psutil.Error):
                    total += one.memory_full_info().pss
            self._highest = max(self._highest, total)


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
    write_atomically(path, json.dumps(asdict(played)).encode())


def recalled(path: Path) -> Played | None:
    """A play of before."""
    return Played(**json.loads(path.read_bytes())) if path.exists() else None
