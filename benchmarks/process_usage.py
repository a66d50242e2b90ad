"""Time and memory of a process and its children, read from the operating system."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil

_SAMPLED_EVERY_S = 0.5


def _family(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def processor_s(pid: int) -> float:
    """Processor seconds of a process and its children, including children that have ended."""
    total = 0.0
    for one in _family(pid):
        with suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Memory:
    """Samples the memory of a process and its children in a thread."""

    def __init__(self, pid: int) -> None:
        self._pid, self._highest, self._over = pid, 0, Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def highest(self) -> int:
        """Stop sampling and return the maximum, in bytes."""
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


@dataclass(frozen=True)
class Rounds:
    """Time and memory of each round of a process.

    Attributes:
        ended_s: end of each round, in seconds since `began`.
        processor_s: processor seconds until then, of the process and its children.
        memory_bytes: maximum; shared pages count once (PSS).
    """

    ended_s: list[float]
    processor_s: list[float]
    memory_bytes: int


def rounds_of(process: "subprocess.Popen[str]", began: float, most: int | None = None) -> Rounds:
    """Measure a process that prints a line `round ...` after each round.

    Args:
        process: started with a pipe as its output.
        began: `time.perf_counter()` when it was started.
        most: kill it after this many rounds; None: let it finish.
    """
    memory, ended, processor = Memory(process.pid), list[float](), list[float]()
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        if line.startswith("round "):
            ended.append(time.perf_counter() - began)
            processor.append(processor_s(process.pid))
        if len(ended) == most:
            process.kill()
            break
    return Rounds(ended, processor, memory.highest())


def machine() -> str:
    """The processor of this machine and its number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
