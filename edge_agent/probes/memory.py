"""Reads how much memory the agent's process may take, takes now, and took at its peak.

The memory that it may take includes the memory that it has, so it can be compared with a predicted peak. Page
cache counts as free, because the kernel drops it on demand. Under a limit so tight that the libraries' own
pages are dropped, training slows down long before the process is killed. LeNet-5 steps with torch took 0.75 s
within 512 MB and 354 s within 256 MB.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fleetune.edge_agent.probes.files_and_commands import ROOT, fields, number, read_number, read_text

_MOST = 2.0**50
_UNLIMITED = 2.0**60  # cgroup v1 uses 9223372036854771712 for "no limit"
_SETTLED = 2**22  # other threads allocate between a reset and the next reading
_RESET_PEAK = b"5"  # proc(5), /proc/pid/clear_refs
_VERSIONS = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ""),
}


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process, in bytes; None if unknown.

    Attributes:
        resident: its pages in memory (RSS).
        peak: largest RSS since its start or the last reset.
        anonymous: resident pages that no file backs.
        address: its address space.
        data: the private writable part of the address space.
    """

    resident: int | None = None
    peak: int | None = None
    anonymous: int | None = None
    address: int | None = None
    data: int | None = None


def process_memory(root: Path = ROOT) -> ProcessMemory:
    """Read this process's figures in /proc/self/status."""
    status = fields(read_text(root / "proc/self/status"))
    resident, anonymous = _kib(status, "VmRSS"), _kib(status, "RssAnon")
    return ProcessMemory(
        resident=resident,
        peak=_kib(status, "VmHWM"),
        anonymous=resident if anonymous is None else anonymous + (_kib(status, "RssShmem") or 0),
        address=_kib(status, "VmSize"),
        data=_kib(status, "VmData"),
    )


def total_bytes(root: Path = ROOT) -> int | None:
    """Return the board's memory in bytes, without what the kernel reserves."""
    return _kib(fields(read_text(root / "proc/meminfo")), "MemTotal")


def cgroup_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of this process's control groups, in bytes; None if unlimited or
    unknown.
    """
    return min((limit for limit, _ in _cgroup_limits(root)), default=None)


def attainable_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may take in total: the least of available memory and limits."""
    process = process_memory(root)
    bounds = [_available(root, process), *_within_cgroups(root, process), *_within_limits(root, process)]
    return min((bound for bound in bounds if bound is not None), default=None)


class PeakMemory:
    """Measures the most memory that this process takes between `reset` and `read`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._before: int | None = None

    def reset(self) -> None:
        """Start an interval."""
        self._before = None
        permitted = _write(self._root / "proc/self/clear_refs", _RESET_PEAK)
        now = process_memory(self._root)
        if now.peak is None or now.resident is None:
            return
        if not permitted or now.peak - now.resident > _SETTLED:
            self._before = now.peak

    def read(self) -> int | None:
        """Return the peak since `reset`, in bytes. The interval continues.

        The result is None if the kernel records no peak, or cannot reset it and the earlier peak was not
        exceeded.
        """
        peak = process_memory(self._root).peak
        if peak is None or (self._before is not None and peak <= self._before):
            return None
        return peak


def _available(root: Path, process: ProcessMemory) -> int | None:
    available = _kib(fields(read_text(root / "proc/meminfo")), "MemAvailable")
    return None if available is None else available + (process.anonymous or 0)


def _within_limits(root: Path, process: ProcessMemory) -> Iterator[int]:
    """Yield the remaining bytes under `ulimit -v` and `ulimit -d`, which limit address space."""
    limits = read_text(root / "proc/self/limits") or ""
    for name, taken in (("Max address space", process.address), ("Max data size", process.data)):
        found = re.search(rf"^{name}\s+(\d+)\s", limits, re.MULTILINE)
        limit = number(found and found.group(1), 0, _MOST)
        if limit is not None and taken is not None and process.resident is not None:
            yield process.resident + max(0, int(limit) - taken)


def _within_cgroups(root: Path, process: ProcessMemory) -> Iterator[int]:
    for limit, others in _cgroup_limits(root):
        yield limit if others is None else max(0, limit - max(0, others - (process.anonymous or 0)))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int | None]]:
    """Yield each limit of a control group, and the used bytes, this process's included, that cannot be
    dropped.
    """
    for folder, kind in _cgroups(root):
        names, usage_name, prefix = _VERSIONS[kind]
        limits = [read_number(folder / name, 0, _UNLIMITED) for name in names]
        limit = min((one for one in limits if one is not None), default=None)
        if limit is None:
            continue
        usage = read_number(folder / usage_name, 0, _MOST)
        if usage is None:
            yield int(limit), None
            continue
        stat = fields(read_text(folder / "memory.stat"))
        cache = sum(
            number(stat.get(f"{prefix}{part}_file"), 0, _MOST) or 0 for part in ("active", "inactive")
        )
        yield int(limit), max(0, int(usage - cache))


def _cgroups(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's memory groups, innermost first, with their file system's type."""
    joined = _memberships(read_text(root / "proc/self/cgroup"))
    for kind, mount_root, mount_point in _mounts(read_text(root / "proc/self/mountinfo")):
        path = joined.get(kind)
        if path is None:
            continue
        inner = _below(path, mount_root)
        top = root / mount_point.relative_to("/")
        for depth in range(len(inner), -1, -1):
            yield top.joinpath(*inner[:depth]), kind


def _below(path: PurePosixPath, mount_root: PurePosixPath) -> tuple[str, ...]:
    """Return the folders from the mount's root down to this process's group.

    A container may see its own group as the root.
    """
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return ()
    return path.relative_to(mount_root).parts


def _memberships(text: str | None) -> dict[str, PurePosixPath]:
    """Return this process's group in the file systems of both versions.

    Lines are hierarchy:controllers:path.
    """
    found = {}
    for line in (text or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3 or not parts[2].startswith("/"):
            continue
        if parts[:2] == ["0", ""]:
            found["cgroup2"] = PurePosixPath(parts[2])
        elif "memory" in parts[1].split(","):
            found["cgroup"] = PurePosixPath(parts[2])
    return found


def _mounts(text: str | None) -> Iterator[tuple[str, PurePosixPath, PurePosixPath]]:
    """Yield type, root and mount point of each file system of memory groups, see proc(5),
    /proc/pid/mountinfo.
    """
    for line in (text or "").splitlines():
        left, separator, right = line.partition(" - ")
        where, what = left.split(), right.split()
        if not separator or len(where) < 5 or len(what) < 3 or what[0] not in _VERSIONS:
            continue
        paths = PurePosixPath(_unescape(where[3])), PurePosixPath(_unescape(where[4]))
        if (what[0] == "cgroup2" or "memory" in what[2].split(",")) and paths[1].is_absolute():
            yield what[0], *paths


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found.group(1), 8)), path)


def _kib(found: dict[str, str], name: str) -> int | None:
    """Return the bytes in a line like `VmRSS:  123 kB`; None if there is no such line."""
    value = number(found.get(name, "").removesuffix("kB"), 0, _MOST / 1024)
    return None if value is None else int(value) * 1024


def _write(path: Path, data: bytes) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY)  # never creates a file
    except (OSError, ValueError):
        return False
    try:
        os.write(handle, data)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
