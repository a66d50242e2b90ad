"""Processes of a fleet that a benchmark starts, waits for by what they log, and looks at."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 600  # other work may have the processors


@contextmanager
def started(module: list[str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A Python module with its arguments as a process, which is ended on leaving; it writes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-P", "-m", *module], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_for(log: Path, words: str) -> None:
    """Return once the log has these words.

    Raises:
        SystemExit: it had not within `PATIENCE_S`.
    """
    give_up_at = time.monotonic() + PATIENCE_S
    while words not in log.read_text():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"never said {words!r}: {log.read_text()[-500:]}")
        time.sleep(0.01)


def memory_mb(pid: int, what: str) -> float:
    """What /proc/PID/status says of VmRSS or VmHWM, in megabytes of 1e6 bytes; NaN where it says nothing."""
    text = Path(f"/proc/{pid}/status").read_text()
    kilobytes = re.search(rf"{what}:\s+(\d+)", text)
    return int(kilobytes.group(1)) * 1024 / 1e6 if kilobytes else float("nan")
