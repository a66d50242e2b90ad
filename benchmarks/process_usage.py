"""What a process and all that it started take, as the system tells it; and what machine that is."""

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
    """Of a process and its children, those that have ended included."""
    total = 0.0
    for one in _family(pid):
        with suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Memory:
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


@dataclass(frozen=True)
class Rounds:
    """What a process that says so took of each round.

    Attributes:
        ended_s: when each was over, in seconds since `began`.
        processor_s: processor time by then, of the process and all that it started.
        memory_bytes: at its highest, shared pages counted once (PSS).
    """

    ended_s: list[float]
    processor_s: list[float]
    memory_bytes: int


def rounds_of(process: "subprocess.Popen[str]", began: float, most: int | None = None) -> Rounds:
    """Look at it while it writes a line `round ...` when one is over.

    Args:
        process: its output is a pipe.
        began: `time.perf_counter()` when it did.
        most: after so many it is killed; None: it comes to its end.
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
    """In words: its processor, and how many cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
