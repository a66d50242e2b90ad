"""Checks the machine's Python and its clock."""

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from fleetune.edge_agent.doctor.check_result import CheckResult

LEAST_PYTHON = (3, 11)
EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)  # first plausible year: earlier ones are before this program
LATEST = datetime(2100, 1, 1, tzinfo=UTC)
_TIME_ERROR = 5  # result of adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than the size of its structure

KernelClock = Callable[[], bool | None]


def python(
    version: tuple[int, ...] = sys.version_info[:3],
    bits: int = sys.maxsize.bit_length() + 1,
    machine: str = platform.machine(),
) -> Iterator[CheckResult]:
    """Check that Python is new enough and has 64 bits. numpy, msgspec and trainers have no 32-bit ARM
    packages.
    """
    found = f"{'.'.join(map(str, version))}, {bits} bit on {machine}"
    if version[:2] < LEAST_PYTHON:
        yield CheckResult("fail", "python", found, "install Python 3.11 or newer, and this program in it")
    elif bits < 64:
        yield CheckResult("fail", "python", found, "install the board's 64-bit system: its trainers need it")
    else:
        yield CheckResult("ok", "python", found)


def kernel_clock() -> bool | None:
    """True if the kernel considers its clock synchronised (adjtimex(2)). None: unknown."""
    if sys.platform != "linux":
        return None
    status = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if status < 0 else status != _TIME_ERROR


def clock(
    root: Path,
    *,
    matters: bool,
    now: Callable[[], float] = time.time,
    kernel: KernelClock = kernel_clock,
) -> Iterator[CheckResult]:
    """Check that the year is plausible and the clock is synchronised. MQTT has no time to compare with.

    Args:
        root: folder in which `proc`, `sys` and `run` lie.
        matters: True if certificates depend on this clock.
        now: seconds since 1970.
        kernel: tells if the kernel's clock is synchronised.
    """
    at = datetime.fromtimestamp(now(), UTC)
    found = f"{at:%Y-%m-%d %H:%M} UTC"
    why = (
        "certificates are checked by this clock"
        if matters
        else "the log's times are wrong, but training works"
    )
    if not EARLIEST <= at < LATEST:
        remedy = "turn on time synchronisation, or set the clock: sudo date -s '2026-01-31 12:00'"
        yield CheckResult("fail" if matters else "warn", "clock", f"{found} is impossible; {why}", remedy)
        return
    keeper = _keeper(root, kernel)
    if keeper is not None:
        yield CheckResult("ok", "clock", f"{found}, {keeper}")
        return
    remedy = "sudo timedatectl set-ntp true, or install chrony"
    yield CheckResult("warn", "clock", f"{found}, maybe not synchronised; if it is wrong, {why}", remedy)


def _keeper(root: Path, kernel: KernelClock) -> str | None:
    """What synchronises the clock, in words. None: nothing known does."""
    if (root / "run/systemd/timesync/synchronized").exists():
        return "synchronised by systemd-timesyncd"
    if root == Path("/") and kernel():
        return "synchronised"
    if (root / "run/chrony/chronyd.pid").exists():
        return "kept by chrony"
    return None
