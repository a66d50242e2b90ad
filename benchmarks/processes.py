"""Start processes of a fleet, wait for lines of their logs, and read their memory."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 600  # other programs may use the processors


@contextmanager
def started(module: list[str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a Python module with its arguments as a process that writes to `log`; end it on exit."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-P", "-m", *module], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_for(log: Path, words: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until the log contains these words.

    Raises:
        SystemExit: `patience_s` seconds passed without them.
    """
    give_up_at = time.monotonic() + patience_s
    while words not in log.read_text():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"the log never contained {words!r}: {log.read_text()[-500:]}")
        time.sleep(0.01)


def memory_mb(pid: int, what: str) -> float:
    """VmRSS or VmHWM of /proc/PID/status in megabytes of 1e6 bytes; NaN if it is missing."""
    text = Path(f"/proc/{pid}/status").read_text()
    kilobytes = re.search(rf"{what}:\s+(\d+)", text)
    return int(kilobytes.group(1)) * 1024 / 1e6 if kilobytes else float("nan")
