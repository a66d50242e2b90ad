"""Checks the machine's Python and its clock."""

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from fleetune.edge_agent.doctor.check_result import CheckResult

EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)  # first plausible year: earlier ones are before this program
LATEST = datetime(2100, 1, 1, tzinfo=UTC)
_TIME_ERROR = 5  # result of adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than the size of its structure

KernelClock = Callable[[], bool | None]


def python(
    bits: int = sys.maxsize.bit_length() + 1, machine: str = platform.machine()
) -> Iterator[CheckResult]:
    """Check that Python has 64 bits, because the trainers have no packages for 32-bit ARM."""
    found = f"{platform.python_version()}, {bits} bit on {machine}"
    if bits < 64:
        remedy = "install the board's 64-bit system; the trainers have no 32-bit packages"
        yield CheckResult("fail", "python", found, remedy)
    else:
        yield CheckResult("ok", "python", found)


def kernel_clock() -> bool | None:
    """True if the kernel's clock is synchronised, by adjtimex(2); None if unknown."""
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
    """Check that the year is plausible and the clock is synchronised. MQTT offers no time to compare with.

    Args:
        root: folder in which `proc`, `sys` and `run` lie.
        matters: True if certificates are checked by this clock.
        now: returns the seconds since 1970.
        kernel: returns whether the kernel's clock is synchronised.
    """
    at = datetime.fromtimestamp(now(), UTC)
    found = f"{at:%Y-%m-%d %H:%M} UTC"
    effect = "valid certificates may be refused" if matters else "training works, but the log has wrong times"
    if not EARLIEST <= at < LATEST:
        remedy = "turn on time synchronisation, or set the clock: sudo date -s '2026-01-31 12:00'"
        yield CheckResult(
            "fail" if matters else "warn", "clock", f"{found} cannot be right; {effect}", remedy
        )
        return
    keeper = _keeper(root, kernel)
    if keeper is not None:
        yield CheckResult("ok", "clock", f"{found}, {keeper}")
        return
    remedy = "sudo timedatectl set-ntp true, or install chrony"
    text = f"{found}, perhaps not synchronised; if it is wrong, {effect}"
    yield CheckResult("warn", "clock", text, remedy)


def _keeper(root: Path, kernel: KernelClock) -> str | None:
    """Text that says what synchronises the clock; None if nothing known does."""
    if (root / "run/systemd/timesync/synchronized").exists():
        return "synchronised by systemd-timesyncd"
    if root == Path("/") and kernel():
        return "synchronised"
    if (root / "run/chrony/chronyd.pid").exists():
        return "synchronised by chrony"
    return None
